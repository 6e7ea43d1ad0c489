"""Servers with requests on many threads: one thread runs the unsharded model, or all do. Also ranks in notebooks."""

import contextlib
import copy
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from clean import check_clean
from models import Block, Net
from on_ranks import ranks
from parity import twins
from torch import Tensor, nn

import flatshard
from flatshard import MixedPrecision, fully_shard
from flatshard._base.trace import record_events

REQUESTS = [torch.full((1, 4), float(i)) for i in range(6)]


def answer(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():  # applies to this thread
        return model(x)


@contextlib.contextmanager
def inside(model: nn.Module, call: Callable[[], Any]) -> Iterator[None]:
    """Keep another thread in ``call``, at a module of ``model``, until the end of the block."""
    entered, leave = threading.Event(), threading.Event()

    def stay(*_: object) -> None:
        entered.set()
        leave.wait(30)

    with model.head.register_forward_pre_hook(stay), ThreadPoolExecutor(max_workers=1) as one:
        under_way = one.submit(call)
        entered.wait(30)
        try:
            yield
        finally:
            leave.set()
        under_way.result()


@ranks(2)
def test_two_threads_at_a_time(ctx):
    """A second thread raises with a cure. ``threads=True`` raises while another thread trains, which continues."""
    plain, model = twins(ctx, Net, {Block}, torch.float32)
    with flatshard.keep_unsharded(model):
        with ThreadPoolExecutor(max_workers=1) as one, record_events() as events:
            answers = list(one.map(functools.partial(answer, model), REQUESTS))
        assert sum(event.startswith("all-gather") for event in events) == 4  # one per unit
        assert all(torch.equal(y, answer(plain, x)) for x, y in zip(REQUESTS, answers, strict=True))
        message = r"on another thread.*ThreadPoolExecutor\(max_workers=1\).*threads=True"
        with inside(model, lambda: answer(model, REQUESTS[0])), pytest.raises(RuntimeError, match=message):
            answer(model, REQUESTS[1])
        answer(model, REQUESTS[1])
    message = "in a forward on another thread"
    with inside(model, lambda: model(REQUESTS[1]).sum().backward()), pytest.raises(RuntimeError, match=message):
        flatshard.keep_unsharded(model, threads=True).__enter__()
    assert all(p.grad is not None for p in model.parameters())


class Tied(nn.Sequential):
    """Nested units, one of which uses another's parameter."""

    def __init__(self) -> None:
        net, tied = Net(), nn.Linear(4, 4)
        tied.weight = net.blocks[0].linear.weight
        super().__init__(tied, net)

    def twice(self, x: Tensor) -> Tensor:
        return self(x) * 2


def wait_at(barrier: threading.Barrier, *_: object) -> None:
    barrier.wait(30)


@ranks(2)
def test_many_threads(ctx):
    """Eight threads run at a time, with different requests per rank. Training continues afterwards."""
    mixed = {"mixed_precision": MixedPrecision(torch.bfloat16, output_dtype=torch.float64, cast_forward_inputs=True)}
    for precision in ({}, mixed):
        ctx.note(str(precision))
        torch.manual_seed(0)
        models = [fully_shard(Tied(), policy={Block, nn.Linear}, process_group=ctx.group, **precision)]
        models += [copy.deepcopy(models[0])]
        model, alone = models
        flatshard.register_forward_method(model, "twice")
        requests = [torch.full((1, 4), float(i + 10 * ctx.rank)) for i in range(16 + 8 * ctx.rank)]
        everyones = [torch.full((1, 4), float(i)) for i in range(50)]
        for _ in range(2):
            expected = {float(x[0, 0]): answer(alone, x) for x in everyones}
            trainings = [nn.MSELoss()(m(everyones[ctx.rank]).float(), torch.ones(1, 2)) for m in models]
            with flatshard.keep_unsharded(model, threads=True), ThreadPoolExecutor(max_workers=8) as eight:
                meet = threading.Barrier(8)  # all run forwards at the same time
                together = model[1].register_forward_pre_hook(functools.partial(wait_at, meet))
                with record_events() as events:
                    found = list(eight.map(functools.partial(answer, model), requests))
                    with flatshard.keep_unsharded(model, threads=True):
                        found += [y / 2 for y in eight.map(torch.no_grad()(model.twice), requests)]
                assert not [e for e in events if "gather" in e or "reshard" in e]
                for x, y in zip(requests * 2, found, strict=True):
                    assert torch.equal(y, expected[float(x[0, 0])]), x
                with pytest.raises(RuntimeError, match=r"unit '<root>' runs forward .*with gradients.*no_grad"):
                    model(requests[0])
                together.remove()
                trainings[0].backward()  # its forward was before the block
            trainings[1].backward()
            check_clean(model)
            for m in models:
                torch.optim.SGD(m.parameters(), lr=0.1).step()
                m.zero_grad()
            assert all(torch.equal(p, q) for p, q in zip(model.parameters(), alone.parameters(), strict=True))


@ranks(2)
def test_what_needs_a_record_is_refused(ctx):
    """Calls that would give wrong values raise, and the next try works."""
    model, x = Net(), REQUESTS[1]
    fully_shard(model, policy={Block}, process_group=ctx.group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with flatshard.keep_unsharded(model, threads=True):
        before = answer(model, x)
        model.state_dict()  # registers the sharded parameters
        assert torch.equal(answer(model, x), before)
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"its parameters have changed since.*enter it again"):
            answer(model, x)
    with flatshard.keep_unsharded(model, threads=True):
        after = answer(model, x)
        assert not torch.equal(after, before)
    assert torch.equal(answer(model, x), after)
    with flatshard.summon_full_params(model), pytest.raises(RuntimeError, match="is in a forward or in summon_full"):
        flatshard.keep_unsharded(model, threads=True).__enter__()
    in_full = {"mixed_precision": MixedPrecision(torch.bfloat16, full_precision_in_eval=True)}
    for refused, message in (
        (in_full, "full_precision_in_eval=False"),
        ({"static_buffers": True}, "Shard with .*stat"),
    ):
        model = fully_shard(Net(), policy={Block}, process_group=ctx.group, **refused)
        with pytest.raises(ValueError, match=message):
            flatshard.keep_unsharded(model, threads=True).__enter__()
        answer(model.eval(), x)


# -- Ranks started by a notebook, whose __main__ has no file: simulated by a script on stdin ---------------------------

NOTEBOOK = """
import pathlib, sys
import torch, torch._dynamo, torch.distributed as dist, torch.multiprocessing as mp  # what ranks import, once
from torch import nn
import flatshard

def train(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = flatshard.fully_shard(nn.Linear(3, 3))
    model(torch.full((2, 3), float(rank))).sum().backward()
    total = flatshard.clip_grad_norm_(model, 1.0)
    if rank == 0:
        pathlib.Path(f"{store}.norm").write_text(f"{total.item():.4f}")
    dist.destroy_process_group()

vars(sys.modules["__main__"]).pop("__file__", None)  # IPython's has none
nn.Linear(300, 300)(torch.ones(300, 300)).sum().backward()  # cells that compute before
mp.start_processes(train, (sys.argv[1],), nprocs=2, start_method="fork")
"""


def test_ranks_by_fork(tmp_path: Path):
    root, command = str(Path(__file__).parents[2]), [sys.executable, "-", str(tmp_path / "store")]
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    ran = subprocess.run(command, input=NOTEBOOK, text=True, capture_output=True, env=env, timeout=100)
    assert ran.returncode == 0, ran.stderr[-2000:]
    # Gradients of bias: 2 per row and rank; of weight: 2 on rank 1. Averaged, the norm is sqrt(3 * 2**2 + 9 * 1**2).
    assert (tmp_path / "store.norm").read_text() == f"{21**0.5:.4f}"
