"""Training on the simulated accelerator: strategies, precision, accumulation, prefetch, offload, order of computation."""

import contextlib
import functools
from typing import Any

import torch
from accelerator.harness import WIDTH, Block, Cases, Env, Net, mean_square, numbers, sgd
from encoded import Linear8
from torch import Tensor, nn

import flatshard
from flatshard import CPUOffload, MixedPrecision
from flatshard import ShardingStrategy as S
from flatshard.comm import QuantizedCollectives

cases = Cases()
BF16 = {"rtol": 2e-2, "atol": 2e-3}
LOW = {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)}
OFFLOAD = {"cpu_offload": CPUOffload(True)}


def train(env: Env, **options: Any) -> Any:
    """Train a model. ``Env.train`` gets its own ``options``, and ``fully_shard`` the others."""
    own = {name: options.pop(name) for name in ("micro", "holds", "optimizer", "clip") if name in options}
    return env.train(env.shard(env.make(), **options), waits="cpu_offload" in options, **own)


def clip(model: nn.Module) -> Tensor:
    return flatshard.clip_grad_norm_(model, 0.1)


# -- Strategies, precision, accumulation, norms: the host must not wait in any -----------------------------------------


@cases.add(
    {
        "full": {},
        "grad_op": {"strategy": S.SHARD_GRAD_OP},
        "none": {"strategy": S.NO_SHARD},
        "optim_static": {"strategy": S.SHARD_OPTIM, "static_buffers": True},
        "each_reduced": {"micro": 3},
        "no_sync": {"micro": 3, "holds": "gradient_sync"},
        "clips": {"clip": clip},
        "clips_by_torch": {"clip": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1)},
        "adamw": {"optimizer": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-3, foreach=True)},
        "flat": {"optimizer": lambda model: sgd(flatshard.flat_parameters(model))},
    }
)
def sharded(env: Env, **options: Any) -> Any:
    return train(env, **options)


@cases.add(
    {
        "hybrid_all_reduces_later": {"strategy": S.HYBRID_SHARD, "micro": 3, "holds": "all_reduce"},
        "hybrid_full_bf16": {"strategy": S.HYBRID_FULL_SHARD, "micro": 2, **LOW},
        "clips": {"strategy": S.HYBRID_SHARD, "clip": clip},
    },
    ranks=4,
    **BF16,
)
def replicated(env: Env, **options: Any) -> Any:
    return train(env, device_mesh=env.replicas, **options)


@cases.add({"two": {}}, ranks=4)
def subgroups(env: Env) -> Any:
    model = env.shard(env.make(), reshard_after_forward=2)
    results = env.train(model)
    flatshard.configure(model, reshard_after_forward=True)
    return results, env.train(model, steps=2)


@cases.add({"three": {}}, fake=False, ranks=3)
def averaged(env: Env, **options: Any) -> Any:
    return train(env, **options)


@cases.add(ranks=4, fake=False)
def many_steps(env: Env) -> Any:
    """Train until ranks no longer compare the order of collectives, which makes the host wait on a device group."""
    return env.train(env.shard(env.make(), reshard_after_forward=2), steps=6, steady_from=5)


@cases.add()
def overlapped(env: Env) -> Any:
    """A computing unit does not wait for side streams, which gather the next unit or reduce."""
    model = env.shard(env.make())
    env.backward(model)  # the first pass knows no order for prefetching
    seen: list[bool] = []
    if env.is_simulated:
        from accelerator.sim import sim

        before = sim.given()
        for block in model.blocks[:2]:
            block.down.register_forward_hook(lambda *_: seen.append(sim.waits_for_all(before)))
            block.down.register_full_backward_hook(lambda *_: seen.append(sim.waits_for_all(before)))
    env.backward(model, 1)
    assert not any(seen)
    assert len(seen) == 4 * env.is_simulated
    return numbers(model)


# -- Offload -----------------------------------------------------------------------------------------------------------


