"""torchft with two replica groups of two ranks: one is killed, the other continues, and the first one rejoins."""

import multiprocessing
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pool import PRELOAD
from torch import nn

import flatshard

torchft = pytest.importorskip("torchft")
pytestmark = [pytest.mark.clients("torchft"), pytest.mark.time_limit(600)]


class Group:
    """The processes of one replica group, and the output of its first rank."""

    def __init__(self, number: int, lighthouse: str, folder: Path, last: Path) -> None:
        import torchft_job

        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        folder.mkdir()
        self.folder = folder
        start = multiprocessing.get_context("forkserver")
        start.set_forkserver_preload([*PRELOAD, "torchft"])
        self.ranks = []
        for rank in range(2):
            (folder / f"{rank}.err").touch()
            arguments = (number, rank, 2, port, lighthouse, folder, last)
            self.ranks.append(start.Process(target=torchft_job.main, args=arguments, daemon=True))
            self.ranks[-1].start()

    def steps(self, groups: int) -> dict[int, str]:
        """Return the sums over parameters after each step with that many groups."""
        out = self.folder / "0.out"
        lines = [line.split() for line in out.read_text().splitlines()] if out.exists() else []
        return {int(line[0]): line[2] for line in lines if len(line) == 4 and line[1] == str(groups)}

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.join()

    def errors(self) -> str:
        return "".join((self.folder / f"{rank}.err").read_text()[-2000:] for rank in range(2))


def wait_for(what: Callable[[], bool], groups: list[Group]) -> None:
    end = time.monotonic() + 200
    while not what():
        assert time.monotonic() < end, "".join(group.errors() for group in groups)
        time.sleep(0.1)


def test_a_group_dies_and_comes_back(tmp_path):
    from torchft.coordination import LighthouseServer

    limits = {"join_timeout_ms": 500, "quorum_tick_ms": 50, "heartbeat_timeout_ms": 2000}
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, **limits)
    last = tmp_path / "last"
    first, second = groups = [Group(n, lighthouse.address(), tmp_path / str(n), last) for n in range(2)]
    try:
        wait_for(lambda: len(first.steps(2)) >= 3 and len(second.steps(2)) >= 3, groups)
        second.ranks[1].kill()
        time.sleep(0.5)
        second.kill()  # like its launcher, which then starts it again
        wait_for(lambda: len(first.steps(1)) >= 3, groups)
        back = Group(2, lighthouse.address(), tmp_path / "2", last)
        groups.append(back)
        wait_for(lambda: len(back.steps(2)) >= 3, groups)
        last.write_text(str(max(first.steps(2)) + 3))
        for rank in (*first.ranks, *back.ranks):
            rank.join(100)
            assert rank.exitcode == 0, first.errors() + back.errors()
        for other in (second, back):  # the same bits after its first step
            together = first.steps(2).keys() & other.steps(2).keys()
            assert len(together) >= 3
            assert all(first.steps(2)[step] == other.steps(2)[step] for step in together)
        steps = sorted({**first.steps(1), **first.steps(2)})
        assert steps == list(range(steps[0], steps[-1] + 1)), "a step is lost"
    finally:
        for group in groups:
            group.kill()
        lighthouse.shutdown()


def test_single_parameters_are_refused(world):
    from flatshard.integrations.torchft import average_gradients

    world(2)
    model = flatshard.fully_shard(nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(ValueError, match=r"'weight' is a single parameter.*flatshard.flat_parameters\(model\)"):
        average_gradients(None, model.parameters())
