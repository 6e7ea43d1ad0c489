"""The forward hooks of a unit, and how its forwards end after an exception. The backward's are in autograd_hooks.py.

One training step of a unit under FULL_SHARD::

    pre-forward    gather, or wait for a prefetched gather; register the unsharded parameters; prefetch the next unit
    (forward)
    post-forward   hook the outputs; register the sharded parameters; free
    pre-backward   gather; prefetch the previous unit
    (backward)     gradients stay where autograd puts them; the first few end the previous reduction (on CPU)
    complete       free; copy the gradients into the reduction input; start the reduction

[Note: What is registered when]
The unsharded parameters are registered inside forward, and in backward until the unit is complete (a checkpoint inside
the unit recomputes from them). In between a unit may stay unsharded (SHARD_GRAD_OP, the outermost unit), but
``module.parameters()`` are the user's own. So ``model.zero_grad()``, ``p.requires_grad_()`` and the like do the same there as
at any other time. When a backward fails, the user's parameters are registered at once (``backward._on_death``).

[Note: Outputs are entered first]
A forward may hand tensors over in other ways than by its output: an auxiliary loss in a list of the user's. Backward may then
enter the unit by a tensor that flatshard has not seen. Of the nodes that are ready, autograd runs the newest first. So if a
forward made nodes after those of its outputs, the outputs get newer ones: backward enters by an output if it comes to one.
An input that it returns gets one, too, which tells this forward apart: graphs may share all nodes after the input's own.
If it comes to none, autograd refuses to read parameters that are not there: unsharded.py, [Note: Closed to autograd].
"""

from __future__ import annotations

import copy
import enum
import functools
import operator
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from flatshard._base import frames
from flatshard._composable.autograd_hooks import hook_parameters, leave, pre_backward
from flatshard._composable.backward import drop, enter_backward, reach_recomputed
from flatshard._composable.claims import FORWARD_ENDED, VALUES, Reason
from flatshard._composable.extensions import ForwardFeature, Unrecorded
from flatshard._composable.find import contexts_of
from flatshard._composable.gathering import (
    free_unused,
    gather_last_inside,
    has_run_in_part,
    keep_for_next,
    make_room,
    prefetch_in_forward,
    stop_keeping,
)
from flatshard._composable.module_tree import ModuleGroup, called_modules
from flatshard._composable.outputs import (
    copied_containers,
    give_back,
    is_opaque,
    next_node,
    tensors_in,
    tree_flatten,
    tree_unflatten,
    with_new_nodes,
)
from flatshard._composable.reduction_queue import discard, expect
from flatshard._composable.state import (
    Context,
    Forward,
    ForwardRecord,
    Unit,
    Way,
    current_graph_task,
)
from flatshard._composable.to_come import is_used_next
from flatshard._composable.unit_config import UnitConfig
from flatshard._handle.registrations import UNSHARDED_PARAMS
from flatshard._handle.unit_gradients import WithGradients

_forwards, _unit = operator.attrgetter("forwards"), operator.attrgetter("unit")
_LATER = "flatshard: forwards that ended later with the same output"
"""In the metadata of an autograd node that backward reaches a unit by: see ``pre_backward``."""


class Fate(enum.Enum):
    """The use of a unit's unsharded parameters after a forward that used them. Each member says it in a sentence."""

    USED_NEXT = "backward is about to use them: they stay, and modules still show them"
    STAYS = "they stay until a backward or an enclosing forward has used them; modules show what the claims ask for"
    KEPT_FOR_NEXT = "the same, until another module of the unit's group runs, or the pass ends"
    RELEASED = "they are freed, unless a claim refuses"


USED_NEXT, STAYS, KEPT_FOR_NEXT, RELEASED = Fate  # for each step: see lifetime.py


