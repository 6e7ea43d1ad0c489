"""A job's loop on one rank: its errors, its end, and its continuation from a checkpoint."""

import contextlib
import io
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from drill import network, parts_of_job
from models import NormBlock
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import flatshard
from flatshard.elastic import ExcludedError, Job, World, _copies, _exchange
from flatshard.elastic._epochs import Epochs


@pytest.fixture
def alone() -> Iterator[Callable[[], World]]:
    """Return a function that makes worlds of one rank, one after another on one store."""
    store, made = dist.HashStore(), list[World]()

    def make(fresh: bool = False) -> World:
        for world in made:
            world.abort()
        made.append(World(dist.HashStore() if fresh else store, 1, timeout=timedelta(seconds=5)))
        return made[-1]

    yield make
    for world in made:
        world.epochs.has_ended = True
        world.abort()
        with contextlib.suppress(OSError):
            world._socket.close()


def job_in(world: World, model: nn.Module | None = None, **options: Any) -> tuple[Job, nn.Module, Any]:
    model = flatshard.fully_shard(network() if model is None else model, policy={NormBlock})
    optimizer, scheduler = parts_of_job(model)
    return Job(world, model, optimizer, extra=[scheduler], **{"log": lambda _: None, **options}), model, optimizer


def backward(model: nn.Module, step: int) -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    model(x).square().mean().backward()


def one_step(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    backward(model, step)
    optimizer.step()


def lost_connection(*_: Any) -> None:
    raise RuntimeError("[gloo] Connection closed by peer")


def values(model: nn.Module) -> list[Any]:
    return [p.detach().clone() for p in model.parameters()]


def test_a_step_that_failed_comes_again(alone):
    """The step repeats with the state before it, as often as a rank died. Otherwise, its error is raised."""
    job, model, optimizer = job_in(alone())
    seen, before = [], []

    def loop() -> None:
        for step in job.steps(range(5)):
            seen.append(step)
            with job.attempt():
                before.append(values(model))
                one_step(model, optimizer, step)
                if step == 2:
                    lost_connection()

    with pytest.raises(
        RuntimeError, match=r"step 2 failed twice, and no rank had died: rank 0: RuntimeError: \[gloo\]"
    ):
        loop()
    assert seen == [0, 1, 2, 2]
    torch.testing.assert_close(before[3], before[2], rtol=0, atol=0)


def test_copies_that_are_under_way(alone, monkeypatch):
    """A failing step waits for the thread that fills copies."""
    monkeypatch.setattr(_copies, "_LOOK", 0.1)
    job, model, optimizer = job_in(alone())
    seen, fill, begun = [], job._copies._fill, threading.Event()
    job._copies._fill = lambda under: begun.set() or time.sleep(2 * _copies._LOOK) or fill(under)
    for step in job.steps(range(3)):
        seen.append(step)
        with job.attempt():
            if len(seen) == 2:
                begun.wait()
                lost_connection()
            one_step(model, optimizer, step)
            begun.clear()
    assert seen == [0, 1, 1, 2]


def test_a_thread_that_is_left(monkeypatch):
    """If the wait of an abandoned thread ever ends, the thread does nothing but end."""
    monkeypatch.setattr(_copies, "_LOOK", 0.1)
    comes, done = threading.Event(), list[int]()

    def do(thread: _copies._Thread) -> None:
        with thread.pausing():
            comes.wait()
        done.append(1)

    thread = _copies._Thread(do)
    assert not thread.abandon()
    comes.set()
    thread._thread.join()
    assert not done


def test_gradients_between_steps(alone):
    """They raise unless their optimizer has stepped: a network of two may get some from the other's loss afterwards."""
    job, model, optimizer = job_in(alone())
    run = job.steps(range(2))
    next(run)
    with job.attempt():
        backward(model, 0)
        optimizer.step()
        backward(model, 0)
    next(run)
    with pytest.raises(RuntimeError, match="AdamW, optimizer 0, has not stepped its gradients"), job.attempt():
        backward(model, 0)


def test_gradients_that_were_stepped_or_zeroed_may_stay(alone):
    job, model, optimizer = job_in(alone())
    seen = []
    for step in job.steps(range(4)):
        with job.attempt():
            seen.append(step)
            if step % 2:
                optimizer.zero_grad(set_to_none=False)
            backward(model, 0)
            optimizer.step()
            if step % 2:
                optimizer.zero_grad(set_to_none=False)
    assert seen == [0, 1, 2, 3]


def test_gradients_of_two_steps(alone):
    """They are left where no copies are made. A failure begins at the copies before them."""
    job, model, optimizer = job_in(alone(), copy_every=2)
    seen = []
    for step in job.steps(range(4)):
        seen.append(step)
        with job.attempt():
            if step % 2 == 0:
                optimizer.zero_grad()
            backward(model, step)
            if step % 2:
                optimizer.step()
            if seen == [0, 1, 2, 3]:
                lost_connection()
    assert seen == [0, 1, 2, 3, 2, 3]
    twin = network()
    same, _ = parts_of_job(twin)
    for step in range(4):
        if step % 2 == 0:
            same.zero_grad()
        backward(twin, step)
        if step % 2:
            same.step()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.detach().view(-1), q.detach().view(-1), rtol=1e-9, atol=1e-12, msg=name)


