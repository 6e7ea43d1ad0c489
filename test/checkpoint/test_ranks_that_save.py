"""Saves and loads by several ranks: late, dead and interrupted ones, in any part of a step."""

import contextlib
import functools
import itertools
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from jobs import SHORT, expect, four, patched, same, step, values
from on_ranks import ranks
from saving import CommunicationWatch, MemoryWatch
from torch import Tensor, nn

import flatshard
from flatshard import fully_shard, load_checkpoint, save_checkpoint
from flatshard._comm import rendezvous
from flatshard._comm.process_groups import timeout_of
from flatshard.checkpoint import (
    _barrier,
    _disk,
    _job,
    _writer,
)

# -- Ranks that do not come, or die ------------------------------------------------------------------------------------


@ranks(3)
def test_ranks_meet_again_after_one_has_skipped_a_save(ctx, path: str) -> None:
    save = functools.partial(save_checkpoint, state={"step": 1}, process_group=ctx.group)
    save(f"{path}/0")
    dist.barrier(ctx.group)
    store = ctx.group.get_group_store()
    keys = store.num_keys()
    for skips in (1, 0):  # rank 0 leads, and the others follow
        if ctx.rank != skips:
            with patched(_barrier, "_GRACE", 0.5), expect(f"rank {skips}.*did not come within 1 s"):
                save(f"{path}/1", timeout=SHORT)
        dist.barrier(ctx.group)
        assert store.num_keys() <= keys + 1  # no key of it is left
        dist.barrier(ctx.group)
    for i in range(2, 5):
        save(f"{path}/{i}")
    with expect("came for different things. Rank 0: .*/x0.*rank 1: .*/x1"):
        save(f"{path}/x{ctx.rank}")
    dist.barrier(ctx.group)
    assert store.num_keys() <= keys + 1


@ranks(2)
def test_a_rank_that_is_stopped_while_another_gives_up(ctx, path: str) -> None:
    """The rank stops between finding a message and reading it, and does not wait for a removed message."""
    store, await_note = ctx.group.get_group_store(), _barrier.Barrier._await

    def stopped(self: _barrier.Barrier, key: str, sender: int, began: float) -> str | None:
        found = await_note(self, key, sender, began)
        while self._keys.has(key):
            time.sleep(0.01)
        return found

    late = expect("rank 0: did not come within 1 s" if ctx.rank else "rank 1: had come, and waited no longer")
    with patched(_barrier, "_GRACE", 0.2), patched(_barrier.Barrier, "_await", stopped, when=ctx.rank == 0), late:
        _barrier.Barrier(store, ctx.rank, range(2), "save", 1 if ctx.rank else 30).wait()
    assert not store.check([f"flatshard/barrier/at/{ctx.rank}"])
    dist.barrier(ctx.group)
    save_checkpoint(path, {"step": 1}, process_group=ctx.group)


@ranks(2)
def test_ranks_wait_no_longer_than_the_groups_timeout(ctx, path: str) -> None:
    """The group's timeout is the default."""
    backend, model = ctx.group._get_backend(torch.device("cpu")), four(ctx)
    before = timeout_of(ctx.group)
    assert before is not None
    backend.options._timeout = SHORT
    try:
        if ctx.rank == 0:
            with expect("rank 1: did not come within 1 s"):
                save_checkpoint(path, {"m": model}, process_group=ctx.group)
            with expect("rank 1: did not come within 1 s"):
                flatshard.checkpoint.full_state_dict(model)
    finally:
        backend.options._timeout = before
    dist.barrier(ctx.group)


@ranks(3)
def test_a_rank_that_dies_is_named(ctx, path: str) -> None:
    """Rank 1 comes and then gives no sign of life; in a second save, rank 2 is interrupted."""
    if ctx.rank == 1:
        with _job.make_barrier(ctx.group, f"save_checkpoint({path!r})", SHORT):
            pass  # its thread ends, as if the process died
    else:
        dead = expect("rank 1: no sign of life for 1 s, so it died, or its machine did")
        with patched(_barrier, "_LEAVE_AFTER", 0.2), dead:  # looks for no answer
            save_checkpoint(path, {"step": 1}, process_group=ctx.group, timeout=SHORT)
    dist.barrier(ctx.group)
    state = {"model": fully_shard(nn.Linear(30, 30), process_group=ctx.group)}  # each rank writes its shard
    outcome = pytest.raises(KeyboardInterrupt) if ctx.rank == 2 else expect("rank 2: KeyboardInterrupt")
    interrupts = patched(_disk, "create", mock.Mock(side_effect=KeyboardInterrupt), when=ctx.rank == 2)
    with interrupts, patched(_barrier, "_LEAVE_AFTER", 0.2), outcome:
        save_checkpoint(path, state, process_group=ctx.group)
    dist.barrier(ctx.group)
    save_checkpoint(path, {"step": 1}, process_group=ctx.group)


