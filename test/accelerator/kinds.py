"""Parameters of every kind on the simulated accelerator, and what users do with them between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from accelerator.harness import Block, Cases, Env, Net, mean_square, numbers, sgd
from torch import Tensor, nn

import flatshard
from flatshard import CPUOffload, MixedPrecision
from flatshard import ShardingStrategy as S
from flatshard.checkpoint import full_state_dict

cases = Cases()


class Tied(Net):
    """The last block has a weight of the first; the head is used outside of it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + nn.functional.linear(x, self.head.weight)


class Odd(nn.Module):
    """0-dim, empty, complex, integer, float64 and frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Block()
        self.number = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(8, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.index = nn.Parameter(torch.arange(8).flip(0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)[:, self.index] * self.number + self.frozen + self.empty.sum()
        return (x * self.turn).abs().square() + x * self.wide


class Odds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.odds = nn.ModuleList([Odd(), Odd()])

    def forward(self, x: Tensor) -> Tensor:
        for odd in self.odds:
            x = torch.tanh(odd(x)).float()
        return x


@cases.add({"full": {}, "grad_op": {"strategy": S.SHARD_GRAD_OP}, "none": {"strategy": S.NO_SHARD}})
def tied(env: Env, **options: Any) -> Any:
    return env.train(env.shard(env.make(Tied), **options))


@cases.add({"full": {}, "none": {"strategy": S.NO_SHARD}, "offload": {"cpu_offload": CPUOffload(True)}})
def odd(env: Env, **options: Any) -> Any:
    model = env.shard(env.make(Odds), policy={Odd, Block}, **options)
    for step in range(3):
        with env.steady(step == 2 and "cpu_offload" not in options):
            model.zero_grad()
            mean_square(model(env.batch(step))).backward()
    return numbers(model)


@cases.add(ranks=4)
def replicated_odd(env: Env) -> Any:
    return odd(env, device_mesh=env.replicas, strategy=S.HYBRID_SHARD)


@cases.add({"full": {}, "none": {"strategy": S.NO_SHARD}, "offload": {"cpu_offload": CPUOffload(True)}})
def wide_gradients(env: Env, **options: Any) -> Any:
    """Gradients of two dtypes in a flat parameter."""
    model = env.shard(env.make(), **options)
    for name, param in model.named_parameters():
        if "bias" not in name:
            param.grad_dtype = torch.float64
    for step in range(3):
        with env.steady(step == 2 and "cpu_offload" not in options):
            mean_square(model(env.batch(step))).backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32, torch.float64}
    return numbers(model)


@cases.add()
def toggled(env: Env) -> Any:
    """``requires_grad`` changes between steps."""
    model = env.shard(env.make())
    frozen = [(), (0,), (0, 1), (1,), ()]
    grads = []

    def run(step: int) -> None:
        for i, block in enumerate(model.blocks):
            block.requires_grad_(i not in frozen[step])
        mean_square(model(env.batch(step))).backward()
        grads.append({n: p.grad for n, p in model.named_parameters()})

    return env.steps(model, run, steps=len(frozen), steady=False), grads


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].never = nn.Parameter(torch.ones(5))
        self.never = nn.Linear(2, 2)


@cases.add()
def unused(env: Env) -> Any:
    return env.train(env.shard(env.make(Unused)), waits=True)


# -- where values come from ------------------------------------------------------------------------------------------


@cases.add({"reset": {"how": None}, "param_init_fn": {"how": "ones"}})
def meta(env: Env, how: str | None) -> Any:
    def init(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            nn.init.constant_(p, 0.1)

    with torch.device("meta"):
        model = Net(blocks=2)
    model.scale = nn.Parameter(torch.ones(()))
    model.scale.data = model.scale.data.to(env.device)
    model = env.shard(model, device_id=env.device, param_init_fn=init if how else None)
    whole = full_state_dict(model)
    if how is None:  # random numbers, other ones on each device
        assert all(t.isfinite().all() for t in whole.values())
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p.fill_(0.01 * i)
    return env.train(model)


@cases.add()
def synchronised(env: Env) -> Any:
    torch.manual_seed(env.rank)
    return env.train(env.shard(Net().to(env.device), sync_module_states=True))


@cases.add()
def moved_from_cpu(env: Env) -> Any:
    torch.manual_seed(0)
    return env.train(env.shard(Net(), device_id=env.device))


# -- what users do between steps -------------------------------------------------------------------------------------


def _data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data * 0.5


def _data_from_cpu(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = (p.data.cpu() * 0.5).to(p.device)


def _in_place(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.mul_(0.5)


def _double(model: nn.Module) -> None:
    model.double()


def _assign(model: nn.Module) -> None:
    whole = full_state_dict(model, offload_to_cpu=False)
    model.load_state_dict({n: t * 0.5 for n, t in whole.items()}, assign=True)


def _load(model: nn.Module) -> None:
    model.load_state_dict({n: t * 0.5 for n, t in full_state_dict(model).items()})


def _load_local(model: nn.Module) -> None:
    state = copy.deepcopy(flatshard.checkpoint.local_state_dict(model))
    for flat in state["flats"]:
        flat["shard"].mul_(0.5)
    flatshard.checkpoint.load_local_state_dict(model, state)


def _forward(env: Env, model: nn.Module) -> Any:
    x = env.batch(0).to(next(model.parameters()).dtype)
    loss = mean_square(model(x))
    loss.backward()
    return loss


def _evaluate(env: Env, model: nn.Module) -> Any:
    with torch.no_grad():
        return model(env.batch(0).to(next(model.parameters()).dtype))


def _summon(env: Env, model: nn.Module) -> Any:
    with flatshard.summon_full_params(model):
        return [p.detach().clone() for p in model.parameters()]


def _state_dict(env: Env, model: nn.Module) -> Any:
    return full_state_dict(model)


def _unshard(env: Env, model: nn.Module) -> Any:
    flatshard.unshard(model, recurse=True)
    values = [p.detach().clone() for p in model.parameters()]
    flatshard.reshard(model)
    return values


def _keep(env: Env, model: nn.Module) -> Any:
    with torch.no_grad(), flatshard.keep_unsharded(model):
        return [model(env.batch(i).to(next(model.parameters()).dtype)) for i in range(2)]


CHANGES = (_data, _data_from_cpu, _in_place, _double, _assign, _load, _load_local)
READS = (_forward, _evaluate, _summon, _state_dict, _unshard, _keep)


@cases.add(
    {f"{change.__name__[1:]}": {"change": change} for change in CHANGES}
    | {f"{change.__name__[1:]}_bf16": {"change": change, "dtype": torch.bfloat16} for change in (_data, _load)},
    rtol=2e-2,
    atol=1e-3,
)
def changed(env: Env, change: Callable[[nn.Module], None], dtype: Any = None) -> Any:
    """The shards are changed, and what reads them comes next, on the same stream, at once."""
    results = []
    for read in READS:
        model = env.shard(env.make(lambda: Net(blocks=2)), mixed_precision=MixedPrecision(dtype, torch.float32))
        _forward(env, model)
        change(model)
        results.append(read(env, model))
        change(model)
        results.append(_evaluate(env, model))
    return results


@cases.add()
def copied(env: Env, **options: Any) -> Any:
    model = env.shard(env.make(), **options)
    _forward(env, model)
    other = copy.deepcopy(model)
    for dtype in (torch.float64, torch.float32) if options else ():
        _evaluate(env, other.to(dtype))  # which adopts what it was converted to
    pinned = [[p.is_pinned() for p in m.parameters() if p.numel()] for m in (model, other)]
    assert pinned[0] == pinned[1]
    return env.train(model, waits=bool(options)), env.train(other, waits=bool(options))


@cases.add({"pinned": {"pin": True}, "not_pinned": {"pin": False}}, watch_host=True)
def copied_offloaded(env: Env, pin: bool) -> Any:
    return copied(env, cpu_offload=CPUOffload(True, pin_memory=pin))


@cases.add()
def two_models(env: Env) -> Any:
    """Interleaved, on one group."""
    first, second = (env.shard(env.make(seed=i)) for i in range(2))
    optimizer = sgd([*first.parameters(), *second.parameters()])
    for step in range(3):
        batch = env.batch(step)
        with env.steady(step == 2):
            optimizer.zero_grad()
            a, b = first(batch), second(batch)
            mean_square(a * b.detach()).backward()
            mean_square(b).backward()
            optimizer.step()
    return numbers(first), numbers(second)


@cases.add()
def second_device(env: Env) -> Any:
    """A model on a device that is not the current one."""
    if env.is_simulated:
        env.device = torch.device("simdev", 1)
    return env.train(env.shard(env.make()))