@cases.add(
    {
        "pinned": OFFLOAD,
        "not_pinned": {"cpu_offload": CPUOffload(True, pin_memory=False)},
        "holds": {**OFFLOAD, "micro": 2, "holds": "gradient_sync"},
        "bf16": {**OFFLOAD, **LOW},
    },
    watch_host=True,
    **BF16,
)
def offload(env: Env, **options: Any) -> Any:
    return train(env, **options)


@cases.add({"load": {"then": "load"}, "step": {"then": "step"}, "write": {"then": "write"}}, watch_host=True)
def offload_evaluates(env: Env, then: str) -> Any:
    """A change right after an evaluation must not change the evaluation's values."""
    model = env.shard(env.make(), cpu_offload=CPUOffload(True))
    env.backward(model, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {n: torch.ones_like(t) for n, t in flatshard.checkpoint.full_state_dict(model).items()}
    outputs = []
    for step in range(2):
        batch = env.batch(step)
        with torch.no_grad():
            outputs.append(model(batch))
        if then == "load":
            model.load_state_dict(state)
        elif then == "step":
            optimizer.step()
        else:
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(2)
    return outputs, numbers(model)


@cases.add({how: {"how": how} for how in ("unshard", "summon", "held", "kept")}, watch_host=True)
def offload_reads(env: Env, how: str) -> Any:
    """Change shards right after a call that reads them, or after a backward without gradients on the host."""
    model = env.shard(env.make(), cpu_offload=CPUOffload(True), reshard_after_forward=True)
    seen = []
    for step in range(2):
        if how == "held":
            with flatshard.no_sync(model):
                env.backward(model, step)
        elif how == "summon":
            with flatshard.summon_full_params(model, writeback=False), torch.no_grad():
                seen += [p.clone() for p in model.parameters()]
        elif how == "kept":
            with torch.no_grad(), flatshard.keep_unsharded(model, threads=True):
                seen.append(model(env.batch(step)))
        else:
            flatshard.unshard(model, recurse=True)
            seen += [p.detach().clone() for p in model.parameters()]
            flatshard.reshard(model)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9).add_(step + 1)
    env.backward(model, 2)
    return seen, numbers(model)


# -- Encoded parameters ------------------------------------------------------------------------------------------------


