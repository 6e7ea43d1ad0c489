"""``skip``: for a rank that does not need a unit which other ranks run (experts, multimodal towers, uneven data).

[Note: Taking part without running]
A rank that skips a unit must gather and reduce it at the same points as the other ranks. So ``_pass_by`` runs its hooks
without a forward in between: they gather, prefetch, record the order, and free. The tensors that are passed through get a
node in autograd's graph (``_Mark``), as if they were the unit's outputs. When backward reaches that node, it gathers the
unit.

The graph holds an *anchor* in place of the unit's parameters: an empty leaf tensor. Autograd computes a gradient for the
anchor at the point where it would have computed those of the parameters. The unit waits for this gradient, too. When all
gradients have come, a unit that did not run on this rank is reduced as one whose parameters are unused: [Note: Negative zero
marks an unused parameter].

[Note: Whether backward comes to a frozen module]
Backward comes to a unit's module in which nothing trains if the inputs of the ranks that run it require gradients. The
tensors that a rank skips it with say nothing of that: a batch without images has its text embeddings, where others have
images. So a rank that runs such a module writes to the process group's store whether its output requires a gradient: at most
once for either answer, until the user freezes or unfreezes parameters. A rank that skips it, and never ran it, waits until
one has written, or until all ranks are found to skip it. With replicas there are two groups: a rank asks in both, and hands
on what it reads in one to the other. It asks whatever the strategy, as backward may gather and reduce a unit that its forward
did not: after ``reshard``, or once it is unfrozen.

An answer holds as long as the same parameters train on these ranks: a checksum of them is in its key. Ranks collect garbage
at different times, so a unit is counted in its own forwards and those of its model, also when it is gone. After an error on
some ranks their counts differ, so a new model makes all ranks begin anew. If the store has both answers (a loss network on
real and on generated images), the given tensors are taken for inputs. A module of a group may be frozen, or have no
parameters, where others of the group train.
"""

from __future__ import annotations

import sys
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from flatshard._base import frames
from flatshard._comm.progress import NOBODY
from flatshard._comm.rendezvous import Rendezvous, polls
from flatshard._comm.runtime import Runtime
from flatshard._composable.autograd_hooks import receive_stand_in
from flatshard._composable.extensions import Extension, ForwardFeature
from flatshard._composable.find import unit_for, units_below, units_of
from flatshard._composable.hooks import UnitHooks, exit_forward
from flatshard._composable.module_tree import called_modules
from flatshard._composable.outputs import tensors_in
from flatshard._composable.state import Context, Forward, Unit, owner_of, unit_of
from flatshard._handle.tensors.changes import changes

Tensors = tuple[torch.Tensor, ...]


_anchors: weakref.WeakKeyDictionary[Unit, torch.Tensor] = weakref.WeakKeyDictionary()

_trained: dict[int, dict[int, int]] = {}
"""Checksums of which parameters of units train, by the number of the process group and the tag of the unit. [Note: Whether
backward comes to a frozen module]
"""


class Skip(Extension):
    """Makes units record what runs inside them, for ranks that pass by later."""

    def attach(self, unit: Unit, modules: list[nn.Module]) -> RanInside:
        if _trained.pop(unit.runtime.number, None) is not None:
            changes.note()  # so that units of other models are counted again
        return RanInside()


