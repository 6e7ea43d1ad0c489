"""``OffloadedOptimizer``: keeps state on the host, and brings it to the device unit by unit."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from flatshard._base.optimizers import Group, params_of, step_copy, unhooked_step
from flatshard._handle.tensors.sharded_parameter import full_shape
from flatshard.checkpoint._optimizer_hooks import hook_optimizer
from flatshard.optim._host_state import Traffic, Visit, nbytes_on
from flatshard.optim._turns import Turn, by_unit, in_turns, shares_of


class OffloadedOptimizer(Optimizer):
    """Keeps the state of an ``optimizer_class`` in host memory, and steps on the device, one unit after the other.

    While a unit is stepped, the state of the next one is copied to the device, and that of the previous one has been copied
    back. So at most two units' state and the temporaries of one unit's step are on the device. The results are bit for bit
    those without offloading. The host waits for the device only where state is read, not in a step. A plain parameter, in no
    unit, is stepped alone. Parameters on the host (on CPU, or by ``cpu_offload=True``) are stepped there, unit by unit, and
    nothing is copied.

    Example::

        optimizer = flatshard.optim.OffloadedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4, foreach=True)
        model(batch).sum().backward()
        flatshard.clip_grad_norm_(model, 1.0)
        optimizer.step()

    Everything else is as with ``optimizer_class``: param groups and their options, learning rate schedulers, ``GradScaler``,
    hooks (once a step), ``state_dict``, ``flatshard.checkpoint`` and ``torch.distributed.checkpoint``. A checkpoint of either
    may be loaded into the other. A closure is called once, before the first unit is stepped.

    If a step raises, also because the device is out of memory, the units before it have been stepped, that unit is as the
    optimizer left it, and the others have not been stepped. All state is complete, and on the host. If the host was out of
    memory, the rest of that unit's state is still on the device until the next step.

    Tensors without dimensions, such as the step counts of fused optimizers, stay on the device.

    Args:
        params: as for other optimizers: parameters of sharded modules, plain parameters, or param groups.
        optimizer_class: creates the optimizer, which must treat parameters one by one. ``WholeParameterOptimizer`` is for
            optimizers that need full matrices.
        pin_memory: keep the state in page-locked memory. Otherwise copies block the host.
        **defaults: passed to ``optimizer_class``.

    Raises:
        TypeError: ``optimizer_class`` does not create an optimizer.
        ValueError: the optimizer steps by another optimizer inside; or ``optimizer_class`` raises it.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., Optimizer],
        *,
        pin_memory: bool = True,
        **defaults: Any,
    ) -> None:
        self.inner: Any = SimpleNamespace()  # the optimizer; during torch's constructor a namespace for its attributes
        self._traffic: list[Traffic] = []  # of the devices of parameters
        self._coming: tuple[Turn, Visit] | None = None  # in a backward: the next unit, whose state is being copied
        self.ahead: set[nn.Parameter] = set()  # parameters that ``step_ahead`` has stepped since the last step
        self.pin_memory = pin_memory
        super().__init__(params, defaults)
        inner = optimizer_class(self.param_groups, **defaults)
        name = type(inner).__name__
        if not isinstance(inner, Optimizer):
            raise TypeError(f"OffloadedOptimizer: optimizer_class made a {name}, which is no torch.optim.Optimizer")
        if any(isinstance(value, Optimizer) for value in vars(inner).values()):
            raise ValueError(
                f"OffloadedOptimizer: {name} steps by another optimizer inside, which would step all parameters at once. "
                f"Offload that one, and give the result to {name}"
            )
        self.inner = inner
        hook_optimizer(self)  # a state dict of sharded values may be loaded before the first step
        self._put_away(inner.state, params_of(inner))  # Adagrad has state as soon as it is built

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The state by parameter, as in torch, on the host. Waits until all copies are there."""
        self._wait()
        found: defaultdict[torch.Tensor, Any] = self.inner.state
        return found

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        self.inner.state = state

    @property
    def param_groups(self) -> list[Group]:
        """See torch."""
        found: list[Group] = self.inner.param_groups
        return found

    @param_groups.setter
    def param_groups(self, groups: list[Group]) -> None:
        self.inner.param_groups = groups

    @property
    def defaults(self) -> dict[str, Any]:
        """See torch."""
        found: dict[str, Any] = self.inner.defaults
        return found

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.inner.defaults = defaults

    @property
    def host_nbytes(self) -> int:
        """Bytes of this rank's state in host memory."""
        return nbytes_on(self.inner.state, lambda device: device.type == "cpu")

    @property
    def device_nbytes(self) -> int:
        """Bytes of this rank's state that stay on the device between steps: tensors without dimensions."""
        return nbytes_on(self.inner.state, lambda device: device.type != "cpu")

    def __repr__(self) -> str:
        units = self._units()
        moved = any(Traffic.of(p.device) is not None for p in params_of(self))
        where = f"on the host{', pinned' if self.pin_memory else ''}" if moved else "on the host, as are the parameters"
        return (
            f"OffloadedOptimizer of {type(self.inner).__name__} ({len(params_of(self))} parameters in {len(units)} units; "
            f"state here: {self.host_nbytes:,} bytes {where}, {self.device_nbytes:,} on the device)\n{super().__repr__()}"
        )

    def __getstate__(self) -> dict[str, Any]:
        self._wait()
        return {"inner": self.inner, "pin_memory": self.pin_memory, "_coming": None, "ahead": set(), "_traffic": []}

    def add_param_group(self, param_group: Group) -> None:
        """See torch."""
        if isinstance(self.inner, Optimizer):
            self.inner.add_param_group(param_group)
        else:  # torch's constructor
            super().add_param_group(param_group)

    def first_step(self, param: nn.Parameter, group: Group) -> tuple[dict[str, Any], Group]:
        """Internal: return the state that a first step would create for ``param``, and the options of ``group`` after it.

        Changes nothing. For ``optim_state_dict(for_load=True)``.
        """
        made, options = step_copy(self.inner, group, torch.zeros_like(param.detach()))
        self._put_away({param: made}, [param])
        self._wait()
        return made, options

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all units. See torch.

        Raises:
            RuntimeError: the optimizer computes something over all parameters, or may not step shards. Nothing has been
                stepped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._coming = None
        units = self._units()
        visits = [self._visit(self.inner.state, [p for p in unit if p.grad is not None]) for unit in units]
        visits[0].fetch()
        with contextlib.closing(in_turns(self.inner, units)) as turns:
            for _, before, visit, later in zip(turns, [None, *visits], visits, [*visits[1:], None], strict=False):
                if before is not None:
                    before.release()
                self._take_turn(visit, later)
        visits[-1].release()
        self.ahead.clear()
        return loss

    def _take_turn(self, visit: Visit, later: Visit | None) -> None:
        """Step the parameters in the groups now, those of ``visit``, and copy the state of ``later`` meanwhile."""
        try:
            visit.show()
            if later is not None:
                later.fetch()
            unhooked_step(self.inner)(self.inner)
        finally:
            visit.put_away()

    @torch.no_grad()
    def step_ahead(self, params: Turn, following: Turn) -> None:
        """Internal: step the ``params`` of a unit before ``step()``, which ends the step, and drop their gradients.

        ``following``: the parameters that will most likely be next, or none. For :func:`step_in_backward`.
        """
        coming, self._coming = self._coming, None
        if coming is not None and coming[0] is params:
            visit = coming[1]
        else:
            visit = self._visit(self.inner.state, params)
            visit.fetch()
        later = self._visit(self.inner.state, following) if following else None
        with contextlib.closing(in_turns(self.inner, [params], ends=False)) as turns:
            for _ in turns:
                self.ahead.update(params)
                self._take_turn(visit, later)
        visit.release()
        stepped = [p for p in params if p.grad is not None and (p.numel() or full_shape(p).numel())]
        increment_version(stepped)  # see `_note_step`
        for p in params:
            p.grad = None
        self._coming = None if later is None else (following, later)

    def is_for(self, params: Iterable[nn.Parameter]) -> bool:
        """Internal: return whether it steps some of ``params``."""
        return not set(params_of(self)).isdisjoint(params)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """False: ``GradScaler``, which asks before it steps, unscales gradients itself."""
        if self.ahead:
            raise RuntimeError(
                "GradScaler with step_in_backward: units have been stepped in backward by gradients that were not unscaled. "
                "remove() the handle of step_in_backward, or train in bf16, which needs no scaling"
            )
        return False

    def _units(self) -> list[Turn]:
        return by_unit(params_of(self)) or [[]]

    def _wait(self) -> None:
        """Wait until all copies to the host may be read."""
        for traffic in self._traffic:
            traffic.wait_on_host()

    def _visit(self, states: Any, params: Sequence[nn.Parameter]) -> Visit:
        for device in {p.device for p in params}:
            if (traffic := Traffic.of(device)) is not None and traffic not in self._traffic:
                self._traffic.append(traffic)
        return Visit(states, params, self.pin_memory)

    def _put_away(self, states: Any, params: Sequence[nn.Parameter]) -> None:
        """Copy the state of ``params`` to the host."""
        for unit in by_unit([p for p in params if p in states]):
            visit = self._visit(states, unit)
            visit.put_away()
            visit.release()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See torch. The inner optimizer loads it, unit by unit, and it is copied to the host. An error changes nothing."""
        state_dict = state_dict.copy()
        for hook in list(self._optimizer_load_state_dict_pre_hooks.values()):
            state_dict = hook(self, state_dict) or state_dict
        inner, groups, state = self.inner, self.param_groups, self.state
        saved = state_dict["param_groups"]
        counts = [[len(group["params"]) for group in each] for each in (saved, groups)]
        if counts[0] != counts[1]:
            raise ValueError(f"loaded state dict has groups of {counts[0]} parameters, this optimizer of {counts[1]}")
        keys = dict(zip(params_of(self), (key for group in saved for key in group["params"]), strict=True))
        found = dict(state_dict["state"])
        loaded: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        options: dict[int, Group] = {}
        try:
            for shares in shares_of(groups, self._units()):
                own = [p for params in shares.values() for p in params]
                given = {keys[p]: found.pop(keys[p]) for p in own if keys[p] in found}
                inner.state = defaultdict(dict)
                inner.param_groups = [{**groups[i], "params": params} for i, params in shares.items()]
                theirs = [{**saved[i], "params": [keys[p] for p in params]} for i, params in shares.items()]
                inner.load_state_dict({**state_dict, "state": given, "param_groups": theirs})
                self._put_away(inner.state, own)
                loaded.update(inner.state)
                options.update(zip(shares, inner.param_groups, strict=True))
        except BaseException:
            inner.param_groups, inner.state = groups, state
            raise
        inner.param_groups = [{**options[i], "params": group["params"]} for i, group in enumerate(groups)]
        inner.state = loaded
        loaded.update(found)  # state of no parameter, as in torch
        for done in list(self._optimizer_load_state_dict_post_hooks.values()):
            done(self)
