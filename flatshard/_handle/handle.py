"""``FlatParamHandle``: one unit's parameters as flat parameters, with the verbs that move them.

Composes layout, buffers, gradients, slots and lifetime; adds no state of its own. Usually a handle has a single flat
parameter. Parameters of another dtype, or frozen ones beside trainable ones, get a flat parameter of their own in the
same handle, so that a frozen parameter costs no gradient memory and no byte of a reduction.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from flatshard import _trace
from flatshard._errors import InternalError
from flatshard._handle.buffers import FlatBuffers, FlatOptions
from flatshard._handle.gradients import FlatGradients
from flatshard._handle.layout import plan_layout
from flatshard._handle.lifetime import GradState, Lifetime, ParamState
from flatshard._handle.slots import Slots
from flatshard._runtime import Pending, Runtime


@dataclass(frozen=True, slots=True)
class ParamSlots:
    """One parameter to flatten: its FQN and every (module, name) that it is registered under."""

    fqn: str
    param: nn.Parameter
    slots: tuple[tuple[nn.Module, str], ...]
    options: FlatOptions


class FlatParamHandle:
    """The flat parameters of one unit."""

    def __init__(
        self, fqn: str, params: Sequence[ParamSlots], runtime: Runtime, replicas: Runtime | None = None
    ) -> None:
        """Flatten and shard ``params`` in place.

        Args:
            fqn: the unit's FQN, for errors and traces.
            params: what the unit owns, in module order.
            runtime: the collectives of the group to shard over.
            replicas: those of the group of ranks that hold the same shard, if there are others. ``runtime`` itself keeps
                every parameter whole on every rank (``NO_SHARD``).
        """
        self.fqn = fqn
        self.runtime = runtime
        self.lifetime = Lifetime(fqn)
        self.slots = Slots()
        self.replicas = replicas if replicas is not None and replicas.world_size > 1 else None
        world, rank = (1, 0) if replicas is runtime else (runtime.world_size, runtime.rank)
        self.buffers: list[FlatBuffers] = []
        self.grads: list[FlatGradients] = []
        for group in _group_by_kind(params):
            options = group[0].options
            sizes = [(p.fqn, p.param.shape, p.param.stride()) for p in group]
            itemsize = min((options.compute_dtype or group[0].param.dtype).itemsize, group[0].param.dtype.itemsize)
            layout = plan_layout(sizes, itemsize, world)
            buffers = FlatBuffers(layout, [p.param for p in group], rank, options, runtime)
            self.buffers.append(buffers)
            self.grads.append(FlatGradients(buffers, self.replicas))
            for owned, compute in zip(group, buffers.computes, strict=True):
                for module, name in owned.slots:
                    self.slots.add(module, name, owned.param, compute)
        self.all_trainable = all(p.param.requires_grad for p in params)
        self.any_trainable = any(p.param.requires_grad for p in params)
        self._nodes: list[Node] = []  # see `gradient_nodes`
        self._nodes_epoch = -1
        self._gathers: list[Pending] = []
        self.on_reduced: Callable[[], None] = _nothing  # called whenever gradients have come into the user's ``.grad``
        self._gathered = [b for b in self.buffers if not b.is_alias and b.layout.padded_numel]
        self._is_whole = replicas is runtime or runtime.world_size == 1
        self.is_alias = not self._gathered  # parameters are always whole here: unshard and reshard move nothing

    def __repr__(self) -> str:
        params = sum(len(b.params) for b in self.buffers)
        return (
            f"FlatParamHandle({self.fqn or '<root>'!r}, {params} parameters in {len(self.buffers)} flat parameters, "
            f"{self.lifetime.params.name})"
        )

    def rename(self, old: str, new: str) -> None:
        """Put ``new`` in the place of ``old`` at the beginning of every name."""
        self.fqn = new
        self.lifetime.rename(new)
        for buffers in self.buffers:
            buffers.rename(old, new)

    def add_slot(self, module: nn.Module, name: str, param: nn.Parameter) -> None:
        """Take over one more registration of a parameter that this handle owns."""
        for buffers in self.buffers:
            for own, compute in zip(buffers.params, buffers.computes, strict=True):
                if own is param:
                    self.slots.add(module, name, own, compute)
                    return
        raise InternalError(f"unit {self.fqn!r} does not own the parameter registered as {name!r}")

    @property
    def is_sharded(self) -> bool:
        return self.lifetime.params is ParamState.SHARDED

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes that gathering takes."""
        return sum(b.unsharded.flat.nbytes for b in self._gathered)

    # -- parameters --------------------------------------------------------------------------------------------------

    def unshard(self, again: bool = False) -> None:
        """Start gathering, unless that was done. ``wait`` before anyone reads the parameters.

        ``again``: for a backward, which needs the values that its forward had.
        """
        if self.lifetime.params is not ParamState.SHARDED:
            return
        if self._gathered:
            _trace.event("cast" if self._is_whole else "all-gather", self.fqn)
            scope = _trace.labelled("all_gather", self.fqn, self.runtime.gathering())
            if scope is None:
                self._start_gathers(again)
            else:
                with scope:
                    self._start_gathers(again)
        self.lifetime.move_params("unshard")

    def _start_gathers(self, again: bool) -> None:
        self._gathers = [b.gather(self.runtime, again) for b in self._gathered]

    def wait(self) -> None:
        """Make the unsharded parameters readable by what the caller does next."""
        if self.lifetime.params is not ParamState.UNSHARDING:
            return
        gathers, self._gathers = self._gathers, []
        for gather in gathers:
            gather.wait()
        self.lifetime.move_params("wait")

    def reshard(self) -> None:
        """Free the unsharded parameters. One that is still being gathered is waited for first."""
        state = self.lifetime.params
        if state is ParamState.SHARDED:
            return
        if state is ParamState.UNSHARDING:
            self.wait()
        if self._gathered:
            _trace.event("reshard", self.fqn)
            self.runtime.before_free()
            for buffers in self._gathered:
                buffers.unsharded.free()
        self.lifetime.move_params("reshard")

    def forget_cast(self) -> None:
        """No backward will need the values that a forward had: see ``FlatOptions.keep_cast``."""
        for buffers in self._gathered:
            buffers.forget_cast()

    def holds_memory_of(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in memory that ``reshard`` would free."""
        address = tensor.data_ptr() if tensor.layout is torch.strided else 0
        return any([b.unsharded.contains(address) for b in self._gathered])

    def check_parameters(self) -> None:
        """Take over whatever the user replaced, froze or unfroze since the last time, or raise.

        ``p.data = ...``, ``module.to()``, ``module.weight = nn.Parameter(...)``, ``load_state_dict(..., assign=True)``.
        """
        for module, name, sharded, new in self.slots.replaced():
            if not isinstance(new, nn.Parameter):
                raise RuntimeError(
                    f"parameter {name!r} of a {type(module).__name__} in unit {self.fqn or '<root>'!r} is registered no "
                    "more: it was deleted, parametrized or swapped (functional_call) after fully_shard, which must come last"
                )
            sharded.data = new.data  # the optimizer holds `sharded`, so it stays
            sharded.requires_grad_(new.requires_grad)
            self.slots.restore(module, name, sharded)
        for buffers in self.buffers:
            if moved := buffers.moved():
                buffers.readopt(moved)
        self.sync_requires_grad()

    def places(self) -> list[int] | None:
        """Where the parameters' data lies: other numbers, on every rank, if the user replaced any. None: not registered."""
        if self.slots.replaced():
            return None
        return [p.untyped_storage().data_ptr() for b in self.buffers for p in b.params]

    def version(self) -> int:
        """See ``FlatBuffers.version``."""
        return sum([b.version() for b in self.buffers])

    def sync_requires_grad(self) -> None:
        """Follow what the user froze or unfroze."""
        self.any_trainable = any([b.sync_requires_grad() for b in self.buffers])
        self.all_trainable = all([False not in b.requires_grad for b in self.buffers])

    def write_back_if_changed(self, keep: bool = True) -> None:
        """Keep what a forward changed in place in its own parameters (``self.weight.clamp_()`` under no_grad).

        ``keep=False`` forgets the change instead.
        """
        for buffers in self.buffers:
            if buffers.changed_in_forward() and keep:
                buffers.write_back()

    # -- whole parameters for the user -------------------------------------------------------------------------------

    @property
    def is_mixed_precision(self) -> bool:
        """Whether the unsharded parameters differ from the user's in dtype."""
        return any([b.compute_dtype is not b.dtype for b in self.buffers])

    def copy_full_precision(self, device: torch.device | None = None) -> dict[int, nn.Parameter]:
        """The whole parameters in the user's dtypes, by ``id`` of the sharded ones, on ``device`` (default: where they are).

        Communicates, but for unsharded parameters that are in the user's dtype as they are.
        """
        copies = {}
        for buffers in self.buffers:
            if buffers.compute_dtype is not buffers.dtype or self.is_sharded:
                whole = buffers.gather_full_precision(self.runtime).computes
            else:
                whole = tuple([_copy(c, device or c.device) for c in buffers.computes])
            for param, value in zip(buffers.params, whole, strict=True):
                value.requires_grad_(param.requires_grad)
                copies[id(param)] = value if device in (None, value.device) else _copy(value, device)
        return copies

    def copy_shown_gradients(self, copies: dict[int, nn.Parameter]) -> None:
        """Give ``copies`` the whole gradients of what is registered now."""
        for sharded, shown in self.slots.shown():
            target = copies[id(sharded)]
            if shown is not None and shown.grad is not None and target.grad is None:
                target.grad = shown.grad.to(target.device, copy=True)

    def copy_unsharded(self) -> list[torch.Tensor]:
        """Copies of the unsharded buffers, for ``restore_unsharded``."""
        return [b.unsharded.flat.clone() for b in self.buffers]

    def restore_unsharded(self, before: Sequence[torch.Tensor]) -> None:
        """Undo changes of the unsharded parameters."""
        for buffers, values in zip(self.buffers, before, strict=True):
            buffers.unsharded.flat.copy_(values)

    def write_back(self, with_grads: bool) -> None:
        """Keep this rank's part of the unsharded parameters, and of the gradients shown on them."""
        for buffers, grads in zip(self.buffers, self.grads, strict=True):
            buffers.write_back()
            if with_grads:
                grads.write_back([c.grad for c in buffers.computes])

    def write_back_copies(self, copies: dict[int, nn.Parameter], with_grads: bool) -> None:
        """The same from ``copy_computes``."""
        for buffers, grads in zip(self.buffers, self.grads, strict=True):
            values = [copies[id(p)] for p in buffers.params]
            buffers.write_back_from(values)
            if with_grads:
                grads.write_back([v.grad for v in values])

    def gather_gradients(self, copies: dict[int, nn.Parameter] | None) -> None:
        """Give the unsharded parameters, or ``copies`` of them, whole gradients where there are any. Communicates."""
        for buffers, grads in zip(self.buffers, self.grads, strict=True):
            if True in buffers.requires_grad:
                for param, compute, grad in zip(
                    buffers.params, buffers.computes, grads.gather(self.runtime), strict=True
                ):
                    target = compute if copies is None else copies[id(param)]
                    if grad is not None and grad.dtype is not target.dtype:
                        target.grad_dtype = grad.dtype  # keep_low_precision_grads
                    target.grad = None if grad is None else grad.to(target.device)

    def drop_full_gradients(self) -> None:
        """Undo ``gather_gradients``."""
        for buffers in self.buffers:
            for compute in buffers.computes:
                compute.grad = None

    # -- gradients ---------------------------------------------------------------------------------------------------

    def receive(self, group: int, index: int, task: int) -> None:
        """Take one parameter's gradient: see ``FlatGradients.receive``."""
        if self.lifetime.grads is not GradState.FILLING:
            if self.lifetime.grads is GradState.REDUCING:  # a second reduction of this unit in one backward
                self.finish_reduce()
            self.lifetime.move_grads("receive")
        self.grads[group].receive(index, task)

    def gradient_nodes(self) -> list[Node]:
        """Autograd's AccumulateGrad nodes of the trainable parameters. It keeps them only as long as somebody does."""
        epoch = sum([b.epoch for b in self.buffers])
        if epoch != self._nodes_epoch:
            leaves = [c for b in self.buffers for c in b.computes if c.requires_grad]
            self._nodes = [get_gradient_edge(leaf).node for leaf in leaves]
            self._nodes_epoch = epoch
        return self._nodes

    def reduce(self) -> None:
        """Start averaging the gradients over the ranks."""
        self.lifetime.move_grads("reduce")
        _trace.event("all-reduce" if self._is_whole else "reduce-scatter", self.fqn)
        scope = _trace.labelled("reduce_scatter", self.fqn, self.runtime.reducing())
        if scope is None:
            self._start_reductions()
        else:
            with scope:
                self._start_reductions()

    def _start_reductions(self) -> None:
        for buffers, grads in zip(self.buffers, self.grads, strict=True):
            if True in buffers.requires_grad:
                grads.reduce(self.runtime)
            buffers.forget_cast()

    def advance_reduce(self) -> None:
        """Go on to average over the replicas, while later units compute. Where no one waits for it, nothing to do."""
        if self.replicas is not None:
            for grads in self.grads:
                grads.reduction.advance()

    def hold_gradients(self) -> None:
        """A backward without reduction is over: keep its gradients for the next one to add to."""
        if self.lifetime.grads is GradState.FILLING:
            for grads in self.grads:
                grads.hold()
            self.lifetime.move_grads("hold")

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients of earlier backwards wait to be reduced."""
        return self.lifetime.grads is GradState.HELD

    def finish_reduce(self, assign: bool = True) -> None:
        """Wait for the reduction and set the user's gradients. Nothing to do where none is under way."""
        if self.lifetime.grads is not GradState.REDUCING:
            return
        with torch.no_grad():
            given = False
            for grads in self.grads:
                if grads.any_filled:
                    given |= grads.finish(assign)
            self.lifetime.move_grads("finish")
            if given:
                self.on_reduced()

    def discard_gradients(self) -> None:
        """After an exception in backward: drop what was received, reduced or not, and is not in ``.grad`` yet."""
        self.finish_reduce(assign=False)
        for grads in self.grads:
            grads.discard()
        if self.lifetime.grads is not GradState.NONE:
            self.lifetime.move_grads("discard")

    # -- copies ------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatParamHandle:
        """An equally sharded handle on the copied modules, with memory of its own and no gradients."""
        if self.slots.unsharded:
            raise RuntimeError(
                f"cannot copy unit {self.fqn!r} while its parameters are unsharded: copy outside forward, backward and "
                "summon_full_params, after flatshard.reshard(module)"
            )
        owned: dict[int, list[tuple[nn.Module, str]]] = {}
        for module, name, sharded, _ in self.slots.entries:
            owned.setdefault(id(sharded), []).append((module, name))
        result = copy.copy(self)
        memo[id(self)] = result
        result.lifetime = Lifetime(self.fqn)
        result.slots = Slots()
        result.buffers, result.grads, result._gathers, result._nodes_epoch = [], [], [], -1
        for buffers, grads in zip(self.buffers, self.grads, strict=True):
            params = [copy.deepcopy(p, memo) for p in buffers.params]
            new = buffers.copy_with(params)
            result.buffers.append(new)
            result.grads.append(grads.copy_with(new))
            for old, param, compute in zip(buffers.params, params, new.computes, strict=True):
                for module, name in owned[id(old)]:
                    result.slots.add_copied(module, name, param, compute, memo)
        result._gathered = [b for b in result.buffers if not b.is_alias and b.layout.padded_numel]
        return result


def _nothing() -> None:
    pass


def _copy(param: nn.Parameter, device: torch.device | None) -> nn.Parameter:
    value = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=device)
    return nn.Parameter(value.copy_(param.detach()), param.requires_grad)


def _group_by_kind(params: Sequence[ParamSlots]) -> list[list[ParamSlots]]:
    """Parameters of one flat parameter each: equal in dtypes and in being trainable. Order within a group is kept."""
    groups: dict[tuple[torch.dtype, bool, FlatOptions], list[ParamSlots]] = {}
    for owned in params:
        groups.setdefault((owned.param.dtype, owned.param.requires_grad, owned.options), []).append(owned)
    return list(groups.values())
