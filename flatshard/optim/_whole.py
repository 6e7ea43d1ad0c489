"""``WholeParameterOptimizer``: runs an optimizer of whole matrices on sharded parameters. One rank steps each matrix."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

from flatshard._comm.collectives import Pending
from flatshard._composable.state import owner_of
from flatshard._handle.tensors.sharded_parameter import ShardedParameter, full_shape, shard_info
from flatshard._runtime import Runtime
from flatshard.checkpoint._optim_options import SavedOptions, copy_options, first_state, options_of
from flatshard.layouts import work_of
from flatshard.optim._owned import Owned, move
from flatshard.optim._trial import Impossible, couples_parameters

LIMIT_BYTES = 2**28


class WholeParameterOptimizer(Optimizer):
    """Steps whole parameters by an ``optimizer_class`` that looks at more than single elements: Muon, Shampoo, Adafactor.

    One rank steps each parameter. With the same gradients the result is the same as in one process, bit for bit. A parameter
    that lies on one rank (by ``layout=flatshard.layouts.Whole()``, or because it is small) is stepped there in place, without
    communication. If a parameter is cut, its parts and those of its gradient are sent to one rank, which steps it and sends
    the new parts back. This runs in batches, while other parameters are stepped. The work is balanced over the ranks. The
    optimizer's state exists only on the rank that steps the parameter.

    Example::

        matrices = [p for p in model.blocks.parameters() if len(flatshard.full_shape(p)) == 2]
        rest = ...
        optimizers = [
            flatshard.optim.WholeParameterOptimizer(matrices, torch.optim.Muon, lr=0.02),
            torch.optim.AdamW(rest),
        ]

    Every rank must create it with the same parameters in the same order, and all ranks must call ``step`` together.
    ``zero_grad``, learning rate schedulers, ``flatshard.clip_grad_norm_``, ``flatshard.checkpoint.optim_state_dict`` and
    ``load_optim_state_dict`` work as with other optimizers. Parameters without a gradient are skipped; a gradient must be
    None on all ranks or on none. With ``NO_SHARD`` every rank steps all parameters; with a hybrid strategy each replica does.

    Args:
        params: as for other optimizers: parameters of sharded modules, plain parameters, or param groups.
        optimizer_class: creates the optimizer. It must treat parameters one by one. One that combines them (LBFGS, Prodigy)
            would only see the parameters of this rank.
        limit_bytes: the size of a batch: bytes of whole gradients and parameters on one rank. A batch has at least one
            parameter. Up to three batches are in memory: one is gathered, one is stepped, and one is sent back, the last
            without gradients.
        **defaults: passed to ``optimizer_class``.

    Raises:
        ValueError: a parameter is one of ``flat_parameters()``, or is unsharded now; or ``optimizer_class`` raises it.
        NotImplementedError: a parameter is sharded by tensor parallelism as well, so that no rank could have the whole.
    """

    steps_whole_parameters = True  # `checkpoint/_optim_state_dict.py`

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., Optimizer],
        *,
        limit_bytes: int = LIMIT_BYTES,
        **defaults: Any,
    ) -> None:
        if isinstance(limit_bytes, bool) or not isinstance(limit_bytes, int) or limit_bytes < 1:
            raise ValueError(f"limit_bytes must be a positive number of bytes, got {limit_bytes!r}")
        self.limit_bytes = limit_bytes
        self._owned: dict[nn.Parameter, Owned | None] = {}  # None: a plain parameter
        self._proxies: dict[nn.Parameter, nn.Parameter] = {}
        self._loads: dict[Runtime, list[int]] = {}
        self._inner: Optimizer | None = None
        self._tried_groups = 0
        super().__init__(params, defaults)
        groups = [{**g, "params": [self._proxies[p] for p in g["params"]]} for g in self.param_groups]
        self._inner = optimizer_class([{k: v for k, v in g.items() if k != "param_names"} for g in groups], **defaults)
        self.defaults = dict(self._inner.defaults)
        copy_options(self._inner.param_groups, self.param_groups)

    def __repr__(self) -> str:
        mine = sum(o is None or o.is_mine for o in self._owned.values())
        cut = sum(o is not None and o.is_cut for o in self._owned.values())
        return (
            f"WholeParameterOptimizer of {type(self._inner).__name__} ({len(self._owned)} parameters, {cut} of them cut; "
            f"{mine} stepped here)\n{super().__repr__()}"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch."""
        super().add_param_group(param_group)
        made = self.param_groups[-1]
        new = [p for p in made["params"] if p not in self._owned]
        try:
            found = _find_owned(new, self._loads)
        except Exception:
            self.param_groups.pop()
            raise
        self._owned.update(found)
        self._proxies.update((p, _proxy(p, o)) for p, o in found.items())
        if self._inner is not None:
            options = options_of(made)
            self._inner.add_param_group({**options, "params": [self._proxies[p] for p in made["params"]]})
            copy_options(self._inner.param_groups[-1:], [made])

    def owner(self, param: nn.Parameter) -> int | None:
        """The rank of the shard group that steps ``param``. None: every rank steps it."""
        owned = self._owned[param]
        return None if owned is None or owned.flat.is_whole else owned.owner

    def first_state(self, param: nn.Parameter) -> dict[str, Any]:
        """The state that a first step would create for ``param``, on the rank that steps it; ``{}`` on other ranks.

        Changes nothing, and does not communicate. For ``optim_state_dict(for_load=True)``.
        """
        inner, owned, proxy = self._inner, self._owned[param], self._proxies[param]
        if inner is None or not (owned is None or owned.is_mine):
            return {}
        group = next(g for g in inner.param_groups if any(p is proxy for p in g["params"]))
        return first_state(inner, group, torch.zeros(full_shape(param), dtype=param.dtype, device=param.device))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As in torch. All ranks must call it together.

        Raises:
            RuntimeError: the optimizer computes something over all parameters. Nothing has been stepped.
            CollectiveError: sending parts failed. Some parameters have been stepped, and others have not.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        inner = self._inner
        assert inner is not None
        self._refuse_coupling(inner)
        inner.state.clear()
        for param, proxy in self._proxies.items():
            if param in self.state:
                inner.state[proxy] = self.state[param]
        copy_options(self.param_groups, inner.param_groups)
        before = SavedOptions(inner.param_groups)
        stepped = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        batches = _batches([o for p in stepped if (o := self._owned[p]) is not None and o.is_cut], self.limit_bytes)
        uncut = [p for p in stepped if (o := self._owned[p]) is None or (o.is_mine and not o.is_cut)]
        elsewhere = [o for p in stepped if (o := self._owned[p]) is not None and not (o.is_mine or o.is_cut)]
        plain = [(p, p.grad) for p in stepped if self._owned[p] is None]
        try:
            self._step_batches(inner, before, uncut, batches)
            for each in elsewhere:
                each.finish()
        except BaseException:
            before.restore()
            raise
        finally:
            for param, grad in plain:
                param.grad = grad
        copy_options(inner.param_groups, self.param_groups)
        return loss

    def _refuse_coupling(self, inner: Optimizer) -> None:
        """Try once per ndim of each new param group whether ``inner`` treats parameters one by one."""
        new, self._tried_groups = self.param_groups[self._tried_groups :], len(self.param_groups)
        if type(inner).__module__.startswith("torch.optim"):
            return  # LBFGS needs a closure, which it does not get here
        for settings in new:
            cut = [p for p in settings["params"] if self.owner(p) is not None]
            for ndim, param in {max(1, len(full_shape(p))): p for p in cut}.items():
                with contextlib.suppress(Impossible):  # most likely it needs other arguments
                    if not couples_parameters(inner, settings, ndim):
                        continue
                    info = shard_info(param)
                    self._tried_groups = 0  # it raises again
                    raise RuntimeError(
                        f"{type(inner).__name__} steps a parameter differently if it has other parameters: it computes "
                        f"something over all of them (a norm to clip by, say), and each rank steps only some, such as "
                        f"{info.fqn if info else '?'!r}. Turn that option off, and call flatshard.clip_grad_norm_ "
                        "before the step, or use an optimizer that treats parameters one by one"
                    )

    def _step_batches(
        self, inner: Optimizer, before: SavedOptions, uncut: list[nn.Parameter], batches: list[list[Owned]]
    ) -> None:
        """Step everything. Each batch is gathered while the batch before is stepped, and the first one with ``uncut``."""
        with _UnderWay() as under_way:
            under_way.gather(batches[:1])
            self._step_some(inner, before, uncut)  # also if there are none, because options may count steps
            for number, batch in enumerate(batches):
                under_way.wait_for_gathers()
                under_way.gather(batches[number + 1 : number + 2])
                if mine := [o.param for o in batch if o.is_mine]:
                    self._step_some(inner, before, mine)
                under_way.wait_for_sends()  # frees the memory of the batch before
                under_way.send(batch)

    def _step_some(self, inner: Optimizer, before: SavedOptions, params: Sequence[nn.Parameter]) -> None:
        before.restore()  # so that an option that counts steps counts all batches as one step
        for param in params:
            if (owned := self._owned[param]) is not None:
                owned.show(self._proxies[param])
        try:
            inner.step()
        finally:
            for param in params:
                proxy, owned = self._proxies[param], self._owned[param]
                proxy.grad = None  # also of plain parameters, so that later batches do not step them again
                if owned is not None:
                    proxy.data = _placeholder(param)
                    if not owned.is_cut:
                        owned.finish()
        for param in params:
            if self._proxies[param] in inner.state:
                self.state[param] = inner.state[self._proxies[param]]