def test_copies_after_every_other_step(alone):
    """A failure loses all progress since the last copies, of ``extra`` too."""
    job, model, optimizer = job_in(alone(), copy_every=2)
    (scheduler,), seen, failed = job._extra, [], []
    for step in job.steps(range(5)):
        with job.attempt():
            seen.append((step, scheduler.last_epoch))
            one_step(model, optimizer, step)
            scheduler.step()
            if step == 3 and not failed:
                failed.append(step)
                lost_connection()
    assert seen == [(0, 0), (1, 1), (2, 2), (3, 3), (2, 2), (3, 3), (4, 4)]


def test_what_a_rank_holds_alone(alone):
    job, model, _ = job_in(alone())
    run = job.steps(range(2))
    next(run)
    alone_here = flatshard.no_sync(model)
    refused = pytest.raises(RuntimeError, match=r"at the end of a step: units .* hold gradients that are not reduced")
    with refused, job.attempt(), alone_here:
        backward(model, 0)


def test_changes_while_copies_are_sent(alone):
    job, model, optimizer = job_in(alone())
    run = job.steps(range(3))
    next(run)
    with job.attempt():
        one_step(model, optimizer, 0)
    next(run)
    next(iter(optimizer.state.values()))["exp_avg"].zero_()
    with pytest.raises(ValueError, match="or an optimizer's state, changed between the end of a step"), job.attempt():
        one_step(model, optimizer, 1)


def test_how_a_loop_ends(alone):
    """A loop ends by its last step, ``stop``, ``break`` or an error, once per job."""
    job, model, optimizer = job_in(alone())
    seen = []
    for step in job.steps(range(9)):
        seen.append(step)
        with job.attempt():
            one_step(model, optimizer, step)
            if step == 3:
                job.stop()
    assert seen == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="iterated once"):
        job.steps(range(9))
    world = alone(fresh=True)
    job, model, optimizer = job_in(world)
    for step in job.steps(range(9)):
        with job.attempt():
            one_step(model, optimizer, step)
        break
    assert world.epochs.has_ended
    assert world._store.check(["finished"])
    world = alone(fresh=True)
    job, _, _ = job_in(world)
    with pytest.raises(RuntimeError, match="must be inside"):
        list(job.steps(range(9)))
    assert b"must be inside" in world._store.get("failed")


def test_a_process_that_ends_in_the_middle(alone):
    """An ending process reports to the store, so that others end, too. A process that joins a job without ranks raises."""
    world = alone()
    job, _, _ = job_in(world)
    run = job.steps(range(3))
    next(run)
    world.epochs.has_ended = False
    world._at_exit(os.getpid() + 1)  # of a child
    assert not world._store.check(["failed"])
    world._socket.close()  # happens when the process dies
    late = alone()
    assert late.joins
    with pytest.raises(RuntimeError, match="of which no rank is left"):
        next(job_in(late)[0].steps(range(3)))
    run.close()
    world._store.delete_key("finished")
    world.epochs.has_ended = False
    world._at_exit(os.getpid())
    later = alone()
    with pytest.raises(RuntimeError, match="ended in the middle of the job"):
        next(job_in(later)[0].steps(range(3)))


def test_a_process_that_comes_after_the_last_step(alone):
    """A late process has never trained, so the loop raises, and so does any later use of its rank."""
    job, model, optimizer = job_in(alone())
    for step in job.steps(range(2)):
        with job.attempt():
            one_step(model, optimizer, step)
    world = alone()
    late, _, _ = job_in(world)
    assert (world.joins, late.rank) == (True, 0)
    with pytest.raises(ExcludedError, match="the job had made its last step when process"):
        list(late.steps(range(2)))
    for ask in (lambda: late.rank, lambda: world.world_size):
        with pytest.raises(ExcludedError, match="its model was not trained to the end"):
            ask()
    assert not dist.is_initialized()


