"""Ranks out of step raise an error within seconds, with the units and the cure; slow ranks do not.

Each case has its own process group, unusable afterwards, over real gloo.
"""

import datetime
import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import TestCase

import pool as pool_module
import pytest
import torch
import torch.distributed as dist
from pool import RankFailure
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from flatshard import OutOfStepError, ShardingStrategy, fully_shard, keep_unsharded, optim, skip
from flatshard._base import environment
from flatshard._comm.process_groups import interrupt

SECONDS = 20
"""Time limit for an error on a busy machine. The group's timeout is longer."""
WATCH = 0.4


class Net(nn.Module):
    """Units of one shape, run in any order: without tags, their data would be mixed silently."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, order: str = "0123") -> Tensor:
        for index in order:
            x = torch.tanh(self.blocks[int(index)](x))
        return x


def new_group(size: int) -> dist.ProcessGroup:
    return dist.new_group(list(range(size)), timeout=datetime.timedelta(seconds=60))


def make(ctx, strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD, order_check: str = "off") -> tuple[Any, Any]:
    """Return a sharded model and its process group."""
    environment.WATCH_SECONDS, environment.ORDER_CHECK = WATCH, order_check
    group = new_group(ctx.world_size)
    torch.manual_seed(0)
    return fully_shard(Net(), policy={nn.Linear}, process_group=group, strategy=strategy), group


def train(model: nn.Module, order: str = "0123") -> None:
    model(torch.ones(2, 4), order).sum().backward()


class Ends(Exception):
    """Raised at the end of a body, so that the groups are made again."""


def run(ctx, body: Any) -> None:
    """Run ``body`` and restore the configuration that it changes."""
    before, start = (environment.WATCH_SECONDS, environment.ORDER_CHECK), time.monotonic()
    try:
        body(ctx)
    finally:
        environment.WATCH_SECONDS, environment.ORDER_CHECK = before
        assert time.monotonic() - start < SECONDS
    raise Ends


@pytest.fixture
def errors(pool, monkeypatch) -> Iterator[Any]:
    monkeypatch.setattr(pool_module, "GRACE", float(SECONDS))

    def run_body(body: Any, world_size: int = 2) -> list[tuple[str, str]]:
        """Return every rank's error as type and message."""
        with pytest.raises(RankFailure) as e:
            pool.run(run, body, world_size=world_size, timeout=40)
        failures = sorted(e.value.failures, key=lambda f: f.rank)
        assert [f.kind for f in failures] == ["raised"] * world_size, str(e.value)
        return [(f.type_name, f.message) for f in failures]

    return run_body


CASES: dict[str, tuple[Callable[[Any], None], int, Iterable[int], tuple[str, ...]]] = {}


def tells(*patterns: str, size: int = 2, ranks: Iterable[int] = (), **arguments: str) -> Callable[[Any], Any]:
    """Register a case: ``ranks`` of ``size``, by default all, raise errors that match ``patterns``."""

    def add(body: Any) -> Any:
        name = " ".join([body.__name__, *arguments.values()])
        CASES[name] = functools.partial(body, **arguments), size, ranks or range(size), patterns
        return body

    return add


@tells(
    r"ranks run different units.*\(in pass 1 of this process\)",
    r"ranks 0, 2: [^\n]*all-gather of 'blocks\.0'; all-gather of 'blocks\.1'\n",
    r"rank 1: [^\n]*all-gather of 'blocks\.0'; all-gather of 'blocks\.2'\n",
    r"have it call flatshard\.skip",
    size=3,
)
def swap_at_first(ctx) -> None:
    model, _ = make(ctx, order_check="first")
    train(model, "0213" if ctx.rank == 1 else "0123")


@tells(
    r"FLATSHARD_SHARED_MEMORY is 65536 on rank 0, and 0 on rank 1",
    r"Give FLATSHARD_SHARED_MEMORY the same value on all",
)
def another_environment(ctx) -> None:
    """Rank 1 would not join the handshake for shared memory."""
    before, environment.SHARED_MEMORY = environment.SHARED_MEMORY, 0 if ctx.rank else 65536
    try:
        model = fully_shard(nn.Linear(200, 200), process_group=new_group(2))
        model(torch.zeros(1, 200))
    finally:
        environment.SHARED_MEMORY = before


