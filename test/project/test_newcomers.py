"""A newcomer's mistakes: each is told early, and the message says who it is about and what to do.

What ``fully_shard`` refuses for other reasons, and that it changes nothing then, is in ``core/test_errors.py``.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankFailure
from torch import nn

import flatshard
from flatshard import fully_shard


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).relu()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.blocks(x))

    def logits(self, x):
        return self.head(x)


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


def message(mistake: Callable[[], object]) -> str:
    """What a newcomer reads: the error's class and text, or the warning's."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            mistake()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "\n".join(f"{w.category.__name__}: {w.message}" for w in caught)


def assert_tells(shown: str, *facts: str) -> None:
    """``facts``, in this order: the class of the error or warning, then who it is about, then the cure."""
    at = 0
    for fact in facts:
        assert fact in shown[at:], f"{fact!r} is not told, or too early:\n{shown}"
        at = shown.index(fact, at)
    assert shown.startswith(facts[0])


# -- in fully_shard ----------------------------------------------------------------------------------------------------


def shard(**options: Any) -> Callable[[], object]:
    return lambda: fully_shard(Net(), **options)


IN_FULLY_SHARD: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "a class that matches nothing": (
        shard(policy={nn.GRU}),
        ("UserWarning", "classes 'GRU' matched no submodule, so Net is a single unit", "'Block', 'Linear', 'Net'"),
    ),
    "a module in the place of its class": (
        shard(policy=Block()),
        ("ValueError", "policy is a Block", "pass the class, policy={Block}"),
    ),
    "a name in the place of a class": (
        shard(policy={"Block"}),
        ("ValueError", "policy: 'Block' is not an nn.Module class", "as in policy={Block}"),
    ),
    "a function of the module alone": (
        shard(policy=is_block),
        ("ValueError", "policy=is_block cannot be called", "use policy=flatshard.CustomPolicy(function)"),
    ),
    "parameters in the place of the module": (
        lambda: fully_shard(Net().parameters()),
        ("TypeError", "got a generator", "pass the model itself, not its parameters or its state"),
    ),
    "a name in the place of a mesh": (
        shard(device_mesh="cpu"),
        ("TypeError", "device_mesh must be a DeviceMesh, got a str", "init_device_mesh(device_type, (world_size,))"),
    ),
    "a dtype in the place of a policy": (
        shard(mixed_precision=torch.bfloat16),
        ("TypeError", "got torch.bfloat16", "pass flatshard.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype"),
    ),
    "a strategy by another name": (
        shard(strategy="zero3"),
        ("ValueError", "strategy='zero3' is not one of", "ShardingStrategy.FULL_SHARD"),
    ),
}


@pytest.mark.parametrize("name", IN_FULLY_SHARD)
def test_in_fully_shard(world, name: str):
    world(4)
    mistake, facts = IN_FULLY_SHARD[name]
    assert_tells(message(mistake), *facts)


def test_inference_mode_around_fully_shard(world):
    world(4)
    model = Net()
    with torch.inference_mode():
        shown = message(lambda: fully_shard(model))
    assert_tells(shown, "RuntimeError", "called inside torch.inference_mode()", "call it outside")
    fully_shard(model)


# -- afterwards --------------------------------------------------------------------------------------------------------

X = torch.ones(2, 4)
SUMMON = "with flatshard.summon_full_params(module)"


def train(model: nn.Module) -> None:
    model(X).sum().backward()


def replace_a_parameter(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.zeros(2, 4))
    model(X)


def step_whole_matrices(model: nn.Module) -> None:
    train(model)
    torch.optim.Adafactor(model.parameters()).step()


@torch.no_grad()
def copy_a_whole_value(model: Any) -> None:
    model.head.weight.copy_(torch.zeros(2, 4))


def add_a_layer(model: Any) -> None:
    model.extra = nn.Linear(2, 2)
    model.extra(model(X)).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()


def decay_by_shape(model: nn.Module) -> None:
    decayed = [p for p in model.parameters() if len(p.shape) > 1]
    others = [p for p in model.parameters() if len(p.shape) <= 1]
    torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}]).step()


def compute_after_the_group(model: nn.Module) -> None:
    dist.destroy_process_group()
    model(X)