class RanInside(ForwardFeature):
    """The modules of units that ran inside the last forward of each module of one unit, without an error.

    Forwards with gradients and those without are apart: generation may run the decoder alone, between two training steps.
    """

    def __init__(self) -> None:
        self._modules: dict[tuple[nn.Module, bool], list[nn.Module]] = {}  # with gradients: True
        # On process groups that have nothing to do with the unit's: after how many modules of its pass they ran.
        self._elsewhere: list[tuple[int, nn.Module]] = []
        # Whether backward came to a module, on the ranks of this label, by the checksum then:
        # [Note: Whether backward comes to a frozen module]
        self._comes, self._label = dict[tuple[nn.Module, int], set[bool]](), NOBODY
        self._asked: dict[tuple[nn.Module, int], int] = {}  # how often all ranks have found that all of them skip it
        self._changes, self._looked = -1, -1  # counts of changes: when it was counted, and when its whole model was

    def __deepcopy__(self, memo: dict[int, Any]) -> RanInside:
        return RanInside()

    def after(self, forward: Forward, output: Any) -> None:
        context, elsewhere, self._elsewhere = forward.unit.context, self._elsewhere, []
        if forward.in_backward or (output is None and sys.exc_info()[1] is not None):
            return
        if torch.is_grad_enabled():
            if self._changes != changes.count or self._label is not forward.unit.handle.ranks.label:
                self.count_trained(forward.unit)
            if not _trainable_in(forward.unit, forward.module):
                self._publish(forward.unit, forward.module, output)
        order = context.latest_pass.order
        inside = [] if order[-1] is forward.module else _since(forward.module, order)
        ran_now = _merged(inside, len(order) - len(inside), elsewhere) if elsewhere else inside
        self._modules[forward.module, torch.is_grad_enabled()] = ran_now
        if len(Context.passes) > 1:
            for around in [ref() for ref in Context.passes]:
                if around is not None and around is not context and around.forwards:
                    ran = around.forwards[-1].unit.feature(RanInside)
                    assert ran is not None
                    ran._elsewhere.append((len(around.latest_pass.order), forward.module))

    def inside(self, module: nn.Module, default: list[nn.Module]) -> list[nn.Module]:
        """Return the modules that ran inside the last forward of ``module``, or ``default`` if there was none."""
        in_training = self._modules.get((module, True), default)
        return in_training if torch.is_grad_enabled() else self._modules.get((module, False), in_training)

    def _known(self, unit: Unit, module: nn.Module) -> set[bool]:
        if self._looked != changes.count or self._label is not unit.handle.ranks.label:
            self._looked = changes.count
            around = [forward.unit for forward in unit.context.forwards]
            for each in units_below([*around, unit][0].module):
                if (feature := each.feature(RanInside)) is not None:
                    feature.count_trained(each)
        return self._comes.setdefault(
            (module, sum(_trained[unit.runtime.number].values())), set()
        )  # `_key`, without a call

    def count_trained(self, unit: Unit) -> None:
        """Count in the checksum of its process group which parameters of ``unit`` train now."""
        self._changes, ranks = changes.count, unit.handle.ranks
        if self._label is not ranks.label:  # the first time, or it is on other ranks
            self._label, self._comes, self._asked = ranks.label, {}, {}
        trained = bytes([p.requires_grad for flat in unit.handle.flats for p in flat.params])
        _trained.setdefault(unit.runtime.number, {})[ranks.label.tag] = zlib.crc32(trained, ranks.label.tag)

    def _publish(self, unit: Unit, module: nn.Module, output: Any) -> None:
        """Write to the stores whether ``output`` requires a gradient, if this rank has not written that answer yet."""
        known = self._known(unit, module)
        if len(known) < 2 and (comes := any(t.requires_grad for t in tensors_in(output))) not in known:
            known.add(comes)
            for axis in _axes(unit):
                self._answers(unit, module, axis).put(str(comes), True)

    def _answers(self, unit: Unit, module: nn.Module, axis: Runtime) -> Rendezvous:
        """Return where ranks on ``axis`` write whether backward comes to ``module`` of ``unit``."""
        tag, number = unit.handle.ranks.label.tag, called_modules(unit.module).index(module)
        return Rendezvous(axis.store(), f"flatshard/comes/{tag}/{number}/{_key(unit, module)[1]}/")

    def comes(self, unit: Unit, module: nn.Module, given: bool) -> bool:
        """Return whether backward comes to ``module`` of ``unit``, in which nothing trains and which this rank skips.

        Args:
            given: whether backward would come to it if the given tensors were its inputs.

        Raises:
            RuntimeError: no rank has run the module in time.
        """
        if not (axes := _axes(unit)):
            return given
        if not (known := self._known(unit, module)):
            known |= self._await_answers(unit, module, axes)
        return given if len(known) == 2 else True in known

    def _await_answers(self, unit: Unit, module: nn.Module, axes: list[Runtime]) -> set[bool]:
        """Return the answers of other ranks, or none if all ranks of all ``axes`` skip ``module`` now."""
        for axis in axes:
            if found := self._await_axis(unit, module, axis):
                for other in axes:  # its ranks ask here, too, once all ranks of their own first axis have asked
                    for comes in found if other is not axis else ():
                        self._answers(unit, module, other).put(str(comes), True)
                return found
        key = _key(unit, module)
        self._asked[key] = self._asked.get(key, 0) + 1
        return set()

    def _await_axis(self, unit: Unit, module: nn.Module, axis: Runtime) -> set[bool]:
        """Return the answers of ranks on ``axis``, or none if all of them ask for one now."""
        answers, asked = self._answers(unit, module, axis), self._asked.get(_key(unit, module), 0)
        answers.add(str(asked), 1)  # while there is no answer, all ranks have asked as often
        for _ in polls(axis.store().timeout.total_seconds(), longest=0.1):
            found = {comes for comes in (False, True) if answers.has(str(comes))}
            if answers.count(str(asked)) >= axis.world_size:  # an answer found now is of a later forward
                if asked and axis.rank == 0:  # all ranks have read it
                    answers.remove(str(asked - 1))
                return set()
            if found:
                return found
        raise RuntimeError(
            f"skip: no rank has run unit {unit.fqn or '<root>'!r}, in which nothing trains, and not all have skipped "
            "it. Each rank must run it or call flatshard.skip in its place"
        )