class Runs:
    """An object that makes a directory when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_what_comes_over_the_network_is_not_executed(alone, tmp_path):
    """Data from the store or from other ranks is never executed."""
    world, runs = alone(), Runs(str(tmp_path / "it ran"))
    for data in (pickle.dumps(runs).hex(), "[" * 10**5, '{"eval": "1"}', '{"dtype": "nn"}', "{}"):
        world._store.set("1/decided", data)
        late, _, _ = job_in(alone())
        with pytest.raises(ValueError, match="the store, or another rank, holds data"):
            list(late.steps(range(2)))
    torch.save(runs, stream := io.BytesIO())
    with pytest.raises(pickle.UnpicklingError):
        _exchange.loaded(stream.getvalue())
    assert not any(tmp_path.iterdir())


class Position(NamedTuple):
    at: int

    def state_dict(self) -> dict[str, Any]:
        return {"position": self, "seen": {2.5, b"x"}}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_what_a_rank_that_joins_could_not_read(alone):
    """The first copy raises, even if no rank joins, unless the class is registered as the error says."""
    for allowed in ([], [Position]):
        world = alone(fresh=True)
        model = flatshard.fully_shard(network(), policy={NormBlock})
        job = Job(world, model, parts_of_job(model)[0], extra=[Position(3)], log=lambda _: None)
        refused = pytest.raises(TypeError, match=r"extra is not what a rank that joins would read.*add_safe_globals")
        with torch.serialization.safe_globals(allowed), contextlib.nullcontext() if allowed else refused:
            next(job.steps(range(2)))


def test_more_processes_than_begin_the_job(alone, monkeypatch):
    """Processes beyond the first ones wait to join."""
    enter = Epochs._enter

    def come_too_late(epochs: Epochs, epoch: int, note: Any) -> None:
        enter(epochs, epoch, note)
        epochs._propose(epoch, [(epochs.me._replace(number=7), None)])

    monkeypatch.setattr(Epochs, "_enter", come_too_late)
    world = alone()
    assert (world.joins, world.world_size) == (True, 1)


def test_groups_that_others_make(alone):
    """While a world exists, other groups get its timeout; afterwards torch's default."""
    torchs, world = dist.distributed_c10d.default_pg_timeout, alone()
    made = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    for group in (*made.get_all_groups(), dist.new_group(), world.copies_group):
        assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 5
    world.abort()
    assert dist.distributed_c10d.default_pg_timeout == torchs


@pytest.mark.parametrize("scheme", ["", "objects://"])
def test_checkpoints(alone, tmp_path, scheme):
    """A job begins at the newest checkpoint, with all of its state, and keeps two."""
    if scheme:
        pytest.importorskip("fsspec")
        import object_store  # noqa: F401
    directory = f"{scheme}{tmp_path}"
    job, model, optimizer = job_in(alone(), checkpoint_dir=directory, save_every=2)
    run, expected = job.steps(range(9)), []
    for step in run:
        with job.attempt():
            one_step(model, optimizer, step)
        if step % 2:  # otherwise the next save may find this one in progress
            job._checkpoints._under_way[1].result()
        if step == 5:
            expected = values(model)
        if step == 6:
            break
    job._checkpoints.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-4", "step-6"]
    job, model, optimizer = job_in(alone(fresh=True), checkpoint_dir=directory, save_every=2, copy_every=3)
    run = job.steps(range(9))
    assert next(run) == 6
    torch.testing.assert_close(values(model), expected, rtol=0, atol=0)
    assert {float(state["step"]) for state in optimizer.state.values()} == {6.0}
    with job.attempt():
        one_step(model, optimizer, 6)
    assert next(run) == 7
    with pytest.raises(RuntimeError, match="has not stepped its gradients"), job.attempt():  # saved, not copied
        backward(model, 7)


def test_a_save_that_cannot_begin(alone, tmp_path):
    """If the first save cannot begin, the job ends. Later saves are skipped with a message."""
    said: list[str] = []
    for blocked in (2, 4):
        directory = tmp_path / str(blocked)
        job, model, optimizer = job_in(alone(fresh=True), checkpoint_dir=directory, save_every=2, log=said.append)
        expected = pytest.raises(RuntimeError, match=r"step 2 failed twice, .*step-2' exists and is no checkpoint")
        with expected if blocked == 2 else contextlib.nullcontext():
            for step in job.steps(range(7)):
                if step == blocked - 1:
                    (directory / f"step-{blocked}").mkdir(parents=True, exist_ok=True)
                with job.attempt():
                    one_step(model, optimizer, step)
                if job._checkpoints._under_way is not None:  # otherwise the next save may find this one in progress
                    job._checkpoints._under_way[1].result()
    assert sorted(path.name for path in directory.iterdir()) == ["step-2", "step-4", "step-6"]
    assert [text for text in said if "step-4 is not saved: " in text and "is no checkpoint" in text], said


def test_several_models(alone):
    """A model and its average reshard together. As ``extra``, the average is refused, because its shards would stay."""
    world = alone()
    model = flatshard.fully_shard(network(), policy={NormBlock})
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match=r"torch\.nn\.ModuleList"):
        Job(world, model, optimizer, extra=[average])
    with pytest.raises(TypeError, match="state_dict and load_state_dict, got a Generator"):
        Job(world, model, optimizer, extra=[torch.Generator()])
    job = Job(world, nn.ModuleList([model, average]), optimizer, log=lambda _: None)
    with pytest.raises(TypeError, match="pass a sequence"):
        job.steps(iter(range(3)))
    failed, seen = False, []
    for step in job.steps(range(3)):
        with job.attempt():
            seen.append(values(average))
            one_step(model, optimizer, step)
            average.update_parameters(model)
            if step == 1 and not failed:
                failed = True
                lost_connection()
    torch.testing.assert_close(seen[2], seen[1], rtol=0, atol=0)
    assert not all(torch.equal(a, b) for a, b in zip(seen[3], seen[2], strict=True))
