"""Shared by tests of checkpoints: models with every kind of parameter, comparisons, and watches."""

import json
from pathlib import Path
from typing import Any

import torch
from counting import LiveBytes
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import flatshard
from flatshard import ShardingStrategy, fully_shard
from flatshard.checkpoint._container import checksums, memory_of

STRATEGIES = [s for s in ShardingStrategy if not s.is_hybrid]


class Model(nn.Module):
    """Tied, frozen, empty, 0-dim, transposed, channels-last and 16-bit parameters; and buffers, one of them not
    persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(5)
        self.scale = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.turned = nn.Parameter(torch.randn(6, 5).t())
        self.short = nn.Parameter(torch.randn(9).bfloat16())
        self.ignored = nn.Parameter(torch.randn(3))
        self.down, self.head = nn.Linear(7, 5, bias=False), nn.Linear(7, 5, bias=False)
        self.head.weight = self.down.weight
        self.frozen = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.register_buffer("steps", torch.tensor([1, 2, 3]))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(self.up(self.norm(x)) * self.scale) @ self.turned @ self.turned.t() + self.short.sum()
        return self.head(self.up(x)) + self.conv(x.new_ones(1, 3, 3, 3)).sum() + self.frozen.sum() + self.ignored.sum()


def make(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def shard(ctx, model: Model, strategy=ShardingStrategy.FULL_SHARD, policy=None) -> Model:
    return fully_shard(model, policy=policy, strategy=strategy, process_group=ctx.group, ignored_states=[model.ignored])


def check_equal(model: nn.Module, expected: dict[str, Tensor]) -> None:
    """Compare all values of a sharded model, bit for bit."""
    with flatshard.summon_full_params(model):
        found = model.state_dict()
        assert list(found) == list(expected)
        same_tensors(found, expected)


class CommunicationWatch(TorchDispatchMode):
    """A record of every collective, with the dtypes that it moves."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            leaves = torch.utils._pytree.tree_leaves((args, kwargs))
            self.seen += [(str(func), t.dtype) for t in leaves if isinstance(t, Tensor)]
        return func(*args, **(kwargs or {}))

    @property
    def data(self) -> list[tuple[str, torch.dtype]]:
        """Collectives other than those of pickled objects: torch's planners send plans, which have names and sizes only."""
        return [(f, d) for f, d in self.seen if d not in (torch.uint8, torch.int64)]


class MemoryWatch(LiveBytes):
    """A record of the peak of live bytes, of tensors made inside."""

    def __init__(self) -> None:
        super().__init__()
        checksums(memoryview(bytes(8)))  # makes a table of 1 MiB, once per process

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [self.plain(t) for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)]
        known = {t.untyped_storage()._cdata for t in given}
        result = func(*args, **(kwargs or {}))
        made = [self.plain(t) for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, Tensor)]
        self.add(t for t in made if t.untyped_storage()._cdata not in known)
        self.peak = max(self.peak, self.now())
        return result

    @staticmethod
    def plain(tensor: Tensor) -> Tensor:
        """Return the tensor that has the memory."""
        return tensor.to_local() if isinstance(tensor, flatshard.checkpoint.ShardedValue) else tensor


def same_tensors(found: dict[str, Any], expected: dict[str, Tensor], strides: bool = False) -> None:
    """Compare plain tensors by name, bit for bit."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, allow_subclasses=False, check_stride=strides)


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of an optimizer of a plain model."""
    ids = {id(p): n for n, p in model.named_parameters()}
    order = [ids[id(p)] for group in optimizer.param_groups for p in group["params"]]
    return flatshard.checkpoint.rekey_optim_state_dict(optimizer.state_dict(), order)


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare states bit for bit; groups may have their parameters in another order."""
    for part in (lambda state: state["state"], options):
        torch.testing.assert_close(part(found), part(expected), rtol=0, atol=0, allow_subclasses=False)


def options(state: dict[str, Any]) -> dict[str, Any]:
    """Return each parameter's options."""
    return {
        name: {k: v for k, v in group.items() if k not in ("params", "param_names")}
        for group in state["param_groups"]
        for name in group["params"]
    }


def layers(seed: int = 0) -> nn.Module:
    """Make layers of sizes that two ranks don't divide."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5), nn.LayerNorm(5))


def on_four(ctx, how: str, seed: int = 0, strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD) -> nn.Module:
    """Shard layers over four ranks: ``"tp"`` with tensor parallelism in pairs, ``"replicas"`` in two, ``"plain"`` over
    all."""
    model = layers(seed)
    if how == "plain":
        return fully_shard(model, process_group=ctx.group)
    if how == "replicas":
        mesh = ctx.device_mesh((2, 2), ("replicate", "shard"))
        return fully_shard(model, device_mesh=mesh, strategy=ShardingStrategy.HYBRID_SHARD)
    mesh = ctx.device_mesh((2, 2), ("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(use_local_output=False), "1": RowwiseParallel()})
    return fully_shard(model, device_mesh=mesh["dp"], strategy=strategy)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    torch.manual_seed(5)
    for _ in range(steps):
        model(torch.randn(3, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read a file as the format's specification says."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert size % 8 == 0  # required to map it to tensors
    assert header.pop("__metadata__") == {"format": "pt"}
    ends, found = 0, {}
    for name, each in header.items():
        start, end = each["data_offsets"]
        assert start == ends  # no holes
        ends = end
        values = torch.frombuffer(bytearray(data[8 + size + start : 8 + size + end]) or bytearray(8), dtype=torch.uint8)
        found[name] = values[: end - start].view(_DTYPES[each["dtype"]]).view(each["shape"])
    assert len(data) == 8 + size + ends
    return found


def write_safetensors(path: Path, tensors: dict[str, Tensor], **changes: Any) -> None:
    """Write a file as the format's specification says. ``changes``: entries of the header that differ, by name."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    names, at = {dtype: name for name, dtype in _DTYPES.items()}, 0
    for name, value in tensors.items():
        place = [at, at + value.nbytes]
        header[name] = {"dtype": names[value.dtype], "shape": list(value.shape), "data_offsets": place}
        at += value.nbytes
    text = json.dumps({**header, **changes}).encode()
    data = [bytes(memory_of(value.contiguous())) for value in tensors.values()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join([len(text).to_bytes(8, "little"), text, *data]))