def _key(unit: Unit, module: nn.Module) -> tuple[nn.Module, int]:
    """Return ``module`` with the checksum of what trains on the ranks of ``unit``, under which answers are known."""
    return module, sum(_trained[unit.runtime.number].values())


def _axes(unit: Unit) -> list[Runtime]:
    """Return the runtimes of the ranks that have ``unit``: over its shards, and over its replicas."""
    ranks = unit.handle.ranks
    return [axis for axis in (ranks.shards, ranks.replicas) if axis is not None and axis.progress is not None]


def _trainable_in(unit: Unit, module: nn.Module) -> list[Unit]:
    """Return the units of which parameters train in ``module``, which is the module of ``unit`` or one of its group."""
    able = [needed for needed in unit.needs if needed.handle.gradients.accumulators.nodes]
    if module is unit.module and able in ([], [unit]):
        return able
    owners = {owner_of(p) for p in module.parameters() if p.requires_grad}
    return [each for each in able if each in owners or (each is unit and module is unit.module)]


def _merged(inside: list[nn.Module], start: int, elsewhere: list[tuple[int, nn.Module]]) -> list[nn.Module]:
    """Return ``inside`` and ``elsewhere`` in the order in which they began, after ``start`` others of the pass."""
    found: list[nn.Module] = []
    for at in range(len(inside) + 1):
        for module in [module for number, module in elsewhere if max(0, number - start) == at]:
            within = _all_inside(module)  # these have ended just before it
            while found and found[-1] in within:
                found.pop()
            found.append(module)
        found += inside[at : at + 1]
    return found


def _all_inside(module: nn.Module) -> set[nn.Module]:
    """Return the modules that ran inside its last forward, and inside theirs."""
    found: set[nn.Module] = set()
    todo = [module]
    while todo:
        unit = unit_of(inner := todo.pop())
        ran = None if unit is None else unit.feature(RanInside)
        todo += [m for m in ([] if ran is None else ran.inside(inner, [])) if m not in found]
        found.update(todo)
    return found


def _since(module: nn.Module, order: list[nn.Module]) -> list[nn.Module]:
    """Return the modules in ``order`` after the last ``module``. If it has just run, they ran inside it."""
    at = len(order)
    while at and order[at - 1] is not module:
        at -= 1
    return order[at:] if at else []


