"""The forward and backward hooks of a unit.

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
at any other time. When a backward fails, the user's parameters are registered at once (``Backward._on_death``).

[Note: Outputs are entered first]
A forward may hand tensors over in other ways than by its output: an auxiliary loss in a list of the user's. Backward may then
enter the unit by a tensor that flatshard has not seen. Of the nodes that are ready, autograd runs the newest first. So if a
forward made nodes after those of its outputs, the outputs get newer ones: backward enters by an output if it comes to one.
An input that it returns gets one, too, which tells this forward apart: graphs may share all nodes after the input's own.
If it comes to none, autograd refuses to read parameters that are not there: unsharded.py, [Note: Closed to autograd].
"""

from __future__ import annotations

import copy
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from flatshard._base.config import BackwardPrefetch
from flatshard._composable.backward import (
    Backward,
    gather,
    gather_ahead,
    gather_last_inside,
    make_room,
    prefetch,
    prefetch_after,
    prefetches_before,
)
from flatshard._composable.claims import FORWARD_ENDED, GRADIENTS_CAME, INPUTS_LEFT, VALUES, Claim, Reason
from flatshard._composable.extensions import ForwardFeature
from flatshard._composable.module_tree import ModuleGroup, called_modules
from flatshard._composable.outputs import (
    copied_containers,
    give_back,
    is_opaque,
    next_node,
    tensors_in,
    tree_flatten,
    tree_unflatten,
    want_new_nodes,
    with_new_nodes,
)
from flatshard._composable.state import Forward, Unit
from flatshard._composable.to_come import is_over, may_get_more, was_completed, was_left
from flatshard._composable.unit_backward import (
    COMPLETE,
    TOUCHED,
    AwaitedGradients,
    Way,
    current_graph_task,
    gradient_hook,
)
from flatshard._handle.registrations import UNSHARDED
from flatshard._handle.unit_gradients import WithGradients

BACKWARD_POST = BackwardPrefetch.BACKWARD_POST  # for each step, as in claims.py
_LATER = "flatshard: forwards that ended later with the same output"
"""In the metadata of an autograd node that backward reaches a unit by: see ``pre_backward``."""


