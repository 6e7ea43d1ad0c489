"""What goes around training, on the simulated accelerator: whole parameters, norms, hooks, collectives, checkpoints."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerator.harness import WIDTH, Block, Cases, Env, mean_square, numbers, sgd
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flatshard
from flatshard import MixedPrecision
from flatshard import ShardingStrategy as S
from flatshard.checkpoint import ShardedValue, full_state_dict, iter_full_params, optim_state_dict
from flatshard.comm import DefaultCollectives, register_comm_hook

cases = Cases()
BF16 = {"rtol": 2e-2, "atol": 2e-3}


def _step(env: Env, model: nn.Module, step: int = 0) -> Tensor:
    loss = mean_square(model(env.batch(step)))
    loss.backward()
    return loss.detach()


# -- whole parameters ------------------------------------------------------------------------------------------------


@cases.add(
    {
        "writes": {},
        "keeps": {"writeback": False},
        "rank0": {"rank0_only": True, "writeback": False},
        "on_cpu": {"offload_to_cpu": True},
        "on_cpu_keeps": {"offload_to_cpu": True, "writeback": False},
        "with_grads": {"with_grads": True},
        "mixed": {"dtype": torch.bfloat16},
        "not_sharded": {"strategy": S.NO_SHARD},
    },
    **BF16,
)
def summoned(env: Env, dtype: Any = None, strategy: S = S.FULL_SHARD, **options: Any) -> Any:
    model = env.shard(env.make(), strategy=strategy, mixed_precision=MixedPrecision(dtype, torch.float32))
    optimizer = sgd(model.parameters())
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        _step(env, model, step)
        with flatshard.summon_full_params(model, **options), torch.no_grad():
            for p in model.parameters():
                seen.append(p.detach().clone())
                if options.get("with_grads") and p.grad is not None:
                    seen.append(p.grad.clone())
                    p.grad.mul_(2)
                p.mul_(0.9)
        optimizer.step()
    return seen, numbers(model)


@cases.add({"sync": {}, "async": {"async_op": True}})
def unsharded_by_hand(env: Env, **options: Any) -> Any:
    model = env.shard(env.make())

    def run(step: int) -> None:
        handles = [flatshard.unshard(block, **options) for block in model.blocks]
        for handle in handles if step == 1 else ():
            if handle is not None:
                handle.wait()
        mean_square(model(env.batch(step))).backward()
        flatshard.reshard(model)

    return env.steps(model, run)


@cases.add()
def kept_unsharded(env: Env) -> Any:
    model = env.shard(env.make())
    outputs = []

    def run(step: int) -> None:
        batches = [env.batch(10 * step + i) for i in range(3)]
        with torch.no_grad(), flatshard.keep_unsharded(model):
            outputs.extend(model(b) for b in batches)
        mean_square(model(batches[0])).backward()

    return env.steps(model, run), outputs


# -- gradients -------------------------------------------------------------------------------------------------------


@cases.add()
def statistics(env: Env) -> Any:
    model = env.shard(env.make())
    _step(env, model)
    found = flatshard.optim.gradient_statistics(model)
    params = [*model.parameters()]
    grads = [p.grad for p in params]
    segments = [flatshard.optim.segment_reduce(grads, params, op) for op in ("norm", "sum", "mean", "max")]
    return segments, {n: [float(s.norm), float(s.max_abs), float(s.mean)] for n, s in found.items()}


@cases.add()
def scaled(env: Env) -> Any:
    """With GradScaler, which waits for the device."""
    model = env.shard(env.make())
    scaler = torch.amp.GradScaler(env.device.type, init_scale=8.0, growth_interval=1)
    optimizer = sgd(model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        loss = mean_square(model(env.batch(step)))
        scaler.scale(loss * float("inf") if step == 1 else loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return numbers(model), scaler.get_scale()


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


def _default_hook(state: Any, grad: Tensor, output: Tensor) -> None:
    """A reduction in the manner of FSDP1's hooks: at once, on the current stream."""
    dist.reduce_scatter_tensor(output, grad, group=state)
    output.div_(state.size())


@cases.add(fake=False)
def own_comm_hook(env: Env) -> Any:
    model = env.shard(env.make())
    register_comm_hook(model, env.group, _default_hook)
    return env.train(model)


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


@cases.add({"elements": {"layout": None}, "whole": {"layout": flatshard.layouts.Whole()}})
def whole_optimizer(env: Env, layout: Any) -> Any:
    model = env.shard(env.make(), layout=layout)
    matrices = [p for p in model.parameters() if len(flatshard.full_shape(p)) == 2]
    vectors = [p for p in model.parameters() if len(flatshard.full_shape(p)) < 2]
    optimizers = [flatshard.optim.WholeParameterOptimizer(matrices, torch.optim.Adafactor, lr=0.01), sgd(vectors)]
    for step in range(3):
        model.zero_grad()
        _step(env, model, step)
        for optimizer in optimizers:
            optimizer.step()
    return numbers(model)