class Encoded(nn.Sequential):
    """A block with a weight that is gathered in float8."""

    def __init__(self) -> None:
        super().__init__(Linear8(torch.float32, WIDTH, later=True), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


@cases.add({"default": {}, "offload": OFFLOAD}, **BF16)
def encoded_on_streams(env: Env, **options: Any) -> Any:
    """All streams use the scales, which the first unit of a joint gather computes on its stream."""
    model = env.make(functools.partial(Net, Encoded))
    for module in model.modules():
        if isinstance(module, Linear8):
            module.encode()
    model = env.shard(model, policy={Encoded}, **options)
    optimizer, outputs = sgd(model.parameters()), []
    for step in range(3):
        with env.side_streams(2) as streams:
            for i, stream in enumerate(streams):
                with stream:
                    outputs.append(model(env.batch(2 * step + i)))
        sum(mean_square(o) for o in outputs[-2:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return outputs, numbers(model)


# -- Streams -----------------------------------------------------------------------------------------------------------


class Towers(nn.Module):
    """Two towers on two streams with their loss on a third, and a neck that both streams use."""

    def __init__(self, in_turn: bool) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2))
        self.neck = Block()
        self.in_turn = in_turn
        self.env: Any = None

    def forward(self, x: Tensor) -> Tensor:
        with self.env.side_streams(3) as (*sides, last):
            values = [x, x]
            if self.in_turn:  # makes backward switch streams after each block
                for blocks in zip(*self.towers, strict=True):
                    for i, (side, block) in enumerate(zip(sides, blocks, strict=True)):
                        with side:
                            values[i] = block(values[i])
            else:
                for i, (side, tower) in enumerate(zip(sides, self.towers, strict=True)):
                    with side:
                        values[i] = tower(values[i])
            for i, side in enumerate(sides):
                with side:
                    values[i] = self.neck(values[i])
            self.env.wait(last, *sides)
            with last:
                return (values[0] * values[1]).sum(-1)


@cases.add(
    {
        "in_turn": {"in_turn": True},
        "none_resharded": {"reshard_after_forward": False},
        "static_buffers": {"in_turn": True, "static_buffers": True},
        "offload": {"in_turn": True, **OFFLOAD},
        "quantized": {"collectives": QuantizedCollectives(reduce=False)},
    },
    **BF16,
)
def towers(env: Env, in_turn: bool = False, **options: Any) -> Any:
    """Run branches on several streams of the user."""
    model = env.make(lambda: Towers(in_turn))
    model.env = env
    model = env.shard(model, **options)
    optimizer = sgd(model.parameters())
    results = []
    batches = [env.batch(step) for step in range(3)]
    for step, batch in enumerate(batches):
        with env.steady(step == 2 and "cpu_offload" not in options):
            with torch.no_grad():
                results += [model(batch) for _ in range(2)]
            optimizer.zero_grad()
            mean_square(model(batch)).backward()
            optimizer.step()
    return results, numbers(model)


class Either(nn.Module):
    """A unit that uses one of two parameters at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.choices = nn.ParameterList(torch.linspace(-1, 1, 2**15) for _ in range(2))  # not a small flat parameter

    def forward(self, x: Tensor, which: int) -> Tensor:
        return x * self.choices[which]


@cases.add({"default": {}, "not_sharded": {"strategy": S.NO_SHARD}}, **BF16)
def gradients_of_one_unit(env: Env, **options: Any) -> Any:
    """Accumulate the gradients of one unit on two streams."""
    model = env.shard(env.make(Either), policy={Either}, **options)

    def run(step: int) -> None:
        batch = env.tensor(2, 2**15, seed=step)
        for _ in range(2):
            values = []
            with env.side_streams(2) as sides:
                for i, side in enumerate(sides):
                    with side:
                        values.append(model(batch, i).tanh())
            (mean_square(values[0]) + mean_square(values[1])).backward()

    return env.steps(model, run)


@cases.add({"grad_op": {"strategy": S.SHARD_GRAD_OP}, "holds": {"holds": True}})
def microbatches_on_streams(env: Env, holds: bool = False, **options: Any) -> Any:
    """Build the graphs of two microbatches on separate streams, then run two backwards."""
    model = env.shard(env.make(), **options)

    def run(step: int) -> None:
        batches, losses = [env.batch(10 * step + i) for i in range(2)], []
        with env.side_streams(2) as sides:
            for side, batch in zip(sides, batches, strict=True):
                with side:
                    losses.append(mean_square(model(batch)))
        for i, loss in enumerate(losses):
            with flatshard.no_sync(model) if holds and not i else contextlib.nullcontext():
                loss.backward()

    return env.steps(model, run)


@cases.add({"deferred": {}, "held": {"holds": True}})
def added_by_a_call(env: Env, holds: bool = False) -> Any:
    """Add gradients of backwards on another stream, by a call, to gradients that this stream has just changed."""
    model = env.shard(env.make())
    flatshard.configure(model, manual_finalization=not holds)

    def run(step: int) -> None:
        for i in range(2):
            with env.side_stream(), flatshard.no_sync(model) if holds else contextlib.nullcontext():
                env.backward(model, 10 * step + i)
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(0.5)
            flatshard.reduce_gradients(model)

    return env.steps(model, run)


@cases.add()
def independent_streams(env: Env) -> Any:
    """Evaluate on two streams that do not wait for each other."""
    model = env.shard(env.make(), reshard_after_forward=True)
    batches = [env.batch(step) for step in range(4)]
    outputs = []
    with torch.no_grad(), env.side_streams(2) as sides:
        for i, batch in enumerate(batches):
            with sides[i % 2]:
                outputs.append(model(batch))
    return outputs
