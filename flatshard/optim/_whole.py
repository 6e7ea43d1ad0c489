"""``WholeParameterOptimizer``: runs an optimizer of whole matrices on sharded parameters. One rank steps each matrix."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from flatshard._base.old_names import OldMember, old_arguments
from flatshard._base.optimizers import Group, options_of, params_of, step_copy, unhooked_step
from flatshard._comm.collectives import Done, Pending
from flatshard._comm.progress import drain
from flatshard._comm.runtime import Runtime
from flatshard._composable.find import flat_of
from flatshard._handle.tensors.sharded_parameter import ShardedParameter, shard_info
from flatshard.optim._owned import Owned, Stepped, exchange, owned_shape
from flatshard.optim._turns import in_turns

LIMIT_BYTES = 2**28


class WholeParameterOptimizer(Optimizer):
    """Steps full parameters by an ``optimizer_class`` that looks at more than single elements: Muon, Shampoo, Adafactor.

    One rank steps each parameter. With the same gradients the result is that of one process, bit for bit. A parameter on a
    single rank is stepped there in place, without communication: because it is small, or by
    ``layout=flatshard.layouts.Whole(max_padding=math.inf)``. If a parameter is cut, its shards and those of its gradient are
    sent to one rank, which steps it and sends the new shards back. This runs in batches, while other parameters are stepped.
    The work is balanced over the ranks. The optimizer's state exists only on the rank that steps the parameter.

    Example::

        matrices = [p for p in model.parameters() if len(flatshard.full_shape(p)) == 2]
        rest = [p for p in model.parameters() if len(flatshard.full_shape(p)) < 2]
        optimizers = [
            flatshard.optim.WholeParameterOptimizer(matrices, torch.optim.Muon, lr=0.02),
            torch.optim.AdamW(rest),
        ]

    Every rank must create it with the same parameters in the same order, and all ranks must call ``step`` together.
    ``zero_grad``, learning rate schedulers, ``flatshard.clip_grad_norm_``, ``flatshard.checkpoint.optim_state_dict`` and
    ``load_optim_state_dict`` work as with other optimizers. Parameters without a gradient are skipped; a gradient must be
    None on all ranks or on none. With ``NO_SHARD`` every rank steps all parameters; with a hybrid strategy each replica does.

    Experts that a mesh divides, as DTensors of at least three dimensions with ``Shard(0)``, are stepped where they are: an
    owner has all matrices of its part of the mesh. ``optimizer_class`` must step each matrix of such a stack by itself, as a
    trial before the first step checks.

    Args:
        params: as for other optimizers: parameters of sharded modules, plain parameters, or param groups.
        optimizer_class: creates the optimizer, which must treat parameters one by one. One that combines them (LBFGS,
            Prodigy) would only see the parameters of this rank.
        bucket_bytes: the size of a batch: bytes of full gradients and parameters on one rank. A batch has at least one
            parameter. Up to three batches are in memory: one is gathered, one is stepped, and one is sent back, without
            gradients.
        **defaults: passed to ``optimizer_class``.

    Raises:
        ValueError: a parameter is one of ``flat_parameters()``, or is unsharded now; or ``optimizer_class`` raises it.
        NotImplementedError: tensor parallelism shards matrices of a parameter as well, so no rank could have them in full.
    """

    steps_whole_parameters = True  # see `optimizers.steps_whole`

    limit_bytes = OldMember("bucket_bytes")

    @old_arguments(limit_bytes="bucket_bytes")
    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., Optimizer],
        *,
        bucket_bytes: int = LIMIT_BYTES,
        **defaults: Any,
    ) -> None:
        self.bucket_bytes = bucket_bytes
        self._owned: dict[nn.Parameter, Stepped] = {}
        self._loads: dict[Runtime, list[int]] = {}  # the work of each rank
        self.inner: Optimizer | None = None
        super().__init__(params, defaults)
        self.inner = optimizer_class([self._of_proxies(group) for group in self.param_groups], **defaults)
        self.defaults = dict(self.inner.defaults)
        _copy_options(self.inner.param_groups, self.param_groups)

    def __repr__(self) -> str:
        mine = sum(each.is_mine for each in self._owned.values())
        cut = sum(each.is_cut for each in self._owned.values())
        return (
            f"WholeParameterOptimizer of {type(self.inner).__name__} ({len(self._owned)} parameters, {cut} of them cut; "
            f"{mine} stepped here)\n{super().__repr__()}"
        )

    def add_param_group(self, param_group: Group) -> None:
        """See torch."""
        super().add_param_group(param_group)
        made = self.param_groups[-1]
        try:
            self._owned.update(_find_owned([p for p in made["params"] if p not in self._owned], self._loads))
        except Exception:
            self.param_groups.pop()
            raise
        if self.inner is not None:
            self.inner.add_param_group(self._of_proxies(made))
            _copy_options(self.inner.param_groups[-1:], [made])

    def _of_proxies(self, group: Group) -> Group:
        """Return the group with proxies, for the inner optimizer."""
        return {**options_of(group), "params": [self._owned[p].proxy for p in group["params"]]}

    def owner(self, param: nn.Parameter) -> int | None:
        """Return the rank of the shard group that steps ``param``, or None if every rank steps it."""
        return self._owned[param].owner

    def steps_here(self, param: nn.Parameter) -> bool:
        """Return whether this rank steps ``param``, and so has its state."""
        return self._owned[param].is_mine

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of one process, by number, and keep that of parameters that this rank steps. See torch.

        The inner optimizer loads it, too: it may have dtypes of its own for its state, where torch would cast.
        """
        assert self.inner is not None
        super().load_state_dict(state_dict)
        groups = [{**options_of(group), "params": group["params"]} for group in state_dict["param_groups"]]
        numbers = [key for group in groups for key in group["params"]]
        others = {key for key, p in zip(numbers, params_of(self), strict=True) if not self.steps_here(p)}
        given = {key: value for key, value in state_dict["state"].items() if key not in others}
        self.inner.load_state_dict({"state": given, "param_groups": groups})
        for param, each in self._owned.items():
            self.state.pop(param, None)
            if each.proxy in self.inner.state:
                self.state[param] = self.inner.state[each.proxy]
        _copy_options(self.inner.param_groups, self.param_groups)

    def first_step(self, param: nn.Parameter, group: Group) -> tuple[dict[str, Any], Group]:
        """Internal: return the state that a first step would create for ``param``, and the options of ``group`` after it.

        Changes nothing, and does not communicate. For ``optim_state_dict(for_load=True)``.
        """
        assert self.inner is not None
        return step_copy(self.inner, group, torch.zeros(owned_shape(param), dtype=param.dtype, device=param.device))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters. All ranks must call it together. See torch.

        Raises:
            RuntimeError: the optimizer computes something over all parameters. Nothing has been stepped.
            CollectiveError: sending shards failed. Some parameters have been stepped, and others have not.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        inner = self.inner
        assert inner is not None
        inner.state.clear()
        inner.state.update({each.proxy: self.state[p] for p, each in self._owned.items() if p in self.state})
        _copy_options(self.param_groups, inner.param_groups)
        stepped = [self._owned[p] for group in self.param_groups for p in group["params"] if p.grad is not None]
        plain = [(each.param, each.param.grad) for each in stepped if not isinstance(each, Owned)]
        try:
            self._step_all(inner, stepped)
        finally:
            for param, grad in plain:
                param.grad = grad
            _copy_options(inner.param_groups, self.param_groups)
        return loss

    def _step_all(self, inner: Optimizer, stepped: list[Stepped]) -> None:
        """Gather each batch while the previous one is stepped, and the first while parameters that are not cut are."""
        owned = [each for each in stepped if isinstance(each, Owned)]
        batches = [_Batch(), *_batches([each for each in owned if each.is_cut], self.bucket_bytes)]
        # Options that count steps count this call in the first turn, also without parameters.
        batches[0].mine = [each for each in stepped if each.is_mine and not each.is_cut]
        turns = [[each.proxy for each in batch.mine] for batch in batches]
        try:
            with contextlib.closing(in_turns(inner, turns)) as shown:
                for _, before, batch, after in zip(
                    shown, [None, *batches], batches, [*batches[1:], None], strict=False
                ):
                    batch.wait()
                    if after is not None:
                        after.start()
                    self._step_some(inner, batch.mine)
                    if before is not None:
                        before.finish()
                    batch.start(back=True)
            batches[-1].finish()
        except BaseException:
            for batch in batches:
                batch.abandon()
            raise
        for each in owned:
            if not each.is_cut and not each.is_mine:
                each.finish()

    def _step_some(self, inner: Optimizer, stepped: Sequence[Stepped]) -> None:
        if not inner.param_groups:
            return
        for each in stepped:
            each.show()
        try:
            unhooked_step(inner)(inner)
        finally:
            for each in stepped:
                each.hide()
        for each in stepped:
            if each.proxy in inner.state:
                self.state[each.param] = inner.state[each.proxy]