class Unrecorded(Protocol):
    """The hooks of a unit that replace its own inside ``keep_unsharded(threads=True)``: nothing is gathered or freed."""

    def check(self) -> Callable[[Any], object]:
        """Raise before a forward that needs a record. The result has no meaning."""

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Begin a forward of ``module``. Return new arguments, or None."""

    def end(self, module: nn.Module, output: Any) -> Any:
        """End a forward of ``module``, which has raised if ``output`` is None. Return a new output, or None."""


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
        self._install_gradient_hooks()

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

    def record(self, unless: Unrecorded | None) -> Unrecorded | None:
        """Replace the hooks by ``unless``, or restore them if it is None. Return the previous replacement, or None."""
        before, self._unrecorded = self._unrecorded, unless
        if before is not None:
            self._instead.remove((ForwardFeature.wants_instead, before.check))
        if unless is not None:
            self._instead.append((ForwardFeature.wants_instead, unless.check))
        return before

    def _install_gradient_hooks(self) -> None:
        reduced = overridden(self.unit.features, ForwardFeature.reduced)
        on_reduced = reduced[0] if len(reduced) == 1 else functools.partial(_call_all, reduced)
        self.unit.handle.gradients.on_reduced = on_reduced
        to_hooks = weakref.ref(self)

        def call(method: Callable[..., Any], *args: int) -> Any:
            hooks = to_hooks()
            assert hooks is not None
            return method(hooks, *args)

        end, complete = functools.partial(call, UnitHooks.finish_previous), functools.partial(call, UnitHooks.complete)
        for group, flat in enumerate(self.unit.handle.flats):
            if flat.kind.is_trainable:
                for index, compute in enumerate(flat.unsharded.params):
                    receive = functools.partial(call, UnitHooks.receive_gradient, group, index)
                    hook = gradient_hook(self.unit.graph, receive, end, complete)
                    # register_post_accumulate_grad_hook needs a parameter that requires grad at this moment.
                    wanted = compute.requires_grad
                    compute.requires_grad_(True)
                    compute.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                    compute.requires_grad_(wanted)

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
        """Begin a forward: gather the unit, and return new arguments or None. ``frame``: see ``Context.enter_forward``."""
        unit, in_backward = self.unit, current_graph_task() != -1  # recomputed by activation checkpointing
        do_instead = None
        for wants, instead in self._instead:
            if wants():
                do_instead = instead() or do_instead
        if do_instead is not None and self._unrecorded is not None:
            return self._unrecorded.begin(module, args, kwargs)
        forward = unit.context.enter_forward(unit, module, in_backward, frame)
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
        unit, context = self.unit, self.unit.context
        for needed, claim in forward.claims if forward.gathers else ():
            if len(needed.claims) > 1 and needed.claims.show_copies:
                continue  # the forward uses the copies
            if is_nested := len(needed.claims) > 1 and not needed.claims.is_only_reader(claim):
                _check_current(needed)
            else:
                _adopt_changes(needed)
            _show_unsharded(needed, claim, is_nested)
        following = context.latest_pass.begin_module(forward.module)
        if forward.gathers:
            context.prefetcher.prefetch_following(unit, following, context.latest_pass.id)

    def _gather_again(self, forward: Forward) -> None:
        """Gather the units that a recomputation needs, and the unit inside that backward needs first."""
        for needed, claim in forward.claims if forward.gathers else ():
            Backward.of(needed).reach_recomputed(needed)
            if needed.handle.never_gathers:  # it shows the shards themselves, so the values are current
                needed.release(Reason.OUTDATED)
            _show_unsharded(needed, claim, not needed.claims.is_only_reader(claim), for_backward=True)
        if (now := self.unit.graph.now) is not None and now.last_forward is not None:
            gather_last_inside(now.last_forward)

    def _change_arguments(
        self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments that features make of a module's, with inputs that backward leaves by; None if unchanged."""
        unit = self.unit
        watches = torch.is_grad_enabled() and not (unit.is_done_with_gradients or unit.handle.never_gathers)
        given, changed = (args, kwargs), None
        for before in self._before:
            if (new := before(forward, args, kwargs)) is not None:
                args, kwargs = changed = new
        if watches:
            changed = self.watch_inputs(forward, args, kwargs) or changed
        if changed is not None:
            forward.copied = [*copied_containers(given, changed)]
        return changed

    def post_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Release the unit, and return a new output or None. ``output`` is None if the forward raised."""
        unit = self.unit
        forward = unit.context.exit_forward(module, output is None)
        if forward is None:
            return None if self._unrecorded is None else self._unrecorded.end(module, output)
        comes_back = leaks = False
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
                if want_new_nodes(outputs, forward.first_node):
                    output = changed = with_new_nodes(output)
                    outputs = [*tensors_in(output)]
                stored: list[torch.Tensor] = []
                for given in (*args, *kwargs.values()):
                    if isinstance(given, (list, dict)):  # the module may have stored tensors in it
                        stored += tensors_in(given)
                for leaving in self._leaving:
                    stored += leaving(outputs)
                if stored:  # not the module's inputs
                    first = forward.first_node
                    stored = [t for t in stored if (n := t.grad_fn) is not None and n._sequence_nr() >= first]
                comes_back = self.register_pre_backward([*outputs, *stored], forward)
                leaks = not comes_back and self._may_hide_tensors(output)
            # The unsharded parameters, or views of them, must stay in memory.
            leaks = leaks or any(map(unit.handle.memory.holds, outputs))
            if leaks and forward.recorded is not None and not forward.in_backward:
                unit.history.add_leak(forward.recorded)
        finally:
            self.end_forward(forward, comes_back, leaks)
        return changed

    def end_forward(self, forward: Forward, comes_back: bool, leaks: bool) -> None:
        """Release the parameters. ``comes_back``: backward may reach this forward. ``leaks``: outputs may alias them."""
        context, in_backward = self.unit.context, forward.in_backward
        outermost = not context.forwards
        group = called_modules(self.unit.module) if isinstance(self.unit.module, ModuleGroup) else ()
        forward_graph = forward.recorded or (forward if next_node() > forward.first_node else None)
        for needed, claim in forward.claims:
            needed.claims.remove(claim)
            if not (in_use := needed.claims and needed.claims.in_use):
                needed.handle.write_back_if_changed()
            if group:
                context.prefetcher.stop_keeping(needed)
            if in_backward:
                # If its gradients are still awaited, this was a recomputation, and backward is about to use them.
                if in_use or (now := needed.graph.now) is None or now.state in (TOUCHED, COMPLETE):
                    needed.show()
            elif leaks or (comes_back and needed.config.stays_for_backward(outermost)):
                needed.show()
            elif group and needed.need < VALUES and context.latest_pass.has_run_in_part(group):
                needed.show()
                context.prefetcher.keep_for_next(needed)
            else:
                needed.release(FORWARD_ENDED, forward_graph)
        if outermost and not in_backward:
            context.end_pass()

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
        record = self.unit.context.record_forward(forward)
        for node, is_own in found.items():
            assert node is not None
            way = Way(record, node)
            for needed in self.unit.needs if is_own else ():  # a view leads to its base
                needed.graph.add_way(way)
            metadata: dict[str, Any] = node.metadata  # type: ignore[assignment]  # torch's stubs take the property for a method
            if (later := metadata.get(_LATER)) is None:
                later = metadata[_LATER] = []
                node.register_prehook(functools.partial(self.pre_backward, way, later))
            else:
                later.append(functools.partial(self.pre_backward, way, ()))
        return True

    def _may_hide_tensors(self, output: Any) -> bool:
        if not is_opaque(output):
            return False
        warnings.warn(
            f"unit {self.unit.fqn or '<root>'!r} returned a {type(output).__name__}, in which flatshard finds no tensor. So "
            "its parameters stay unsharded until backward has used them, or its next forward. Return tensors in a tuple, "
            "dict or dataclass to have them freed after forward",
            stacklevel=2,
        )
        return True

    # -- backward ----------------------------------------------------------------------------------------------------

    def watch_inputs(
        self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Make backward call ``post_backward`` when it leaves through the inputs. claims.py, [Note: Freeing]"""
        values, spec = tree_flatten((args, kwargs))
        where = [i for i, v in enumerate(values) if isinstance(v, torch.Tensor) and v.requires_grad]
        if not where:
            return None
        leaving = _leave(self, *[values[i] for i in where])
        for i, watched in zip(where, leaving, strict=True):
            values[i] = watched
        new_args, new_kwargs = tree_unflatten(values, spec)
        return new_args, new_kwargs

    def pre_backward(self, way: Way[Unit], later: Sequence[Callable[[Any], None]], grads: Any) -> None:
        """Gather the unit, and prefetch the next one, when backward reaches one of its outputs.

        ``later``: calls for forwards that ended after this one with the same output. They run first, the last one first. So
        backward reaches forwards in reverse order, on all ranks.
        """
        for reach in reversed(later):
            reach(grads)
        unit, record, task = self.unit, way.record, current_graph_task()
        if record.reached_in == task:
            for needed in unit.needs if unit.context.runtime.streams is not None else ():
                needed.handle.wait()  # another output of it, perhaps on another stream
            return
        # The backward of a forward that used only frozen parameters may still read their values.
        now = unit.graph.now
        if now is not None and now.state is COMPLETE and now.completed_in == task and unit.is_done_with_gradients:
            return
        context, backward = unit.context, Backward.of(unit)
        awaited = backward.reach_forward(record)
        for outer in record.outer:
            gather_ahead(outer)
        for claim in unit.claims:
            claim.check_backward()
        for needed in unit.needs:
            # If it is complete, only its values are needed once more.
            if needed is not unit and not was_completed(needed):
                backward.await_gradients(needed)
        gather(unit)
        for needed in unit.needs:
            needed.handle.wait()
            needed.handle.registrations.show(UNSHARDED)  # for what a checkpoint recomputes, whatever the user is shown
        if not unit.handle.has_values_of(record.version):
            raise RuntimeError(
                f"parameters of unit {unit.fqn or '<root>'!r} were changed in place between its forward and its backward "
                "(by an optimizer step, for example), so its gradients would be wrong. Call backward before the step, or "
                "run forward again after it"
            )
        # `finish_previous` gathers instead if the input of a reduction is to be freed first. [Note: Reductions in flight]
        if not (awaited and awaited.finishes_previous_at and context.reductions.frees) and prefetches_before(unit):
            prefetch(record)

    def receive_gradient(self, group: int, index: int, task: int) -> AwaitedGradients | None:
        """Receive the first gradient of graph task ``task``, or one that must be moved.

        Returns what the unit awaits, or None if this gradient does not count.
        """
        unit = self.unit
        if not unit.handle.flats[group].requires_grad[index]:
            return None  # frozen since its forward: there is no gradient, and none was expected
        now = unit.graph.now
        awaited = None if now is None else now.awaited
        if awaited is None or task not in awaited.expected:
            awaited = Backward.of(unit).await_gradients(unit)
        awaited.counts_only_in = task if unit.handle.gradients.receive(group, index) else None
        return awaited

    def finish_previous(self) -> None:
        """End the reduction of the previous unit, and gather the next one into the memory that it frees."""
        self.unit.context.reductions.finish_previous()
        if prefetches_before(self.unit):
            prefetch_after(self.unit)

    def complete(self) -> None:
        """Free the unit and start its reduction: all its gradients have come."""
        unit, backward, now = self.unit, self.unit.context.backward, self.unit.graph.now
        assert isinstance(backward, Backward)
        assert now is not None
        assert now.awaited is not None
        # No gradient hook has prefetched: all ranks must issue the next all-gather before this reduction.
        if now.awaited.finishes_previous_at:
            self.finish_previous()
        if may_get_more(unit):
            backward.postpone(unit)
            return
        done = unit.is_done_with_gradients or was_left(unit)
        if done:  # before the reduction input is allocated
            unit.release(GRADIENTS_CAME)
        backward.complete(unit)
        if done and unit.config.backward_prefetch is BACKWARD_POST:
            prefetch_after(unit)

    def post_backward(self) -> None:
        """Free the unit if backward has left all its forwards through their inputs. claims.py, [Note: Freeing]"""
        unit = self.unit
        if Backward.leave_forward(unit) and (not unit.handle.gradients.accumulators.are_all or is_over(unit)):
            unit.release(INPUTS_LEFT)
            if unit.config.backward_prefetch is BACKWARD_POST:
                prefetch_after(unit)


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