def load(model: nn.Module, name: str, value: torch.Tensor) -> None:
    model.load_state_dict(Net().state_dict() | {name: value})


AFTERWARDS: dict[str, tuple[Callable[[Any], object], tuple[str, ...]]] = {
    "a method that is not forward": (
        lambda m: m.logits(X),
        ("RuntimeError", "'head.weight' is sharded", "register_forward_method(module, 'logits'), Net.logits gathers"),
    ),
    "forward called by itself": (
        lambda m: m.blocks.forward(m.blocks[0].forward(X)),
        ("RuntimeError", "'blocks.0.linear.weight' is sharded", "call the module that is the unit, as module(...)"),
    ),
    "pickling the model": (
        lambda m: torch.save(m, io.BytesIO()),
        ("TypeError", "(unit '<root>') cannot be pickled", "flatshard.save_checkpoint(path, {'model': module})"),
    ),
    "pickling its state dict": (
        lambda m: torch.save(m.state_dict(), io.BytesIO()),
        ("UserWarning", "'blocks.0.linear.weight' of shape (4, 4) is pickled", "full_state_dict(module)"),
    ),
    "loading what has another shape": (
        lambda m: load(m, "head.weight", torch.zeros(5, 4)),
        ("RuntimeError", "nothing has been changed", "head.weight: size mismatch: the checkpoint has shape (5, 4)"),
    ),
    "loading the parts of some rank": (
        lambda m: load(m, "head.weight", m.head.weight.detach().clone()),
        ("RuntimeError", "head.weight: size mismatch", "does not say whose part it is: load values of state_dict()"),
    ),
    "replacing a parameter": (
        replace_a_parameter,
        ("RuntimeError", "'head.weight' was replaced by a tensor of shape (2, 4)", "resize the module before", SUMMON),
    ),
    "an optimizer of whole matrices": (
        step_whole_matrices,
        ("RuntimeError", "Adafactor looks at whole", "'head.weight'", "Use flatshard.optim.WholeParameterOptimizer"),
    ),
    "clipping parameters by our function": (
        lambda m: flatshard.clip_grad_norm_(m.parameters(), 1.0),
        ("TypeError", "takes the module, got a generator", "pass the model", "torch.nn.utils.clip_grad_norm_"),
    ),
    "a model that is not sharded": (
        lambda m: flatshard.summon_full_params(Net()).__enter__(),
        ("ValueError", "summon_full_params: nothing in this Net is sharded", "call fully_shard first"),
    ),
    "a process group that is gone": (
        compute_after_the_group,
        ("CollectiveError", "all-gather of unit '<root>' failed on rank 0 of 4", "has been destroyed"),
    ),
    "DDP around it": (
        lambda m: nn.parallel.DistributedDataParallel(nn.Sequential(m)),
        ("RuntimeError", "'0.blocks.0.linear.weight'", "averages their gradients itself. Do not use Distributed"),
    ),
    "computing with a part": (
        lambda m: (m.head.weight @ m.head.weight.T).trace(),
        ("RuntimeError", "'head.weight' is sharded: this rank has elements 0:4 of shape (2, 4)", SUMMON),
    ),
    "initialising a part": (
        lambda m: nn.init.xavier_uniform_(m.head.weight),
        ("RuntimeError", "'head.weight' is sharded: this rank has elements 0:4 of shape (2, 4)", SUMMON),
    ),
    "copying a whole value into a part": (
        copy_a_whole_value,
        ("RuntimeError", "'head.weight' is sharded", "was given the whole", SUMMON, "module.load_state_dict(...)"),
    ),
    "adding a layer": (
        add_a_layer,
        ("RuntimeError", "SGD steps 'extra.weight', 'extra.bias'", "Add modules and parameters", "before fully_shard"),
    ),
    "weight decay by shape": (
        decay_by_shape,
        ("RuntimeError", "are in one group", "'head.weight'", "Use p.ndim or len(flatshard.full_shape(p)) in the rule"),
    ),
}


@pytest.mark.parametrize("name", AFTERWARDS)
def test_afterwards(world, name: str):
    world(4)
    mistake, facts = AFTERWARDS[name]
    model = fully_shard(Net(), policy={Block})
    assert_tells(message(lambda: mistake(model)), *facts)