class UnitHooks:
    """The hooks of one unit. They refer to it, and its module refers to them."""

    def __init__(self, unit: Unit, features: Sequence[ForwardFeature]) -> None:
        self.unit = unit
        unit.features = features
        unit.handle.memory.make_room = functools.partial(make_room, unit)
        # The methods that features override, by seam. extensions.py, [Note: Features]
        self._instead = [
            (each.wants_instead, each.instead) for each in features if type(each).instead is not ForwardFeature.instead
        ]
        self._enter = overridden(features, ForwardFeature.enter)
        self._before = overridden(features, ForwardFeature.before)
        self._after = overridden(features, ForwardFeature.after)
        self._leaving = overridden(features, ForwardFeature.leaving)
        self._unrecorded: Unrecorded | None = None
        reduced = overridden(features, ForwardFeature.reduced)
        on_reduced = reduced[0] if len(reduced) == 1 else functools.partial(_call_all, reduced)
        unit.handle.gradients.on_reduced = on_reduced
        hook_parameters(unit)

    @classmethod
    def install(cls, unit: Unit, features: Sequence[ForwardFeature]) -> None:
        """Register the hooks on the unit's module, or on each of its group."""
        hooks = cls(unit, features)
        for module in called_modules(unit.module):
            module.register_forward_pre_hook(hooks.pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(hooks.post_forward, with_kwargs=True, always_call=True)

    @classmethod
    def of(cls, unit: Unit) -> UnitHooks:
        """Return the hooks that were installed on ``unit``."""
        for hook in called_modules(unit.module)[0]._forward_pre_hooks.values():
            if isinstance(owner := getattr(hook, "__self__", None), cls):
                return owner
        raise RuntimeError(
            f"flatshard's forward hooks are no longer on the module of unit {unit.fqn or '<root>'!r}: something removed or "
            "wrapped them after fully_shard"
        )

    def replace_by(self, unless: Unrecorded | None) -> Unrecorded | None:
        """Replace the hooks by ``unless``, or restore them if it is None. Return the previous replacement, or None."""
        before, self._unrecorded = self._unrecorded, unless
        if before is not None:
            self._instead.remove((ForwardFeature.wants_instead, before.check))
        if unless is not None:
            self._instead.append((ForwardFeature.wants_instead, unless.check))
        return before

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitHooks:
        """Return the hooks of the copied unit, whose parameters get the gradient hooks."""
        result = object.__new__(UnitHooks)
        memo[id(self)] = result
        unit = copy.deepcopy(self.unit, memo)
        features = [copy.deepcopy(each, memo) for each in self.unit.features if isinstance(each, ForwardFeature)]
        UnitHooks.__init__(result, unit, features)
        return result

    # -- forward -----------------------------------------------------------------------------------------------------

    def pre_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Begin a forward: gather the unit, and return new arguments or None. ``frame``: see ``enter_forward``."""
        unit, in_backward = self.unit, current_graph_task() != -1  # recomputed by activation checkpointing
        do_instead = None
        for wants, instead in self._instead:
            if wants():
                do_instead = instead() or do_instead
        if do_instead is not None and self._unrecorded is not None:
            return self._unrecorded.begin(module, args, kwargs)
        forward = enter_forward(unit, module, in_backward, frame)
        if do_instead is not None:
            forward.instead = do_instead
            return None
        if len(unit.claims) > 1:
            for around in unit.claims:
                around.check_forward(torch.is_grad_enabled() and not in_backward)
        for enter in self._enter:
            enter(forward)
        if in_backward:
            self._gather_again(forward)
        else:
            self._gather(forward)
        return self._change_arguments(forward, args, kwargs)

    def _gather(self, forward: Forward) -> None:
        """Gather the units that a forward outside of backward needs, and the next unit ahead."""
        for needed, claim in forward.claims if forward.gathers else ():
            if len(needed.claims) > 1 and needed.claims.show_copies:
                continue  # the forward uses the copies
            if is_nested := len(needed.claims) > 1 and not needed.claims.is_only_reader(claim):
                _check_current(needed)
            else:
                _adopt_changes(needed)
            needed.handle.use(needed.context.latest_pass.id)
            claim.show(UNSHARDED_PARAMS)
            needed.handle.registrations.show(UNSHARDED_PARAMS)
            if not is_nested:
                _expect_gradients(needed)
        prefetch_in_forward(self.unit, forward.module, forward.gathers)

    def _gather_again(self, forward: Forward) -> None:
        """Gather the units that a recomputation needs, and the unit inside that backward needs first."""
        for needed, claim in forward.claims if forward.gathers else ():
            reach_recomputed(enter_backward(needed), needed)
            if needed.handle.never_gathers:  # it shows the shards themselves, so the values are current
                needed.release(Reason.OUTDATED)
            needed.handle.use(needed.context.latest_pass.id, for_backward=True)
            claim.show(UNSHARDED_PARAMS)
            needed.handle.registrations.show(UNSHARDED_PARAMS)
            if needed.claims.is_only_reader(claim):
                _expect_gradients(needed)
        if (status := self.unit.graph.status) is not None and status.last_forward is not None:
            gather_last_inside(status.last_forward)

    def _change_arguments(
        self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments that features make of a module's, with inputs that backward leaves by; None if unchanged."""
        unit = self.unit
        watches = torch.is_grad_enabled() and not (unit.last_gradient_frees or unit.handle.never_gathers)
        given, changed = (args, kwargs), None
        for before in self._before:
            if (new := before(forward, args, kwargs)) is not None:
                args, kwargs = changed = new
        if watches:
            changed = self.watch_inputs(args, kwargs) or changed
        if changed is not None:
            forward.copied = [*copied_containers(given, changed)]
        return changed

    def post_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Release the unit, and return a new output or None. ``output`` is None if the forward raised."""
        unit = self.unit
        forward = exit_forward(unit.context, module, output is None)
        if forward is None:
            return None if self._unrecorded is None else self._unrecorded.end(module, output)
        makes_graph = comes_back = leaks = False
        changed = None
        try:
            if forward.instead is not None:
                forward.instead(output)
                return None
            for copied in forward.copied:
                give_back(*copied)
            for after in self._after:
                if (new := after(forward, output)) is not None:
                    output = changed = new
            outputs = [output] if isinstance(output, torch.Tensor) else [*tensors_in(output)]
            if torch.is_grad_enabled():
                makes_graph = output is not None
                if _want_new_nodes(outputs, forward.first_node):
                    output = changed = with_new_nodes(output)
                    outputs = [*tensors_in(output)]
                stored = self._find_stored(forward, (*args, *kwargs.values()), outputs)
                comes_back = self.register_pre_backward([*outputs, *stored], forward)
                leaks = not comes_back and self._may_hide_tensors(output)
            # The unsharded parameters, or views of them, must stay in memory.
            leaks = leaks or any(map(unit.handle.memory.holds, outputs))
            if leaks and forward.recorded is not None and not forward.in_backward:
                unit.history.add_leak(forward.recorded)
        finally:
            self.end_forward(forward, makes_graph, comes_back, leaks)
        return changed

    def _find_stored(
        self, forward: Forward, arguments: tuple[Any, ...], outputs: list[torch.Tensor]
    ) -> Iterable[torch.Tensor]:
        """Return tensors that the forward has made and stored elsewhere than in ``outputs``. Backward may come by them."""
        stored: list[torch.Tensor] = []
        for given in arguments:
            if isinstance(given, (list, dict)):  # the module may have stored tensors in it
                stored += tensors_in(given)
        for leaving in self._leaving:
            stored += leaving(outputs)
        if stored:  # not the module's inputs
            first = forward.first_node
            stored = [t for t in stored if (n := t.grad_fn) is not None and n._sequence_nr() >= first]
        return stored

    def end_forward(self, forward: Forward, makes_graph: bool, comes_back: bool, leaks: bool) -> None:
        """Release the parameters.

        Args:
            forward: the one that ends.
            makes_graph: it has returned, with grad mode on.
            comes_back: backward may reach it. Local to this rank: another rank's output may not require grad.
            leaks: outputs may alias the parameters. Local to this rank: the memory stays, and no gather depends on it.
        """
        context, in_backward = self.unit.context, forward.in_backward
        outermost = not context.forwards
        in_group = isinstance(self.unit.module, ModuleGroup)
        forward_graph = forward.recorded or (forward if next_node() > forward.first_node else None)
        for needed, claim in forward.claims:
            needed.claims.remove(claim)
            if not (in_use := needed.claims and needed.claims.in_use):
                needed.handle.write_back_if_changed()
            if in_group:
                stop_keeping(needed)
            used_next = in_backward and not in_use and is_used_next(needed)
            runs_again = (
                in_group and needed.claims.need is not VALUES and has_run_in_part(context.latest_pass, self.unit)
            )
            # Ranks agree on what can be trained. Backward reaches each forward of a frozen unit on all ranks, or on none.
            may_come = comes_back or (makes_graph and bool(needed.handle.gradients.accumulators.nodes))
            fate = choose_fate(in_backward, used_next, may_come, outermost, needed.config, runs_again)
            if fate is RELEASED:
                needed.release(FORWARD_ENDED, forward_graph, leaks)
            elif fate is not USED_NEXT:
                needed.show()
                if fate is KEPT_FOR_NEXT:
                    keep_for_next(needed)
        if outermost and not in_backward:
            free_unused(context)
            context.end_pass()
            context.runtime.join()
            context.runtime.wait_for_host_reads()

    def register_pre_backward(self, outputs: Iterable[torch.Tensor], forward: Forward) -> bool:
        """Make backward call ``pre_backward`` when it reaches one of ``outputs``. Return whether it may reach one."""
        found: dict[Node | None, bool] = {}  # whether it is the node of an output
        for tensor in outputs:
            if tensor.requires_grad:
                # An in-place change of a view gives it a new node, so the old one is bypassed; but its base keeps the node.
                # If a custom autograd function returned its input, its output is a view that cannot be changed in place.
                own = tensor.grad_fn
                if tensor._is_view() and not isinstance(own, BackwardCFunction) and tensor._base is not None:
                    found.setdefault(tensor._base.grad_fn, False)
                found[own] = True
        found.pop(None, None)
        if not found:
            return False
        record = record_forward(forward)
        for node, is_own in found.items():
            assert node is not None
            way = Way(record, node.next_functions)
            for needed in self.unit.needs if is_own else ():  # a view leads to its base
                needed.graph.ways[weakref.ref(way, needed.graph.ways.pop)] = None
            metadata: dict[str, Any] = node.metadata  # type: ignore[assignment]  # torch's stubs take the property for a method
            if (later := metadata.get(_LATER)) is None:
                later = metadata[_LATER] = []
                node.register_prehook(functools.partial(pre_backward, way, later))
            else:
                later.append(functools.partial(pre_backward, way, ()))
        return True

    def watch_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Make backward call ``post_backward`` when it leaves through the inputs. claims.py, [Note: Freeing]"""
        values, spec = tree_flatten((args, kwargs))
        where = [i for i, v in enumerate(values) if isinstance(v, torch.Tensor) and v.requires_grad]
        if not where:
            return None
        leaving = leave(self.unit, *[values[i] for i in where])
        for i, watched in zip(where, leaving, strict=True):
            values[i] = watched
        new_args, new_kwargs = tree_unflatten(values, spec)
        return new_args, new_kwargs

    def _may_hide_tensors(self, output: Any) -> bool:
        if not is_opaque(output):
            return False
        warnings.warn(
            f"unit {self.unit.fqn or '<root>'!r} returned a {type(output).__name__}, in which flatshard finds no tensor. So "
            "its parameters stay unsharded until all their gradients have come, or its next forward. Return tensors in a "
            "tuple, dict or dataclass to have them freed after forward",
            stacklevel=2,
        )
        return True


# -- forwards under way -----------------------------------------------------------------------------------------------


def enter_forward(unit: Unit, module: nn.Module, in_backward: bool, frame: FrameType | None) -> Forward:
    """Begin a forward of ``module``, one of the ``unit``, from its pre-forward hook.

    ``frame``: one that is alive during the forward. None: that of the module's ``__call__``, found from the caller.

    Raises:
        RuntimeError: another thread is in a forward.
    """
    context = unit.context
    running = context.forwards
    around = running[-1].frame if running and not in_backward else None
    if frame is None:
        frame, is_inside = frames.of_module_call(2, around)
    else:
        is_inside = around is not None and frames.is_inside(frame, around)
    if not in_backward and not is_inside:
        settle_context(context, frame)
        if not running:
            for busy in list(filter(_forwards, Context.every)):
                _check_thread(busy, frame)
            context.begin_pass(unit)
    forward = Forward(unit, module, frame, in_backward)
    for needed, claim in forward.claims:
        needed.claims.append(claim)
    context.forwards.append(forward)
    return forward


def choose_fate(
    in_backward: bool,
    used_next: bool,
    may_come: bool,
    outermost: bool,
    config: UnitConfig,
    runs_again: bool,
) -> Fate:
    """Decide whether the parameters of a unit stay unsharded when a forward that used them ends.

    Args:
        in_backward: it was a recomputation.
        used_next: backward is about to use them. Only asked in a recomputation.
        may_come: backward may reach the unit after this forward.
        outermost: no other forward encloses it.
        config: of the unit. Its ``reshard_after_forward``, or else its strategy, says whether they stay for a backward.
        runs_again: another module of the unit's group is to run in this pass.
    """
    if in_backward:
        return USED_NEXT if used_next else STAYS
    if may_come:
        reshards = config.reshard_after_forward
        if not reshards if reshards is not None else outermost or config.strategy.stays_for_backward:
            return STAYS
    return KEPT_FOR_NEXT if runs_again else RELEASED


def exit_forward(context: Context, module: nn.Module, raised: bool = False) -> Forward | None:
    """End a forward of ``module``, and return it, or None if it never started (an earlier hook raised).

    ``raised``: it may have raised. Then a running forward of ``module`` may be another thread's.
    """
    try:
        last = context.forwards[-1]
    except IndexError:  # not asked first: forwards without a record may end on other threads
        return None
    is_elsewhere = raised and frames.runs(last.frame, elsewhere=True)
    if last.module is not module or is_elsewhere:
        return None
    context.forwards.pop()
    return last


def _want_new_nodes(outputs: Iterable[torch.Tensor], first: int) -> bool:
    """Return whether an output's node is older than node ``first``, as of a returned input, or not this thread's newest.

    For the reason see [Note: Outputs are entered first].
    """
    last = next_node() - 1
    numbers = [node._sequence_nr() for tensor in outputs if (node := tensor.grad_fn) is not None]
    return bool(numbers) and (min(numbers) < first or max(numbers) != last)


def record_forward(forward: Forward) -> ForwardRecord:
    """Create the record of a forward that has just ended, for backward to reach."""
    unit, context, in_backward = forward.unit, forward.unit.context, forward.in_backward
    gathered = unit.handle.stamp
    assert gathered is not None  # a forward that makes a graph runs on unsharded parameters
    before = None if in_backward else context.latest_pass.latest
    other = before if before is None or before.unit is not unit else before.previous_other
    record = ForwardRecord(unit, before, other, list(map(_unit, context.forwards)), gathered.version)
    forward.recorded = record
    if unit.handle.has_static_buffers:
        for needed in unit.needs:
            needed.history.live_forwards.add(record)
    if not in_backward:
        context.latest_pass.latest = record
    return record


# -- their parameters ----------------------------------------------------------------------------------------------------


def _adopt_changes(unit: Unit) -> None:
    """Adopt what the user did to the parameters, and free unsharded values that are not current, before a forward."""
    handle, pass_id = unit.handle, unit.context.latest_pass.id
    handle.check_parameters()
    if (stamp := handle.stamp) is not None and not (handle.is_current(pass_id) or unit.is_current(pass_id)):
        unit.history.changes_in_passes |= stamp.by == pass_id
        unit.release(Reason.OUTDATED)


def _check_current(unit: Unit) -> None:
    """Raise if the values that a forward or ``summon_full_params`` around this forward reads are not current."""
    if not unit.handle.is_current():
        raise RuntimeError(
            f"parameters of unit {unit.fqn or '<root>'!r} were changed in place (by an optimizer step, for example) "
            "inside its forward, a registered method of it or summon_full_params, which still shows the old values. "
            "Change them outside"
        )


def _expect_gradients(unit: Unit) -> None:
    """Give ``unit`` its turn among the reductions, if its forward makes a graph. No forward around it has done so."""
    accumulators = unit.handle.gradients.accumulators
    if torch.is_grad_enabled() and accumulators.nodes:
        if unit.context.runtime.streams is not None:
            accumulators.follow_stream()
        expect(unit.context.reductions, unit)


def overridden(features: Iterable[object], method: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return ``method`` of each feature that overrides it."""
    name = method.__name__
    return [getattr(each, name) for each in features if getattr(type(each), name) is not method]


def _call_all(functions: Iterable[Callable[[WithGradients], None]], given: WithGradients) -> None:
    for function in functions:
        function(given)


# -- after an exception ------------------------------------------------------------------------------------------------


def is_running(context: Context) -> bool:
    """Return whether the caller is inside a forward or a backward. Interrupted ones do not count."""
    inside = bool(context.forwards) and frames.is_inside(frames.of_caller(1), context.forwards[-1].frame)
    return inside or (current_graph_task() != -1 and context.backward is not None)


def settle(units: Iterable[Unit]) -> None:
    """Drop the rest of a forward or backward that an exception ended, so that a verb finds the same on all ranks."""
    for context in contexts_of(units):
        settle_context(context)


def settle_context(context: Context, frame: FrameType | None = None) -> None:
    """Clean up after an exception that skipped hooks (an interrupt, a failed backward). Forwards that do not enclose
    ``frame``, by default the caller's, are over.

    Raises:
        RuntimeError: another thread is in a forward or a backward.
    """
    if context.forwards:
        frame = frames.of_caller(1) if frame is None else frame
        _check_thread(context, frame)
        _drop_forwards(context, frame)
        if not context.forwards:
            recover_context(context)
    if context.backward is not None and current_graph_task() == -1:
        # It failed, or is on another thread. On an accelerator it always runs on the autograd engine's threads, and may
        # still be registered there just after it failed.
        if not context.backward.has_failed and context.runtime.streams is None:
            raise RuntimeError(
                "a backward of sharded modules is running on another thread. Collectives of several threads would mix: "
                "run all sharded modules of a process in one thread"
            )
        drop(context.backward)


def _drop_forwards(context: Context, frame: FrameType | None) -> None:
    """Drop the running forwards that do not enclose ``frame``. None: all."""
    while context.forwards and (frame is None or not frames.is_inside(frame, context.forwards[-1].frame)):
        for needed, claim in context.forwards.pop().claims:
            needed.claims.remove(claim)
            needed.release(Reason.FAILED)
    context.publish_place(bool(context.forwards))


def _check_thread(context: Context, frame: FrameType) -> None:
    """Raise if the innermost running forward belongs to another thread. ``frame``: of the caller."""
    last = context.forwards[-1]
    if frames.is_inside(frame, last.frame):
        return
    if frames.runs(last.frame):
        raise RuntimeError(
            f"unit {last.unit.fqn or '<root>'!r} is in a forward on another thread. Collectives of several threads would "
            "mix: run all sharded modules of a process in one thread. Other threads hand it their inputs, as by a "
            "concurrent.futures.ThreadPoolExecutor(max_workers=1). Or, without gradients, run them inside "
            "flatshard.keep_unsharded(module, threads=True), where nothing is communicated"
        )


def recover_context(context: Context, drop_held: bool = False) -> None:
    """Restore the state between two steps, after an exception.

    ``drop_held``: also drop gradients that earlier backwards hold (``no_sync``).
    """
    _drop_forwards(context, None)
    if context.backward is not None:
        drop(context.backward)
    discard(context.reductions, keeps_held=not drop_held)
    free_unused(context)