@tells(r"all-gather of 'blocks\.0' was not issued: ranks got out of step before", r"restart all ranks")
def go_on_after(ctx) -> None:
    """No rank has received one rank's message for a unit, so another gather of it would receive that message."""
    model, _ = make(ctx, order_check="first")
    with pytest.raises(OutOfStepError, match="ranks run different units"):
        train(model, "0213" if ctx.rank == 1 else "0123")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    train(model)


@tells(
    r"ranks wait for each other, as they run different units",
    r"rank [02] waits for the all-gather of 'blocks\.[01]'.*which rank 1 has not come to",
    r"rank 1 waits for the all-gather of 'blocks\.[123]'",
    size=3,
)
def swap_later(ctx) -> None:
    model, _ = make(ctx)
    for _ in range(2):
        train(model)
    train(model, "2130" if ctx.rank == 1 else "0123")


def interrupt_after_another(ctx) -> None:
    """Rank 0 has ended its own waits and left. Rank 2 waits for rank 1, which does nothing."""
    group = new_group(3)
    dist.barrier(group)  # all are connected
    if ctx.rank == 0:
        interrupt(group)
    if ctx.rank == 2:
        with pytest.raises(RuntimeError):  # until the connection to rank 0 is closed
            group.recv([torch.empty(1)], 0, 1).wait()
        waited = group.recv([torch.empty(1)], 1, 1)
        interrupt(group)
        with pytest.raises(RuntimeError):
            waited.wait()


def test_interrupt_when_a_connection_is_closed_already(errors):
    assert [type_name for type_name, _ in errors(interrupt_after_another, world_size=3)] == ["Ends"] * 3


@tells(r"as they run different units", r"rank 0 waits for the all-gather of 'blocks\.0'", size=4, ranks=(0, 1))
def swap_in_a_smaller_group(ctx) -> None:
    """After forward, all ranks keep half of each unit, which backward gathers among two of the four."""
    environment.WATCH_SECONDS, environment.ORDER_CHECK = WATCH, "off"
    model = fully_shard(Net(), policy={nn.Linear}, process_group=new_group(4), reshard_after_forward=2)
    for _ in range(2):
        train(model)
    outputs = [model.blocks[index](torch.ones(2, 4)).sum() for index in range(2)]
    if ctx.rank > 1:
        return
    for output in reversed(outputs) if ctx.rank == 1 else outputs:
        output.backward()


def train_experts(ctx, order_check: str, order: str, waits: bool = False) -> None:
    """Blocks 1 and 2 are experts, sharded over ranks 0 and 2, and over ranks 1 and 3. Rank 3 runs other units.

    ``waits``: ranks 0 and 2 wait for the others, whose order check has failed.
    """
    environment.WATCH_SECONDS, environment.ORDER_CHECK = WATCH, order_check
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    experts = re.compile(r"blocks\.[12]")
    model = fully_shard(
        Net(),
        policy={nn.Linear},
        process_group=new_group(4),
        shard_mesh_fn=lambda fqn, param: mesh["dp"] if experts.match(fqn) else None,
    )
    for _ in range(0 if order_check == "first" else 2):
        train(model)
    if order_check == "first" and ctx.rank % 2 == 0 and not waits:
        # The check over the others' group ends no wait of this rank.
        model.blocks[0](torch.ones(2, 4))
        return
    train(model, order if ctx.rank == 3 else "0123")


@tells(
    r"ranks run different units\. Their last collectives over 'dp' \(ranks 1, 3\) \(in pass 1 of this process\)",
    r"rank 1: all-gather of 'blocks\.1'\n *rank 3: all-gather of 'blocks\.2'\n",
    size=4,
    ranks=(1, 3),
)
def swap_experts(ctx) -> None:
    train_experts(ctx, "first", "0213")


@tells(
    r"rank [13] has left the forward or backward that the others are in, as its all-gather of 'blocks\.[12]' over 'dp' "
    r"\(ranks 1, 3\) failed",
    size=4,
    ranks=(0, 2),
)
def hear_of_other_experts(ctx) -> None:
    train_experts(ctx, "first", "0213", waits=True)