@ranks(3)
def test_the_first_rank_leaves_last(ctx, path: str) -> None:
    """Rank 0, whose process may have the store, leaves last, even if it fails."""
    take = rendezvous.Rendezvous.take

    def late(self: rendezvous.Rendezvous, key: str) -> Any:
        time.sleep(0.2)
        return take(self, key)

    store, state = ctx.group.get_group_store(), {"x": {str(i): torch.ones(3) for i in range(9)}}
    dist.barrier(ctx.group)
    keys = store.num_keys()
    with patched(rendezvous.Rendezvous, "take", late, when=ctx.rank > 0):
        for call, outcome in (
            (save_checkpoint, contextlib.nullcontext()),
            (save_checkpoint, expect("exists: choose another path")),
            (load_checkpoint, contextlib.nullcontext()),
        ):
            dist.barrier(ctx.group)
            with outcome:
                call(path, state, process_group=ctx.group)
            assert ctx.rank or store.num_keys() <= keys


@ranks(3)
def test_a_write_may_take_long(ctx, path: str) -> None:
    """A write may take longer than ranks wait for each other, on any rank."""
    flush = _disk.flush

    def late(file: int) -> None:
        time.sleep((1.25 + 0.2 * ctx.rank) * SHORT.total_seconds())
        flush(file)

    state = {"model": fully_shard(nn.Linear(30, 30), process_group=ctx.group)}  # each rank writes its shard
    for slow in (0,), (1, 2):
        with patched(_disk, "flush", late, when=ctx.rank in slow):
            save_checkpoint(f"{path}/{slow[0]}", state, process_group=ctx.group, timeout=SHORT)