def _pass_by(unit: Unit, module: nn.Module, tensors: Tensors, inside: Callable[[Tensors], Tensors]) -> Tensors:
    """Take part in the forward collectives of ``module``, and pass ``tensors`` through.

    Args:
        unit: the unit to skip.
        module: the module of the unit, or a module of its group.
        tensors: floating-point or complex.
        inside: skips the units inside, in the same way.

    Returns:
        ``tensors``, with a node in the graph through which backward reaches the unit.
    """
    hooks = UnitHooks.of(unit)
    marked, makes_graph = tuple[torch.Tensor, ...](), False
    try:
        hooks.pre_forward(module, (), {}, frames.of_caller())
        if torch.is_grad_enabled():
            ran = unit.feature(RanInside)
            if ran is not None:
                ran.count_trained(unit)
            # Ranks that run units inside of it need this rank for them, before they can answer.
            answers_late = any(u is not unit for u in units_below(module))
            comes = answers_late or _comes(unit, module, tensors)
            if comes and not unit.last_gradient_frees and not unit.handle.never_gathers:
                watched = hooks.watch_inputs(tensors, {})
                tensors = tensors if watched is None else watched[0]
            tensors = inside(tensors)
            if (_comes(unit, module, tensors) if answers_late else comes) and tensors:
                tensors = marked = _mark(unit, module, tensors)
            makes_graph = True
        else:
            tensors = inside(tensors)
    finally:
        if (forward := exit_forward(unit.context, module)) is not None:
            hooks.end_forward(forward, makes_graph, hooks.register_pre_backward(marked, forward), False)
        forward = None  # it holds this frame: a cycle, in which the tensors would live until the collector comes
    return tensors


def _comes(unit: Unit, module: nn.Module, tensors: Tensors) -> bool:
    """Return whether backward comes to ``module`` on the ranks that run it. ``tensors``: that are passed through it here."""
    if any(_trainable_in(u, m) for m in module.modules() if (u := unit_of(m)) is not None):
        return True
    given, ran = any([t.requires_grad for t in tensors]), unit.feature(RanInside)
    return given if ran is None else ran.comes(unit, module, given)


def _mark(unit: Unit, module: nn.Module, tensors: Tensors) -> Tensors:
    anchors: list[torch.Tensor] = []
    if trained := _trainable_in(unit, module):
        anchors = [_anchor(each) for each in trained]
    elif not any([t.requires_grad for t in tensors]):  # as those of other ranks do
        anchors = [torch.empty(0, device=tensors[0].device, requires_grad=True)]
    return _add_node(len(anchors), *anchors, *tensors)


def _anchor(unit: Unit) -> torch.Tensor:
    anchor = _anchors.get(unit)
    if anchor is None:
        device = unit.handle.flats[0].kind.compute_device
        anchor = _anchors[unit] = torch.empty(0, device=device, requires_grad=True)
        unit.graph.stand_ins.append(get_gradient_edge(anchor).node)
        anchor.register_post_accumulate_grad_hook(_make_anchor_hook(unit))  # type: ignore[no-untyped-call]
    return anchor


def _make_anchor_hook(unit: Unit) -> Callable[[torch.Tensor], None]:
    to_unit = weakref.ref(unit)

    def on_gradient(anchor: torch.Tensor) -> None:
        anchor.grad = None
        unit = to_unit()
        assert unit is not None
        receive_stand_in(unit)

    return on_gradient


class _Mark(torch.autograd.Function):
    """An identity function whose autograd node leads backward to the anchors."""

    @staticmethod
    def forward(ctx: Any, anchors: int, *tensors: torch.Tensor) -> Tensors:
        ctx.none = [t.new_empty(0) for t in tensors[:anchors]]
        # A skipped unit must be recomputed under checkpointing, which happens when backward unpacks a saved tensor.
        ctx.save_for_backward(tensors[0].new_empty(0))
        return tensors[anchors:]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        _ = ctx.saved_tensors
        return None, *ctx.none, *grads


_add_node: Callable[..., Tensors] = _Mark.apply


