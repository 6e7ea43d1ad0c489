"""Run the same training on the simulated accelerator and on CPU, and report differences.

A case is a function that trains something small and returns numbers::

    cases = Cases()

    @cases.add()
    def sgd(env):
        model = env.shard(env.make(Net))
        return env.train(model)

It runs in the ranks of a pool with the simulator (see ``conftest.py``): once on CPU, then on the simulated device under
one or all of ``POLICIES``. :func:`check` asserts the same numbers, no race, no wait of the host inside
``env.steady()``, and the same order of collectives on all ranks, across groups.

Only the ranks import the simulator, because that would change torch for all other tests.
"""

import contextlib
import dataclasses
import functools
import importlib
import itertools
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pairs
import torch
import torch.distributed as dist
from models import Mlp
from pool import Context, Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed import fake_pg
from torch.utils import _pytree as pytree

import flatshard

POLICIES = ("late_side", "late_main", "random")
"""Orders of kernels that cases run under, see ``sim.py``."""
FAKE_SIZE = 8
WIDTH = 8


def prepare() -> None:
    """Prepare a rank. Its device continues in the background while the rank waits for another outside a kernel."""
    from accelerator import sim, sim_ccl  # noqa: F401

    sim.sim.start_background()


class Block(Mlp):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__(width)


