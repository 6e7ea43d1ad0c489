"""Calls around training on the simulated accelerator: collectives, copies."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerator.harness import Cases, Env
from torch import Tensor

import flatshard
from flatshard import CPUOffload, MixedPrecision
from flatshard.comm import DefaultCollectives

cases = Cases()


# -- Collectives -------------------------------------------------------------------------------------------------------


def _on_device(make: Callable[[Any], Any]) -> Any:
    """Return a factory of ``make``'s collectives on the device and the built-in ones on CPU."""

    def chosen(group: Any, device: torch.device) -> Any:
        return flatshard.comm.builtin_collectives(group, device) if device.type == "cpu" else make(group)

    return chosen


class Asynchronous(DefaultCollectives):
    """Collectives on the backend's own stream."""

    def all_gather(self, output: Tensor, shard: Tensor) -> Any:
        return dist.all_gather_into_tensor(output, shard, group=self.group, async_op=True)

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Any:
        return dist.reduce_scatter_tensor(output, input, op=dist.ReduceOp.AVG, group=self.group, async_op=True)


@cases.add(fake=False)
def asynchronous(env: Env) -> Any:
    return env.train(env.shard(env.make(), collectives=_on_device(Asynchronous)))


MIXED = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@cases.add({"fp32": {}, "bf16": {"mixed_precision": MIXED}}, fake=False, ranks=3)
def widened(env: Env, **options: Any) -> Any:
    """Widen gradients in the collective, like gloo, and average over a number of ranks that is no power of two."""
    model = env.shard(env.make(), collectives=_on_device(functools.partial(DefaultCollectives, widens=True)), **options)
    found = env.train(model)
    if env.is_simulated:
        from accelerator import sim_ccl

        assert any(what.startswith("all_to_all") for _, _, what in sim_ccl.order) is bool(options)
    return found


# -- Copies, dtypes, devices -------------------------------------------------------------------------------------------


@cases.add({"pinned": {"pin": True}, "not_pinned": {"pin": False}}, watch_host=True)
def copied_offloaded(env: Env, pin: bool) -> Any:
    model = env.shard(env.make(), cpu_offload=CPUOffload(True, pin_memory=pin))
    env.backward(model)
    other = copy.deepcopy(model)
    for dtype in (torch.float64, torch.float32):
        with torch.no_grad():
            other.to(dtype)(env.batch(0).to(dtype))  # adopts the converted parameters
    pinned = [[p.is_pinned() for p in m.parameters() if p.numel()] for m in (model, other)]
    assert pinned[0] == pinned[1]
    return env.train(model, waits=True), env.train(other, waits=True)


@cases.add()
def second_device(env: Env) -> Any:
    """Train on a device that is not the current one."""
    if env.is_simulated:
        env.device = torch.device("simdev", 1)
    return env.train(env.shard(env.make()))