def _show_unsharded(unit: Unit, claim: Claim, is_nested: bool, for_backward: bool = False) -> None:
    """Unshard ``unit``, and show it in the forward that has ``claim``. ``is_nested``: one around it reads the values, too."""
    handle, context = unit.handle, unit.context
    if handle.stamp is None:  # sharded
        handle.unshard(context.latest_pass.id, for_backward)
    else:
        handle.take_over(context.latest_pass.id)
    handle.wait()
    if not is_nested and torch.is_grad_enabled() and handle.gradients.accumulators.nodes:
        if context.runtime.streams is not None:
            handle.gradients.accumulators.follow_stream()
        context.reductions.expect(unit)
    claim.show(UNSHARDED)
    handle.registrations.show(UNSHARDED)


def overridden(features: Iterable[object], method: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return ``method`` of each feature that overrides it."""
    name = method.__name__
    return [getattr(each, name) for each in features if getattr(type(each), name) is not method]


def _call_all(functions: Iterable[Callable[[WithGradients], None]], given: WithGradients) -> None:
    for function in functions:
        function(given)


class _Leave(torch.autograd.Function):
    """The identity on a unit's inputs. Its backward tells the unit that backward has left this forward."""

    @staticmethod
    def forward(ctx: Any, hooks: UnitHooks, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.hooks = hooks
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ctx.hooks.post_backward()
        return None, *grads


_leave: Callable[..., tuple[torch.Tensor, ...]] = _Leave.apply