def test_long_waits_cost_little(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(rendezvous.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(rendezvous.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    looks = sum(1 for _ in itertools.takewhile(lambda waited: waited <= 3600, rendezvous.polls()))
    assert 3600 * 2 <= looks < 3600 * 2 + 300


# -- The model's state in a step ---------------------------------------------------------------------------------------


@ranks(2)
def test_saved_after_an_exception_in_any_part_of_a_step(ctx, path: str) -> None:
    """A save has the state before the step, or after it, even if parameters are unsharded."""
    at, error = "", KeyboardInterrupt

    def stop(where: str) -> None:
        if at == where:
            raise error

    class Stops(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            stop("forward")
            x = super().forward(x)
            x.register_hook(lambda _: stop("backward"))
            return x

    model = nn.Sequential(nn.Linear(3, 3), Stops(3, 3), nn.Linear(3, 3))
    fully_shard(model, policy={nn.Linear, Stops}, process_group=ctx.group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    optimizer.register_step_post_hook(lambda *_: stop("after step"))
    state = {"m": model, "o": optimizer}
    for where in ("forward", "backward", "after step", "unsharded"):
        ctx.note(where)
        before, at, saved_to = values(model, optimizer), where, f"{path}/{where}"
        if where == "unsharded":
            flatshard.unshard(model)
        else:
            with pytest.raises(error):
                step(model, optimizer)
        at = ""
        save_checkpoint(saved_to, state, process_group=ctx.group)
        flatshard.reshard(model)
        saved = values(model, optimizer)
        assert same(saved, before) == (where != "after step")
        optimizer.zero_grad()
        step(model, optimizer)  # training continues
        assert not same(values(model, optimizer), saved)
        load_checkpoint(saved_to, state, process_group=ctx.group)
        assert same(values(model, optimizer), saved)


@ranks(3)
def test_of_what_is_not_sharded_rank_0s_is_saved(ctx, path: str) -> None:
    """All unsharded tensors come from rank 0, not some from each rank."""
    model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.BatchNorm1d(5))
    fully_shard(model, process_group=ctx.group)
    for buffer in model.buffers():
        buffer.fill_(ctx.rank)
    state = {"model": model, "numbers": [torch.full((n,), ctx.rank) for n in range(1, 6)], "own": ctx.rank}
    save_checkpoint(path, state, process_group=ctx.group)
    for buffer in model.buffers():
        buffer.fill_(9)
    loaded = load_checkpoint(path, state, process_group=ctx.group)
    assert not any(value.any() for value in (*model.buffers(), *loaded["numbers"]))
    assert loaded["own"] == 0


@ranks(2)
def test_tensors_that_differ_between_ranks_are_not_saved(ctx, path: str) -> None:
    """Copies of shards, as of a moving average written by hand, are refused on all ranks. The error's cure works."""
    model = fully_shard(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 3)), process_group=ctx.group)
    save = functools.partial(save_checkpoint, process_group=ctx.group)
    copies = {name: p.detach().clone() for name, p in model.named_parameters()}
    for average in (copies, {"decay": 0.9, "of": {"shadow": copies}}):
        with expect(r"copies of this rank's shards.*'average.*0.weight \(of model.0.weight\)'.*model.state_dict\(\)"):
            save(path, {"model": model, "average": average})
    with expect(r"different shapes, and only rank 0's would be saved: 'queue \(\(1,\), \(2,\)\)'"):
        save(path, {"model": model, "queue": torch.ones(1 + ctx.rank)})
    average = {name: value.clone() for name, value in model.state_dict().items()}
    save(path, {"model": model, "average": average})
    found = {name: value.clone() * 0 for name, value in average.items()}
    found = load_checkpoint(path, {"model": model, "average": found}, process_group=ctx.group)["average"]
    for name, value in average.items():
        assert torch.equal(found[name].full_tensor(), value.full_tensor()), name


@ranks(2)
def test_loading_holds_no_more_than_training(ctx, path: str) -> None:
    """Loading allocates missing optimizer state once and little else, even for parameters that one rank holds in full.

    Saving issues no collective.
    """
    layers = [nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)]) for _ in range(4)]
    model = fully_shard(nn.Sequential(*layers), policy={nn.Sequential}, process_group=ctx.group)
    unit = 4 * 32 * 33 * 4
    optimizer, fresh = (torch.optim.AdamW(model.parameters()) for _ in range(2))
    model(torch.ones(2, 32)).sum().backward()
    optimizer.step()
    with CommunicationWatch() as communication:
        save_checkpoint(path, {"m": model, "o": optimizer}, process_group=ctx.group)
    assert communication.seen == []
    for target, state in ((fresh, 2 * 4 * unit // ctx.world_size), (optimizer, 0)):
        with MemoryWatch() as watch:
            load_checkpoint(path, {"m": model, "o": target}, process_group=ctx.group)
        assert watch.peak <= state + unit
        assert same(values(model, target), values(model, optimizer))


@ranks(4)
def test_a_plan_is_kept(ctx, path: str) -> None:
    """A plan is reused for a save of the same state by the same ranks only."""
    model, made, paths = four(ctx), [], (f"{path}/{i}" for i in itertools.count())
    create = _writer.SavePlanner.create_global_plan

    def counted(self: Any, plans: Any) -> Any:
        made.append(1)
        return create(self, plans)

    def saved(planned: int, **more: Any) -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)
        expected, at = values(model), next(paths)
        made.clear()
        save_checkpoint(at, {"kept": model, **more}, process_group=ctx.group)
        assert len(made) == (planned if ctx.rank == 0 else 0)
        for param in model.parameters():
            nn.init.zeros_(param)
        found = load_checkpoint(at, {"kept": model, "x": torch.zeros(3)}, strict=False, process_group=ctx.group)
        assert same(values(model), expected)
        assert found["x"].sum() == (3 if of_one else 0)

    with patched(_writer.SavePlanner, "create_global_plan", counted):
        of_one: dict[str, Any] = {}
        saved(1)
        saved(0)
        of_one = {"x": torch.ones(3)}  # on one rank
        saved(1, **(of_one if ctx.rank == 2 else {}))
        saved(0, **(of_one if ctx.rank == 2 else {}))
        of_one = {}
        saved(1)
    assert all(kept.metadata.storage_data is None for kept in _job._kept if ctx.rank == 0)
    pair = ctx.device_mesh((2, 2), ("a", "b"))["b"].get_group()
    with expect("elements that the ranks would write, and of the tensor: 'kept.a.weight'"):
        save_checkpoint(f"{path}/half {ctx.rank // 2}", {"kept": model}, process_group=pair)