# -- state -----------------------------------------------------------------------------------------------------------


@cases.add({"fp32": {}, "bf16": {"dtype": torch.bfloat16}, "replicated": {"strategy": S.NO_SHARD}}, **BF16)
def state(env: Env, dtype: Any = None, **options: Any) -> Any:
    """By our verbs and by torch's helpers."""
    model = env.shard(env.make(), mixed_precision=MixedPrecision(dtype, torch.float32), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    results: list[Any] = []
    for step in range(2):
        optimizer.zero_grad()
        _step(env, model, step)
        optimizer.step()
        results.append(full_state_dict(model, offload_to_cpu=step == 0))
        results.append({n: t.clone() for n, t in iter_full_params(model, bucket_bytes=1000)})
        results.append([flat["shard"].clone() for flat in flatshard.checkpoint.local_state_dict(model)["flats"]])
        results.append(optim_state_dict(model, optimizer, full=True)["state"])
        whole = StateDictOptions(full_state_dict=True, cpu_offload=step == 0)
        results.append({n: t.clone() for n, t in get_model_state_dict(model, options=whole).items()})
        of_optimizer = get_optimizer_state_dict(model, optimizer, options=whole)
        results.append(of_optimizer.get("state"))  # of rank 0 only, if on CPU
        for value in model.state_dict().values():
            results.append(value.full_tensor() if isinstance(value, ShardedValue) else value.clone())
        flatshard.checkpoint.load_optim_state_dict(model, optimizer, optim_state_dict(model, optimizer))
        model.load_state_dict(model.state_dict())
        flatshard.debug.check_replicas(model, buffers=True)
    return results, numbers(model)


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


@cases.add({"waits": {"wait": True}, "background": {"wait": False}}, fake=False)
def checkpoint(env: Env, wait: bool) -> Any:
    model = env.shard(env.make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    _step(env, model)
    optimizer.step()
    job = {"model": model, "optimizer": optimizer}
    with shared_folder(env) as folder:
        saved = flatshard.save_checkpoint(str(folder / "job"), job, process_group=env.group, wait=wait)
        _step(env, model, 1)  # goes on at once
        optimizer.step()
        saved.result()
        trained = numbers(model)
        flatshard.load_checkpoint(str(folder / "job"), job, process_group=env.group)
        return trained, numbers(model), env.train(model, optimizer=lambda _: optimizer)


@cases.add({"fp32": {}, "bf16": {"dtype": torch.bfloat16}}, **BF16)
def changed_params(env: Env, dtype: Any = None) -> Any:
    """What is sent is what the step before has made, though the next step begins at once."""
    model = env.shard(env.make(), mixed_precision=MixedPrecision(dtype, torch.float32))
    optimizer = sgd(model.parameters())
    since = flatshard.checkpoint.SentParams(model)
    server = {n: t.clone() for n, t in iter_full_params(model, dtype=dtype)}
    results = []
    for step in range(3):
        optimizer.zero_grad()
        _step(env, model, step)
        optimizer.step()
        changes = list(flatshard.checkpoint.iter_changed_params(since))
        optimizer.zero_grad()
        _step(env, model, step)
        optimizer.step()
        for changed in changes:
            flatshard.checkpoint.apply_changed_params(server, since.plan, changed)
        results.append({n: t.clone() for n, t in server.items()})
    return results, numbers(model)


@cases.add(fake=False)
def exported(env: Env) -> Any:
    model = env.shard(env.make())
    optimizer = sgd(model.parameters())
    _step(env, model)
    optimizer.step()
    with shared_folder(env) as folder:
        flatshard.checkpoint.export_safetensors(model, str(folder), max_file_bytes=2000)
        written = [torch.frombuffer(bytearray(f.read_bytes()), dtype=torch.uint8) for f in sorted(folder.iterdir())]
        return written, env.train(model, optimizer=lambda _: optimizer)


# -- with tensor parallelism -----------------------------------------------------------------------------------------


@cases.add(ranks=4, fake=False)
def tensor_parallel(env: Env) -> Any:
    mesh = env.mesh((2, 2), "dp", "tp")
    model = env.make(lambda: nn.Sequential(Block(WIDTH), Block(WIDTH)))
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model = env.shard(model, device_mesh=mesh["dp"])
    optimizer = sgd(model.parameters())
    norms = []
    for step in range(3):
        x = env.tensor(2, WIDTH, seed=10 * step + mesh["dp"].get_local_rank())
        optimizer.zero_grad()
        mean_square(model(x)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
    return norms, numbers(model)