# -- on ranks ----------------------------------------------------------------------------------------------------------


def run_differently(model: Any, rank: int, group: Any) -> None:
    model(X) if rank == 0 else model.blocks[1](X)


def ask_on_rank_0_only(model: nn.Module, rank: int, group: Any) -> None:
    if rank == 0:
        flatshard.checkpoint.full_state_dict(model)
    for _ in range(2):
        train(model)


def log_a_norm_on_rank_0_only(model: Any, rank: int, group: Any) -> None:
    for _ in range(2):
        train(model)
        if rank == 0:
            print(model.head.weight.grad.norm())


def save_a_bare_model(model: Any, rank: int, group: Any) -> None:
    flatshard.save_checkpoint("/nowhere/step-1", model, process_group=group)


def build_different_models(model: nn.Module, rank: int, group: Any) -> None:
    train(fully_shard(nn.Sequential(Block(), nn.Linear(4, 2 + 4 * rank)), policy={Block}, process_group=group))


def save_on_rank_0_only(model: nn.Module, rank: int, group: Any) -> None:
    state = {"model": model}
    if rank == 0:
        flatshard.save_checkpoint("/nowhere/step-1", state, process_group=group, timeout=timedelta(seconds=2))


def work_in_a_fork(model: nn.Module, rank: int, group: Any) -> None:
    """As a worker of a DataLoader does, whose dataset calls the model."""
    reads, writes = os.pipe()
    if not (child := os.fork()):
        os.write(writes, message(lambda: model(X)).encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        kind, _, text = pipe.read().partition(": ")
    os.waitpid(child, 0)
    raise {"RuntimeError": RuntimeError}[kind](text)


ON_RANKS: dict[Callable[..., None], tuple[str, ...]] = {  # what rank 0 reads
    run_differently: (
        "OutOfStepError: ranks run different units",
        "all-gather of '<root>'\n",
        "all-gather of 'blocks.1'\n",
        "All ranks must run the same units in the same order",
        "have it call flatshard.skip(unit, x)",
    ),
    ask_on_rank_0_only: (
        "OutOfStepError: ranks wait for each other",
        "rank 0 waits for the call of 'full_state_dict'",
        "rank 1 waits for the all-gather of '<root>'",
        "such as full_state_dict, summon_full_params and the norm of a gradient, is called by all ranks",
    ),
    log_a_norm_on_rank_0_only: (
        "OutOfStepError: ranks wait for each other, as not all of them compute the same norm",
        "rank 0 waits for the all-reduce for the norm of order 2.0 of the gradient of 'head.weight'",
        "rank 1 waits for the all-gather of '<root>'",
        "Have all ranks call what computes it",
    ),
    save_a_bare_model: ("MeetingError", "TypeError: state must be a dict", "such as {'model': model,", "got a Net"),
    build_different_models: (
        "OutOfStepError: unit '<root>' is not the same on all ranks",
        "rank 0 has '1.weight' of shape (2, 4) where rank 1 has '1.weight' of shape (6, 4)",
        "Build the same model on all ranks",
    ),
    save_on_rank_0_only: ("MeetingError", "rank 1: did not come within 2 s", "All ranks must make this call"),
    work_in_a_fork: ("RuntimeError: unit '<root>' runs a forward in process", "forked from rank 0", "not sharded"),
}


def run_mistake(ctx, mistake: Callable[..., None]) -> None:
    mistake(fully_shard(Net(), policy={Block}, process_group=ctx.group), ctx.rank, ctx.group)


@pytest.mark.parametrize("mistake", ON_RANKS, ids=lambda mistake: mistake.__name__)
def test_on_ranks(pool, mistake: Callable[..., None]):
    with pytest.raises(RankFailure) as caught:
        pool.run(run_mistake, mistake, world_size=2)
    first, *others = sorted(caught.value.failures, key=lambda failure: failure.rank)
    assert (first.rank, first.kind) == (0, "raised"), caught.value
    assert {other.type_name for other in others} <= {first.type_name}
    assert_tells(f"{first.type_name}: {first.message}", *ON_RANKS[mistake])