@tells(
    r"rank [13] waits for the [^\n]* over 'dp' \(ranks 1, 3\) [^\n]*, which rank [13] has not come to",
    size=4,
    ranks=(1, 3),
)
def leave_experts_out(ctx) -> None:
    train_experts(ctx, "off", "013")


@tells(r"ranks reduced the gradients of different units together: '(blocks\.[12])' and '(?!\1)blocks\.[12]'")
def mix_all_reduces(ctx) -> None:
    model, _ = make(ctx, ShardingStrategy.NO_SHARD)
    train(model)
    before = [p.grad.clone() for p in model.parameters()]
    try:
        train(model, "013" if ctx.rank == 1 else "0123")
    except OutOfStepError:
        assert all(torch.equal(p.grad, g) for p, g in zip(model.blocks[2].parameters(), before[4:6], strict=True))
        raise


ONE = r"not all of them compute the same norm.* waits for the all-reduce for %s \(after pass 1 of this process\)"
OTHER = (
    r"rank [012] waits for the all-gather of 'blocks\.0' over ranks 0, 1.* \(in pass 2 of this process\), which rank"
)
NORM = ONE % r"the norm of order 2\.0 of the gradient of 'blocks\.0\.weight'"
STATISTICS = ONE % r"statistics of 8 gradients, the first of which is 'blocks\.0\.weight'"


@tells(NORM, OTHER, r"Have all ranks call what computes it", what="norm")
@tells(STATISTICS, OTHER, size=3, what="statistics")
def compute_on_one_rank(ctx, what: str) -> None:
    model, _ = make(ctx)
    train(model)
    if what == "norm" and ctx.rank == 0:
        model.blocks[0].weight.grad.norm()
    elif what == "statistics" and ctx.rank == 1:
        optim.gradient_statistics(model)
    train(model)


@tells(
    r"rank 1 waits for the all-reduce for the gradient of the sum of 'blocks\.0\.weight'.*which rank 0 has not come to",
    r"the same term times zero",
)
def leave_a_parameter_out_of_the_loss(ctx) -> None:
    model, _ = make(ctx)
    for times in (ctx.rank, ctx.rank or None):  # adding zero times the term works, leaving out the term does not
        loss, term = model(torch.ones(2, 4)).sum(), model.blocks[0].weight.sum()
        (loss if times is None else loss + times * term).backward()


@tells(
    r"rank 0 waits for the all-reduce for the gradient of the sum of 'blocks\.0\.weight'",
    r"rank 1 waits for the all-gather of 'blocks\.3' for backward.*which rank 0 has not come to",
)
def leave_it_out_where_each_axis_is_a_group(ctx) -> None:
    """Rank 0 waits on the group of all ranks, and rank 1 on the group of one axis, which has the same ranks."""
    environment.WATCH_SECONDS, environment.ORDER_CHECK = WATCH, "off"
    own = [dist.new_group([rank]) for rank in range(2)][ctx.rank]
    torch.manual_seed(0)
    hybrid = ShardingStrategy.HYBRID_FULL_SHARD
    model = fully_shard(Net(), policy={nn.Linear}, process_group=(new_group(2), own), strategy=hybrid)
    loss, term = model(torch.ones(2, 4)).sum(), model.blocks[0].weight.sum()
    (loss if ctx.rank else loss + term).backward()


@tells(ONE % r"the norm of order 2\.0 of 'blocks\.0\.weight'", r"rank 1 waits for the all-gather of 'blocks\.0'")
def wait_on_another_group(ctx) -> None:
    """Each rank waits on another process group for the other rank."""
    (model, _), (other, _) = make(ctx), make(ctx)
    train(model)
    if ctx.rank == 0:
        model.blocks[0].weight.norm()
    train(other)


@tells(
    r"rank 0 waits for the all-gather of 'blocks\.\d'",
    r"rank [12] is in torch\.distributed\.all_reduce\(\)",
    r"All ranks must run the same units",
    size=3,
    ranks=(0,),
)
def wait_in_the_users_collective(ctx) -> None:
    """Evaluate on rank 0 only."""
    model, group = make(ctx)
    train(model)
    if ctx.rank == 0:
        with torch.no_grad():
            model(torch.ones(2, 4))
    dist.all_reduce(torch.ones(()), group=group)


