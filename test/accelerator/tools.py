"""What goes around training, on the simulated accelerator: hooks, collectives, checkpoints, copies."""

import contextlib
import copy
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerator.harness import Cases, Env, mean_square, numbers, sgd
from torch import Tensor, nn

import flatshard
from flatshard import CPUOffload, MixedPrecision
from flatshard.comm import DefaultCollectives

cases = Cases()


def _step(env: Env, model: nn.Module, step: int = 0) -> Tensor:
    loss = mean_square(model(env.batch(step)))
    loss.backward()
    return loss.detach()


# -- hooks -----------------------------------------------------------------------------------------------------------


def _step_at_once(params: Iterable[Tensor]) -> Callable[[Any], None]:
    """A hook that steps an optimizer of its own."""
    optimizer = sgd(params)

    def step(_: Any) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


@cases.add({"of_units": {"of_units": True}, "of_parameters": {"of_units": False}})
def optimizer_in_backward(env: Env, of_units: bool) -> Any:
    model = env.shard(env.make())
    for module in [model, *model.blocks] if of_units else ():
        step = _step_at_once(flatshard.flat_parameters(module))
        flatshard.optim.register_gradients_reduced_hook(module, step)
    for p in [] if of_units else model.parameters():
        p.register_post_accumulate_grad_hook(_step_at_once([p]))
    for step in range(4):
        with env.steady(step == 3):
            mean_square(model(env.batch(step))).backward()
    return numbers(model)


def _wide(group: Any, device: torch.device) -> Any:
    return (
        flatshard.comm.builtin_collectives(group, device)
        if device.type == "cpu"
        else DefaultCollectives(group, widens=True)
    )


class Asynchronous(DefaultCollectives):
    """Collectives on the backend's own stream."""

    def all_gather(self, output: Tensor, shard: Tensor) -> Any:
        return dist.all_gather_into_tensor(output, shard, group=self.group, async_op=True)

    def reduce_scatter(self, output: Tensor, input: Tensor) -> Any:
        return dist.reduce_scatter_tensor(output, input, op=dist.ReduceOp.AVG, group=self.group, async_op=True)


def _asynchronous(group: Any, device: torch.device) -> Any:
    return flatshard.comm.builtin_collectives(group, device) if device.type == "cpu" else Asynchronous(group)


@cases.add(fake=False)
def asynchronous(env: Env) -> Any:
    return env.train(env.shard(env.make(), collectives=_asynchronous))


MIXED = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@cases.add({"fp32": {}, "bf16": {"mixed_precision": MIXED}}, fake=False, ranks=3)
def widened(env: Env, **options: Any) -> Any:
    """Gradients sent as they were computed, and averages over a number of ranks that is no power of two: as over gloo."""
    model = env.shard(env.make(), collectives=_wide, **options)
    found = env.train(model)
    if env.is_simulated:
        from accelerator import sim_ccl

        sent = any(what.startswith("all_to_all") for _, _, what in sim_ccl.order)
        if sent is not bool(options):
            env.problems.append(f"gradients are {'' if sent else 'not '}sent by an all-to-all")
    return found


# -- state -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def shared_folder(env: Env) -> Iterator[Path]:
    """The same on all ranks."""
    where: list[Any] = [tempfile.mkdtemp() if env.rank == 0 else None]
    dist.broadcast_object_list(where, src=0, group=env.group, device=torch.device("cpu"))
    try:
        yield Path(where[0])
    finally:
        dist.barrier(group=env.group)
        if env.rank == 0:
            shutil.rmtree(where[0])


@cases.add(fake=False)
def checkpoint(env: Env) -> Any:
    """Written in the background, while the job trains."""
    model = env.shard(env.make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    _step(env, model)
    optimizer.step()
    job = {"model": model, "optimizer": optimizer}
    with shared_folder(env) as folder:
        saved = flatshard.save_checkpoint(str(folder / "job"), job, process_group=env.group, wait=False)
        _step(env, model, 1)
        optimizer.step()
        saved.result()
        trained = numbers(model)
        flatshard.load_checkpoint(str(folder / "job"), job, process_group=env.group)
        return trained, numbers(model), env.train(model, optimizer=lambda _: optimizer)


# -- copies, dtypes, devices --------------------------------------------------------------------------------------------


@cases.add({"pinned": {"pin": True}, "not_pinned": {"pin": False}}, watch_host=True)
def copied_offloaded(env: Env, pin: bool) -> Any:
    model = env.shard(env.make(), cpu_offload=CPUOffload(True, pin_memory=pin))
    _step(env, model)
    other = copy.deepcopy(model)
    for dtype in (torch.float64, torch.float32):
        with torch.no_grad():
            other.to(dtype)(env.batch(0).to(dtype))  # which adopts what it was converted to
    pinned = [[p.is_pinned() for p in m.parameters() if p.numel()] for m in (model, other)]
    assert pinned[0] == pinned[1]
    return env.train(model, waits=True), env.train(other, waits=True)


@cases.add()
def second_device(env: Env) -> Any:
    """A model on a device that is not the current one."""
    if env.is_simulated:
        env.device = torch.device("simdev", 1)
    return env.train(env.shard(env.make()))