class _UnderWay:
    """The messages in progress. When the ``with`` block ends, all are complete and their memory is freed, even on errors."""

    def __init__(self) -> None:
        self._gathers: list[tuple[list[Owned], Pending]] = []
        self._sends: list[tuple[list[Owned], Pending]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is None:
            self.wait_for_sends()
            return
        for batch, pending in [*self._gathers, *self._sends]:
            with contextlib.suppress(Exception):  # only to free memory, while another error propagates
                pending.wait()
            for each in batch:
                each.drop()

    def gather(self, batches: Sequence[list[Owned]]) -> None:
        self._gathers += [(batch, move(batch)) for batch in batches]

    def wait_for_gathers(self) -> None:
        for _, pending in self._gathers:
            pending.wait()
        self._gathers.clear()

    def send(self, batch: list[Owned]) -> None:
        self._sends.append((batch, move(batch, back=True)))

    def wait_for_sends(self) -> None:
        while self._sends:
            batch, pending = self._sends[0]
            pending.wait()
            for each in batch:
                each.finish()
            del self._sends[0]


def _find_owned(params: Sequence[nn.Parameter], loads: dict[Runtime, list[int]]) -> dict[nn.Parameter, Owned | None]:
    """Choose the owner of each parameter. Parameters on one rank come first; the others are then balanced over the ranks."""
    found: dict[nn.Parameter, Owned | None] = dict.fromkeys(params)
    places = []
    for param in params:
        info = shard_info(param)
        if info is None:
            continue
        unit = owner_of(param)
        places_of = (
            [] if unit is None else [(b, i) for b in unit.handle.flats for i, p in enumerate(b.params) if p is param]
        )
        if not places_of or not isinstance(param, ShardedParameter):
            raise ValueError(
                f"WholeParameterOptimizer cannot step {info.fqn!r}: pass model.parameters(), outside of a forward, unshard() "
                "and summon_full_params, and not flat_parameters()"
            )
        if info.parallel is not None and any(p.is_shard() for p in info.parallel.placements):
            raise NotImplementedError(
                f"WholeParameterOptimizer cannot step {info.fqn!r}, which is sharded over a tensor-parallel mesh as well "
                f"({info.parallel.placements}): no rank could have the whole. Use an optimizer that treats every element "
                "alone, such as AdamW"
            )
        places.append((info.owner is None, param, places_of[0]))
    for _, param, (flat, index) in sorted(places, key=lambda each: each[0]):
        of_ranks = [0] if flat.is_whole else loads.setdefault(flat.placement.runtime, [0] * flat.layout.world_size)
        found[param] = Owned(flat, index, work_of(full_shape(param)), of_ranks)
    return found


def _proxy(param: nn.Parameter, owned: Owned | None) -> nn.Parameter:
    """The parameter that the inner optimizer gets instead of ``param``: of the whole shape, without memory between steps."""
    if owned is None:
        return param
    return nn.Parameter(_placeholder(param), param.requires_grad)


def _placeholder(param: nn.Parameter) -> torch.Tensor:
    return torch.empty((), dtype=param.dtype, device=param.device).expand(full_shape(param))


def _batches(cut: list[Owned], limit: int) -> list[list[Owned]]:
    """Divide parameters into batches of one process group each. Each has from every owner what fits the limit, or one."""
    batches: list[list[Owned]] = []
    by_runtime: dict[Runtime, dict[int, list[Owned]]] = {}
    for each in cut:
        by_runtime.setdefault(each.flat.placement.runtime, {}).setdefault(each.owner, []).append(each)
    for by_owner in by_runtime.values():
        portions = [_portions(own, limit) for own in by_owner.values()]
        for k in range(max(map(len, portions))):
            batches.append([o for of_owner in portions if k < len(of_owner) for o in of_owner[k]])
    return batches


def _portions(owned: list[Owned], limit: int) -> list[list[Owned]]:
    portions: list[list[Owned]] = []
    held = 0
    for each in owned:
        if not portions or held + each.nbytes > limit:
            portions.append([])
            held = 0
        portions[-1].append(each)
        held += each.nbytes
    return portions