class Net(nn.Module):
    """Three blocks, with a scale and a head of the root."""

    def __init__(self, make_block: Callable[[], nn.Module] = Block, blocks: int = 3) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((), 1.5))
        self.blocks = nn.ModuleList(make_block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def sgd(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def mean_square(output: Tensor) -> Tensor:
    return output.float().square().mean()


@dataclasses.dataclass
class Env:
    """Environment that a case runs in."""

    device: torch.device
    group: Any
    meshes: dict[Any, Any]
    problems: list[str] = dataclasses.field(default_factory=list)
    _streams: list[Any] = dataclasses.field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def is_simulated(self) -> bool:
        return self.device.type != "cpu"

    def make(self, make_model: Callable[[], nn.Module] = Net, seed: int = 0) -> nn.Module:
        """Return the same model on every device."""
        torch.manual_seed(seed)
        return make_model().to(self.device)

    def shard(self, model: nn.Module, policy: Any = None, **options: Any) -> nn.Module:
        if "device_mesh" not in options:
            options.setdefault("process_group", self.group)
        return flatshard.fully_shard(model, policy={Block} if policy is None else policy, **options)

    def tensor(self, *shape: int, seed: int = 0) -> Tensor:
        """Return the same random numbers on every device, copied without a wait of the host, which would hide races."""
        made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        return made.to(self.device, non_blocking=True)

    def batch(self, step: int, rows: int = 2) -> Tensor:
        """Return this rank's batch."""
        return self.tensor(rows, WIDTH, seed=1000 * step + self.rank)

    def backward(self, model: nn.Module, step: int = 0) -> None:
        """Run a backward on this rank's batch."""
        mean_square(model(self.batch(step))).backward()

    @property
    def replicas(self) -> DeviceMesh:
        """Device mesh over all ranks, made once: two replicas, each of half the ranks."""
        kind, shape, names = self.device.type, (2, self.size // 2), ("replicate", "shard")
        if (kind, shape, names) not in self.meshes:
            self.meshes[kind, shape, names] = init_device_mesh(kind, shape, mesh_dim_names=names)
        return self.meshes[kind, shape, names]

    @contextlib.contextmanager
    def side_streams(self, count: int) -> Iterator[list[contextlib.AbstractContextManager[Any]]]:
        """Yield streams that wait for the current one at entry, and it for them at exit. On CPU, yield null contexts."""
        if not self.is_simulated:
            yield [contextlib.nullcontext() for _ in range(count)]
            return
        device = torch.get_device_module(self.device)
        while len(self._streams) < count:
            self._streams.append(device.Stream(self.device))
        here, sides = device.current_stream(self.device), self._streams[:count]
        for side in sides:
            side.wait_stream(here)
        yield sides
        for side in sides:
            here.wait_stream(side)

    @staticmethod
    def wait(waiter: Any, *others: Any) -> None:
        """Make one of the ``side_streams`` wait for others."""
        if isinstance(waiter, torch.Stream):
            for other in others:
                waiter.wait_stream(other)

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        """Compute on another stream."""
        with self.side_streams(1) as (side,), side:
            yield

    @contextlib.contextmanager
    def capture(self) -> Iterator[Any]:
        """Capture as in a CUDA graph, on a new stream. On CPU, only compute."""
        if not self.is_simulated:
            yield None
            return
        from accelerator.sim import sim

        device = torch.get_device_module(self.device)
        with device.stream(device.Stream()), sim.capture() as graph:
            yield graph
        device.synchronize()

    @staticmethod
    def replay(graph: Any, run: Callable[[], object]) -> None:
        """Replay the graph of ``run``. On CPU, run it."""
        if graph is None:
            run()
        else:
            from accelerator.sim import sim

            sim.replay(graph)

    @contextlib.contextmanager
    def steady(self, wanted: bool = True) -> Iterator[None]:
        """Report waits of the host for the device inside."""
        if not self.is_simulated or not wanted:
            yield
            return
        from accelerator.machine import lines_of
        from accelerator.sim import sim

        before = len(sim.host_syncs)
        yield
        for why, stack in sim.host_syncs[before:]:
            self.problems.append("\n    ".join([f"the host waits: {why}", *lines_of(stack)[:8]]))

    def train(
        self,
        model: nn.Module,
        *,
        steps: int = 2,
        micro: int = 1,
        holds: str = "",
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: sgd(model.parameters()),
        clip: Callable[[nn.Module], Tensor] | None = None,
        waits: bool = False,
        steady_from: int = 1,
    ) -> dict[str, Any]:
        """Train for some steps. Return parameters, gradients, losses and norms.

        ``holds`` names a setting that is False for all ``micro`` batches of a step except the last. The host may wait
        in the first steps, or in all if ``waits``.
        """
        stepper = optimizer(model)
        losses, norms = [], []
        for step in range(steps):
            batches = [self.batch(10 * step + i) for i in range(micro)]
            with self.steady(step >= steady_from and not waits):
                stepper.zero_grad()
                for i, batch in enumerate(batches):
                    if holds:
                        flatshard.configure(model, **{holds: i == micro - 1})
                    value = mean_square(model(batch))
                    value.backward()
                    losses.append(value.detach())
                if clip is not None:
                    norms.append(clip(model))
                stepper.step()
        return {**numbers(model), "losses": losses, "norms": norms}

    def steps(self, model: nn.Module, run: Callable[[int], object]) -> dict[str, Any]:
        """Run three steps, each an optimizer's step after ``run(step)``. The host must not wait in the last."""
        optimizer = sgd(model.parameters())
        for step in range(3):
            with self.steady(step == 2):
                optimizer.zero_grad()
                run(step)
                optimizer.step()
        return numbers(model)


def numbers(model: nn.Module) -> dict[str, Any]:
    """Return this rank's parameters, gradients and buffers."""
    grads = {f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {**{n: p.detach() for n, p in model.named_parameters()}, **grads, **dict(model.named_buffers())}


@dataclasses.dataclass
class Case:
    module: str
    name: str
    run: Callable[[Env], Any]
    ranks: int = 2
    fake: bool = True  # whether the fake group, which needs no other rank, is enough
    watch_host: bool = False
    rtol: float = 1e-5
    atol: float = 1e-6


class Cases(dict[str, Case]):
    """Cases of a test module by name."""

    def add(self, variants: dict[str, dict[str, Any]] | None = None, **options: Any) -> Callable[[Any], Any]:
        """Register a case for each of ``variants``, called with its arguments. ``options`` are fields of :class:`Case`."""

        def register(run: Callable[..., Any]) -> Callable[..., Any]:
            for variant, arguments in (variants or {"": {}}).items():
                name = f"{run.__name__}-{variant}" if variant else run.__name__
                assert name not in self, name
                self[name] = Case(run.__module__, name, functools.partial(run, **arguments), **options)
            return run

        return register


# -- in the ranks ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _fake_group() -> Iterator[Any]:
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=FAKE_SIZE)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def _run(case: Case, env: Env) -> Any:
    torch.manual_seed(0)
    result = case.run(env)
    return pytree.tree_map(lambda t: t.detach().cpu().clone() if isinstance(t, Tensor) else t, result)


def simulate(case: Case, env: Env, policy: str) -> tuple[Any, list[Any]]:
    """Run the case on the simulated device. Return numbers and the order of collectives; add to ``env.problems``."""
    from accelerator import sim_ccl
    from accelerator.sim import HostWatch, sim

    sim.reset()
    sim.policy = policy
    sim_ccl.order.clear()
    try:
        with HostWatch() if case.watch_host else contextlib.nullcontext():
            result = _run(case, env)
        sim.drain()
    except BaseException:
        sim.abandon()
        raise
    env.problems += map(str, sim.races.values())
    return result, [(size, what) for _, size, what in sim_ccl.order]


def compare(got: Any, expected: Any, rtol: float, atol: float) -> list[str]:
    """Return the differences by name."""
    found, spec = pytree.tree_flatten_with_path(got)
    wanted, wanted_spec = pytree.tree_flatten_with_path(expected)
    if spec != wanted_spec:
        return [f"other results than on CPU: {spec}, expected {wanted_spec}"]
    problems = []
    for (path, a), (_, b) in zip(found, wanted, strict=True):
        try:
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
        except AssertionError as e:
            detail = next((line for line in str(e).splitlines() if "difference" in line or "got" in line), str(e))
            problems.append(f"other numbers than on CPU: {pytree.keystr(path)}: {detail}")
    return problems


def run_case(
    ctx: Context, module: str, name: str, policies: tuple[str, ...], backend: str | None = None
) -> list[tuple[str, list[str], list[Any]]]:
    """Run a case, the body of all tests. Return policy, problems and order of collectives of each simulated run."""
    case: Case = importlib.import_module(module).cases[name]
    answers = []
    if ctx.group is None:
        make_group: Any = _fake_group
    else:
        group = ctx.group if backend is None else dist.new_group(list(range(ctx.world_size)), backend=backend)
        make_group = functools.partial(contextlib.nullcontext, group)
    with make_group() if backend is None else contextlib.nullcontext(ctx.group) as group:
        meshes = {} if ctx.group is None else ctx._meshes
        expected = _run(case, Env(torch.device("cpu"), group, meshes))
    for policy in policies:
        ctx.note(f"{name} under {policy}")
        with make_group() as group:
            env = Env(torch.device("simdev", 0), group, {} if ctx.group is None else ctx._meshes)
            try:
                got, order = simulate(case, env, policy)
            except Exception as e:
                if ctx.world_size > 1:  # the other ranks may wait
                    raise
                answers.append((policy, [f"{type(e).__name__}: {e}\n{traceback.format_exc()}"], []))
                continue
            problems = [*env.problems, *compare(got, expected, case.rtol, case.atol)]
            answers.append((policy, problems, order))
    return answers


# -- in pytest -------------------------------------------------------------------------------------------------------


def check(pool: Pool, case: Case, backend: str | None = None) -> None:
    """Fail with all problems of the case, if any, on a ``pool`` of the fixtures in ``conftest.py``.

    The clocks of streams find races under any policy. The policy only decides which numbers a race gives, so a case
    runs under one, chosen by its name.
    """
    at = zlib.crc32(case.name.encode()) % len(POLICIES)
    policies = POLICIES if pairs.thorough else POLICIES[at : at + 1]
    ranks = pool.size if pool.size == 1 or backend is not None else case.ranks  # all of them make a group
    answers = pool.run(run_case, case.module, case.name, policies, backend, world_size=ranks, timeout=60)
    problems: dict[str, list[str]] = {}  # with the runs that showed each
    for of_ranks in zip(*answers, strict=True):
        policy = of_ranks[0][0]
        for rank, (_, found, order) in enumerate(of_ranks):
            for i, (mine, first) in enumerate(itertools.zip_longest(order, of_ranks[0][2])):
                if mine != first:
                    found.append(f"collective {i} is {mine} here, {first} on rank 0")
                    break
            for problem in found:
                problems.setdefault(problem, []).append(f"{policy} (rank {rank})")
    text = "\n".join(f"{', '.join(where)}: {problem}" for problem, where in [*problems.items()][:8])
    assert not problems, f"{case.name}: {len(problems)} problems, of which\n{text}"