SKIPS = r"If its data ended before those of others, have it call flatshard\.skip\(model, torch\.zeros\(\(\)\)\)\.backward\(\)"


@tells(
    r"rank 0 waits for the all-gather of 'blocks\.\d'",
    r"rank 1 is in torch\.distributed\.barrier\(\)",
    SKIPS,
    ranks=(0,),
)
def train_on_unequal_data(ctx, cured: bool = False) -> None:
    model, group = make(ctx)
    for step in range(4):
        if ctx.rank == 0 or step < 2:
            train(model)
        elif cured:
            skip(model, torch.zeros(())).backward()
    dist.barrier(group)


def test_a_rank_without_data_skips_the_model(errors):
    """Training on unequal data works after the cure of the error above."""
    assert [name for name, _ in errors(functools.partial(train_on_unequal_data, cured=True))] == ["Ends", "Ends"]


SIZE = r"rank 0 has '0\.weight' of shape \(4, 4\) where rank 1 has '0\.weight' of shape \(5, 4\).*Build the same model"


@tells(SIZE, r"unit '0' is not the same on all ranks", how="size", order_check="first")
@tells(SIZE, how="size", order_check="off")  # the watch reports the same
@tells(r"units have different names: rank 0 has 'last' where rank 1 has 'other'", how="module", order_check="first")
@tells(r"2 parameters on rank 0, and 1 on rank 1; only rank 0 has 'last\.bias'", how="bias", order_check="first")
@tells(r"as \d+ elements of torch.float32 a rank on rank 0, and .* of torch.bf", how="dtype", order_check="first")
def build_another(ctx, how: str, order_check: str) -> None:
    _, group = make(ctx, order_check=order_check)
    odd = ctx.rank == 1
    model = nn.Sequential(nn.Linear(4, 5 if odd and how == "size" else 4), nn.Tanh())
    name = "other" if odd and how == "module" else "last"
    model.add_module(name, nn.Linear(model[0].out_features, 1, bias=not (odd and how == "bias")))
    model.to(torch.bfloat16 if odd and how == "dtype" else torch.float32)
    fully_shard(model, policy={nn.Linear}, process_group=group)
    model(torch.ones(2, 4, dtype=next(model.parameters()).dtype)).sum().backward()


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_do_different_things(errors, case):
    body, size, told, patterns = CASES[case]
    found = errors(body, size)
    for type_name, message in (found[rank] for rank in told):
        assert type_name == "OutOfStepError", message
        for pattern in patterns:
            assert re.search(pattern, message, re.DOTALL), message


def ask_for_different_numbers(ctx) -> None:
    model, _ = make(ctx)
    model.blocks[ctx.rank].weight.sum()


def test_different_numbers_at_the_same_time(errors):
    for rank, (type_name, message) in enumerate(errors(ask_for_different_numbers)):
        assert type_name == "RuntimeError"
        assert re.search(rf"rank {rank} asked for the sum of 'blocks\.{rank}\.weight', but another", message)
        assert re.search(r"the same term times zero\. All ranks need the same order", message)


def be_slow(ctx) -> None:
    model, _ = make(ctx)
    train(model)
    if ctx.rank == 1:
        time.sleep(4 * WATCH)
        train(model)
        return
    with TestCase().assertLogs("flatshard") as logs:
        train(model)
    assert re.search(
        r"rank 0 has waited \d+ s for the .*, which rank 1 has not come to: it is slow, or", logs.output[0]
    )


def run_alone(ctx) -> None:
    """Run kept units on rank 0 alone for longer than the others wait."""
    model, _ = make(ctx)
    train(model)
    with keep_unsharded(model), torch.no_grad():
        for _ in range(4 if ctx.rank == 0 else 1):
            model(torch.ones(2, 4))
    if ctx.rank == 0:
        time.sleep(3 * WATCH)
    train(model)


@pytest.mark.parametrize("body", [be_slow, run_alone])
def test_slow_is_no_error(errors, body):
    assert [type_name for type_name, _ in errors(body)] == ["Ends", "Ends"]