def skip(module: nn.Module, *tensors: torch.Tensor) -> Any:
    """Take part in the collectives of ``module``'s units without running it, while other ranks call ``module(x)``.

    All ranks must run the same units in the same order; else they wait for each other. If the data decide which units run, a
    rank calls ``skip`` for each unit that it does not need. The rank then gathers and frees the unit as the other ranks do,
    in forward and in backward, and adds nothing to its gradients. Gradients are averaged over all ranks, so they are those of
    one process in which only the other ranks' slices of the batch used the unit. If no rank uses the unit, its parameters
    get no gradient (``.grad is None``).

    Example::

        x, route = batch, torch.randint(4, (len(batch),))
        for i, expert in enumerate(model[:4]):  # each a unit
            chosen = (route == i).nonzero().squeeze(1)
            if len(chosen):
                x = x.index_add(0, chosen, expert(x[chosen]))
            else:
                x = flatshard.skip(expert, x)
        x.sum().backward()

    Backward reaches the unit through the returned tensors, so the loss must depend on them. A unit in which nothing trains is
    reached if it is on the ranks that run it, whatever tensors are given. Under ``torch.no_grad()`` the
    unit is only gathered and freed. A rank that has run out of data skips the whole model: ``flatshard.skip(model,
    torch.zeros(())).backward()`` in a training step, ``flatshard.skip(model)`` in evaluation and generation.

    The module's own forward hooks do not run, and its buffers do not change. Units inside ``module`` are skipped in the order
    in which they ran in this rank's last forward of the unit around them (in training: the last with gradients), or in module
    order if there was none. Skip them one by one instead

    - if the other ranks run them in another order: in that order;
    - if the other ranks run several of them in one activation checkpoint, which gathers them in another order in backward:
      inside a checkpoint of the same kind.

    A rank that skips a unit cannot use its parameters (tied ones) in a reentrant checkpoint elsewhere in the same forward:
    use ``use_reentrant=False``.

    Args:
        module: a unit, or a module that contains units, which are then skipped one after the other. For another module in
            the running forward of its unit nothing is to be done: the tensors come back as they are.
        tensors: tensors of any shape and device, which are passed through. For a backward at least one must be floating-point
            or complex. With gradients enabled and trainable parameters in ``module``, the returned tensors require grad, as
            the output of ``module`` does.

    Returns:
        ``tensors`` unchanged: one tensor if one was given, else a tuple. They are views; clone before changing them in place.

    Raises:
        ValueError: nothing in ``module`` is sharded; or no tensor was given through which backward could reach the unit.
    """
    modules = [m for m in module.modules() if unit_of(m) is not None]
    units = units_below(module)
    differentiable = tuple(t for t in tensors if t.is_floating_point() or t.is_complex())
    if not units and all(any(f.unit is owner for f in owner.context.forwards) for owner in units_of(module, "skip")):
        return (
            tensors[0] if len(tensors) == 1 else tensors
        )  # their forward takes part, and finds these parameters unused
    if not units:
        unit_for(module, "skip")  # raises: names the unit to skip
    if torch.is_grad_enabled() and not differentiable and any(u.handle.gradients.accumulators.nodes for u in units):
        raise ValueError(
            f"skip: backward must reach unit {units[0].fqn or '<root>'!r}, so pass a floating-point tensor that the loss "
            "depends on: x = flatshard.skip(module, x). If no rank will run backward, call it under torch.no_grad()"
        )
    marked = iter(_Inside(modules)(differentiable))
    result = tuple(next(marked) if t.is_floating_point() or t.is_complex() else t for t in tensors)
    return result[0] if len(result) == 1 else result


class _Inside:
    """Skips modules of units in the given order, with the modules inside each. A module may occur more than once."""

    def __init__(self, order: list[nn.Module]) -> None:
        self._order = order
        self._at = 0

    def __call__(self, tensors: Tensors) -> Tensors:
        while self._at < len(self._order):
            tensors = self._pass_by_next(tensors)
        return tensors

    def _pass_by_next(self, tensors: Tensors) -> Tensors:
        module = self._order[self._at]
        self._at += 1
        below = set(module.modules())
        inside: list[nn.Module] = []
        while self._at < len(self._order) and self._order[self._at] in below:
            inside.append(self._order[self._at])
            self._at += 1
        unit = unit_of(module)
        assert unit is not None
        ran = unit.feature(RanInside)
        return _pass_by(unit, module, tensors, _Inside(inside if ran is None else ran.inside(module, inside)))