class _Batch:
    """Parameters that are stepped together: cut ones of one process group, or those that are not cut."""

    def __init__(self) -> None:
        self.owned: list[Owned] = []  # to be sent
        self.mine: list[Stepped] = []  # stepped by this rank
        self._pending: Pending = Done()

    def start(self, back: bool = False) -> None:
        """Gather them to their owners, or send them ``back``."""
        self._pending = exchange(self.owned, back)

    def wait(self) -> None:
        self._pending.wait()
        self._pending = Done()

    def finish(self) -> None:
        """Wait, and free the memory."""
        self.wait()
        for each in self.owned:
            each.finish()

    def abandon(self) -> None:
        """Free the memory while an error propagates."""
        drain([self._pending])
        for each in self.owned:
            each.drop()


def _find_owned(params: Sequence[nn.Parameter], loads: dict[Runtime, list[int]]) -> dict[nn.Parameter, Stepped]:
    """Choose the owner of each parameter: first of those on a single rank, then of the others, to balance the work."""
    found: dict[nn.Parameter, Stepped] = {param: Stepped(param) for param in params}
    places = []
    for param in params:
        info = shard_info(param)
        if info is None:
            continue
        flat = flat_of(param)
        if flat is None or not isinstance(param, ShardedParameter):
            raise ValueError(
                f"WholeParameterOptimizer cannot step {info.fqn!r}: pass model.parameters(), outside of a forward, unshard() "
                "and summon_full_params, and not flat_parameters()"
            )
        if info.parallel is not None and info.parallel.is_sharded and not info.parallel.is_stack:
            raise NotImplementedError(
                f"WholeParameterOptimizer cannot step {info.fqn!r}, which is sharded over a tensor-parallel mesh as well "
                f"({info.parallel.placements}): no rank could have the whole. Use an optimizer that treats every element "
                "alone, such as AdamW"
            )
        places.append((info.owner is None, param, flat))
    for _, param, flat in sorted(places, key=lambda each: each[0]):
        found[param] = Owned(param, flat, loads.setdefault(flat.ranks.runtime, [0] * flat.ranks.runtime.world_size))
    return found


def _batches(cut: list[Owned], limit: int) -> list[_Batch]:
    """Return batches, each of one process group, with as many bytes for each owner as the limit allows, or one parameter."""
    batches: dict[Runtime, list[_Batch]] = {}
    filled: dict[tuple[Runtime, int | None], tuple[int, int]] = {}  # by owner: its last batch, and its bytes there
    for each in cut:
        of_group = batches.setdefault(each.flat.ranks.runtime, [])
        number, held = filled.get((each.flat.ranks.runtime, each.owner), (0, 0))
        if held and held + each.nbytes > limit:
            number, held = number + 1, 0
        if number == len(of_group):
            of_group.append(_Batch())
        of_group[number].owned.append(each)
        if each.is_mine:
            of_group[number].mine.append(each)
        filled[each.flat.ranks.runtime, each.owner] = number, held + each.nbytes
    return [batch for of_group in batches.values() for batch in of_group]


def _copy_options(given: Sequence[Group], groups: Sequence[Group]) -> None:
    """Set the options of each of ``groups`` to those of its counterpart in ``given``, and remove others."""
    for source, target in zip(given, groups, strict=True):
        for key in [k for k in options_of(target) if k not in source]:
            del target[key]
        target.update(options_of(source))
