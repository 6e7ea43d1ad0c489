"""Weight updates for receivers: bit for bit, only complete versions whatever is lost, and at which cost."""

import contextlib
import random
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from on_ranks import ranks
from parity import everybody
from saving import MemoryWatch, layers, make, on_four, train
from torch import Tensor, nn

import flatshard
from flatshard import fully_shard
from flatshard.checkpoint import _container, full_state_dict
from flatshard.integrations.weight_sync import EngineWeights, sync_weights
from flatshard.weights import Receiver, Sender, Target, _cells, _codec, _messages, _receiver, _sender
from flatshard.weights._gaps import bits, differ
from flatshard.weights._messages import message_of, read_message

WIDTH, HALF = 16, 8


@pytest.fixture
def alone(world: Callable[[int], None]) -> None:
    world(1)


def pair(model: nn.Module, weights: Any = None, **options: Any) -> tuple[Sender, Receiver, list[bytes]]:
    """Return a connected sender and receiver of one rank, and the list of the sender's messages."""
    sent: list[bytes] = []

    def to_receiver(name: Any, message: bytes) -> None:
        sent.append(message)
        receiver.receive(message)

    sender = Sender(model, to_receiver, **options)
    receiver = Receiver(weights, lambda rank, message: sender.receive(message))
    receiver.poll()
    assert receiver.apply() is not None
    return sender, receiver, sent


def change(model: nn.Module, seed: int, share: float) -> None:
    """Change some elements of this rank's shards: most by a step in bfloat16 or a few, others to arbitrary numbers."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.numel() and flatshard.tensors.shard_info(p) is not None:
                draw = torch.rand(p.shape, generator=generator)
                step = 1 + (torch.rand(p.shape, generator=generator) - 0.5) / 30
                other = torch.randn(p.shape, generator=generator).exp() - 2
                p.copy_(torch.where(draw < share * 0.95, p * step, torch.where(draw < share, other.to(p.dtype), p)))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype is b.dtype and torch.equal(bits(a.reshape(-1)), bits(b.reshape(-1)))


def check_has(weights: dict[str, Tensor], model: nn.Module, dtype: torch.dtype | None = None) -> None:
    for name, value in full_state_dict(model, dtype=dtype).items():
        assert same_bits(weights[name], value), name


class Big(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = make()
        self.q, self.k, self.v, self.out, self.embedding = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.q(x))


def shard_big(ctx: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Big()
    return fully_shard(model, policy={nn.Linear}, process_group=ctx.group, ignored_states=[model.inner.ignored])


def half(rank: int) -> list[Target]:
    """Return targets of one of an engine's two tensor-parallel ranks, for :class:`Big`: fused, by columns, padded,
    transposed."""
    qkv, gate_up, embedding = (torch.zeros(n, WIDTH, dtype=torch.bfloat16) for n in (3 * HALF, 2 * WIDTH, HALF + 3))
    rows = {**dict(zip("qkv", qkv.split(HALF), strict=True)), "embedding": embedding[:HALF]}
    return [
        *(Target(f"{name}.weight", part, (rank * HALF, 0)) for name, part in rows.items()),
        *(Target(f"{n}.weight", gate_up[i * WIDTH :][:WIDTH], (rank * WIDTH, 0)) for i, n in enumerate(["gate", "up"])),
        Target("out.weight", torch.zeros(WIDTH, HALF, dtype=torch.bfloat16), (0, rank * HALF)),
        Target("inner.up.weight", torch.zeros(5, 7, dtype=torch.bfloat16).t()),
        Target("inner.scale", torch.zeros((), dtype=torch.bfloat16)),
        Target("inner.conv.weight", torch.zeros(2, 3, 3, 2, dtype=torch.bfloat16), (2 * rank, 0, 0, 1)),
    ]


class Follower:
    """A training rank with a receiver. ``kinds`` are successive requests of receivers. If ``is_bad``, some messages are lost,
    doubled, late or damaged."""

    def __init__(self, ctx: Any, model: nn.Module, kinds: list[Any], is_bad: bool = False) -> None:
        self.ctx, self.model, self.kinds, self.is_bad, self.random = ctx, model, kinds, is_bad, random.Random(ctx.rank)
        self.out, self.late = list[tuple[str, int, bytes]](), list[tuple[str, int, bytes]]()
        self.applied = self.damaged = 0
        self.wholes: dict[int, dict[str, Tensor]] = {}  # full weights by version
        self.start_sender(0)
        self.start_receiver()

    def exchange(self) -> None:
        arrived = [each for mail in everybody(self.ctx, self.out) for each in mail if each[1] == self.ctx.rank]
        arrived += self.late
        self.out, self.late = [], []
        if self.is_bad:
            self.random.shuffle(arrived)
        for kind, rank, message in arrived:
            fate = self.random.random() if self.is_bad else 0.5
            if fate < 0.05:
                continue
            if fate < 0.15:
                self.late.append((kind, rank, message))
                continue
            if fate < 0.17:
                damaged = bytearray(message)
                damaged[self.random.randrange(20, len(message))] ^= 1 << self.random.randrange(8)
                message = bytes(damaged)
            for _ in range(1 + (fate > 0.9)):
                (self.sender if kind == "sender" else self.receiver).receive(message)

    def start_sender(self, version: int) -> None:
        self.sender = Sender(
            self.model,
            lambda name, message: self.out.append(("receiver", name, message)),
            version=version,
            dtype=torch.bfloat16,
            history_bytes=10000,
            process_group=self.ctx.group,
        )
        self.note()

    def note(self) -> None:
        names = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        whole = full_state_dict(self.model, dtype=torch.bfloat16)
        self.wholes[self.sender.version] = {name: value for name, value in whole.items() if name in names}

    def start_receiver(self) -> None:
        kind, *others = self.kinds
        self.kinds = [*others, kind]
        self.targets = half(kind) if isinstance(kind, int) else None
        by_name = {name: torch.zeros_like(value) for name, value in self.wholes[self.sender.version].items()}
        wanted = self.targets or (by_name if kind == "by name" else None)
        self.receiver = Receiver(
            wanted, lambda to, message: self.out.append(("sender", to, message)), name=self.ctx.rank
        )

    def follow(self, asks: bool = True) -> None:
        if asks:
            self.receiver.poll()
            self.exchange()
        self.exchange()
        served = self.receiver.version
        if served is not None:
            self.check(served)
        applied = self.receiver.apply()
        if applied is not None:
            self.applied += 1
            assert served is None or applied.version > served
            self.check(applied.version)
        self.damaged = max(self.damaged, self.receiver.damaged)

    def check(self, version: int) -> None:
        weights = self.receiver.weights
        for target in self.targets or [Target(name, tensor) for name, tensor in weights.items()]:
            expected = self.wholes[version][target.name]
            for d, (s, n) in enumerate(zip(target.start or [0] * expected.dim(), target.tensor.shape, strict=True)):
                expected = expected.narrow(d, s, n)
            assert same_bits(target.tensor, expected), (version, target.name)

    def publish(self) -> None:
        self.sender.publish()
        self.note()


@contextlib.contextmanager
def small_messages(cell: int = 400, message: int = 1000) -> Iterator[None]:
    """Make messages small, so that an update of a tiny model has many cells and messages."""
    with mock.patch.object(_cells, "CELL", cell), mock.patch.object(_sender, "_MESSAGE", message):
        yield


@ranks(2)
def test_updates_over_a_bad_network(ctx) -> None:
    """Receivers of all kinds always have complete versions, bit for bit, while they and the senders are restarted."""
    with small_messages():
        job = Follower(ctx, shard_big(ctx), ["all", 0, "by name", 1] if ctx.rank else [1, "by name", "all", 0], True)
        for step in range(200):
            if step % 20 == 0:
                ctx.note(f"step {step}")
            if step % 20 == 5 + 10 * ctx.rank:
                job.start_receiver()
            if step in (40, 196):  # no receiver is restarted after step 196
                job.start_sender(step * 100)
            with torch.no_grad():
                job.model.inner.ignored.mul_(1.01)
            change(job.model, 100 * step + ctx.rank, [0.02, 0.05, 0, 0.02, 1.0, 0.1][step % 6])
            job.publish()
            job.follow(asks=step % 2 == 0)
        assert (job.applied > 60, job.damaged > 1) == (True, True), (job.applied, job.damaged)
        ctx.note("the end")
        for _ in range(20):
            job.follow()
        assert job.receiver.version == job.sender.version
        assert job.sender.versions == dict.fromkeys(range(2), job.sender.version)
        assert job.sender.history_nbytes == 0  # every receiver has everything


@ranks(2)
def test_a_rank_that_has_nothing_for_a_receiver(ctx) -> None:
    """The rank sends nothing to the receiver, and does not wait for it."""
    model = fully_shard(nn.Linear(8, 8, bias=False), process_group=ctx.group)
    job = Follower(ctx, model, ["all"])
    job.targets = [Target("weight", torch.zeros(2, 8).bfloat16())]
    job.receiver = Receiver(job.targets, lambda to, message: job.out.append(("sender", to, message)), name=ctx.rank)
    for step in range(3):
        job.follow()
        job.follow()
        assert job.receiver.version == step
        change(model, step, 0.5)
        job.publish()
    job.follow()
    job.follow()
    assert job.sender.versions == ({} if ctx.rank else dict.fromkeys(range(2), 3))


@ranks(4)
def test_shardings(ctx) -> None:
    """Training may be tensor-parallel, or have replicas of which one sends, with parameters sharded in any way."""
    group = ctx.group
    for model, senders in (
        (on_four(ctx, "tp"), range(4)),
        (on_four(ctx, "replicas"), range(2)),
        (fully_shard(layers(), layout=flatshard.layouts.Rows(), process_group=group), range(4)),
        (fully_shard(layers(), strategy=flatshard.ShardingStrategy.SHARD_OPTIM, process_group=group), range(4)),
        (fully_shard(layers(), strategy=flatshard.ShardingStrategy.NO_SHARD, process_group=group), range(1)),
    ):
        job = Follower(ctx, model, ["all"])
        optimizer = torch.optim.AdamW(job.model.parameters(), lr=1e-3)
        job.follow()  # rank 0's message, which names the other ranks
        for step in range(3):
            job.follow()
            assert job.receiver.version == step
            train(job.model, optimizer)
            job.publish()
        job.follow()
        job.follow()
        assert job.sender.versions == (dict.fromkeys(range(4), 3) if ctx.rank in senders else {})


MOST_BYTES = {
    torch.bfloat16: ((0.002, 1.6), (0.02, 1.2), (0.1, 1.15), (0.3, 1.1), (0.9, 0.75)),
    torch.float32: ((0.02, 1.25), (0.5, 1.2), (1.0, 1.01)),
}


@pytest.mark.parametrize(("dtype", "share", "most"), [(d, *row) for d, of in MOST_BYTES.items() for row in of], ids=str)
def test_bytes(alone, dtype: torch.dtype, share: float, most: float):
    """An update has at most 1.6 times the bytes of changed elements. All messages are counted."""
    model = fully_shard(nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1000)))
    sender, receiver, sent = pair(model, dtype=dtype)
    before = {name: tensor.clone() for name, tensor in receiver.weights.items()}
    sent.clear()
    change(model, 0, share)
    sender.publish()
    assert receiver.apply().version == 1
    check_has(receiver.weights, model, dtype)
    after = receiver.weights
    changed = sum(int(differ(after[n].view(-1), t.view(-1)).sum()) * t.itemsize for n, t in before.items())
    assert sum(map(len, sent)) <= most * changed


def test_a_default_device(alone):
    """Neither side creates tensors on the default device."""
    model = fully_shard(nn.Linear(100, 100))
    _container._weights.cache_clear()
    with torch.device("meta"):
        sender, receiver, _ = pair(model, dtype=torch.bfloat16)
    for step, share in enumerate((0.01, 0.2, 1.0)):
        change(model, step, share)
        with torch.device("meta"):
            sender.publish()
            assert receiver.apply().version == step + 1
        check_has(receiver.weights, model, torch.bfloat16)


def test_numbers_that_have_nothing_in_common(alone):
    """Unrelated numbers cost their own bytes, as do one-byte integers, which have no half."""
    model = nn.Linear(100, 100)
    model.integers = nn.Parameter(torch.arange(100).to(torch.int8), requires_grad=False)
    sender, receiver, sent = pair(fully_shard(model))
    sent.clear()
    with torch.no_grad():
        model.weight.neg_()
        model.integers.neg_()
    sender.publish()
    assert receiver.apply().names >= {"weight", "integers"}
    assert sum(map(len, sent)) < 40_400 + 100 + 400
    check_has(receiver.weights, model)


def test_only_its_intervals(alone):
    """Each half of an engine gets half of the bytes, and only its targets are written."""
    model = fully_shard(nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)))
    around = torch.full((256, 130), 7.0)
    targets = [Target("0.weight", around[:, 1:129], (0, 128)), Target("1.weight", torch.zeros(128, 256), (128, 0))]
    counts = []
    for weights in (None, targets):
        sender, receiver, sent = pair(model, weights)
        sent.clear()
        change(model, 0, 0.1)
        sender.publish()
        assert receiver.apply().names == {"0.weight", "1.weight"}
        counts.append(sum(map(len, sent)))
    assert 0.45 < counts[1] / counts[0] < 0.55
    assert around[:, [0, 129]].eq(7).all()
    assert torch.equal(around[:, 1:129], model[0].weight.view(256, 256)[:, 128:])
    assert torch.equal(targets[1].tensor, model[1].weight.view(256, 256)[128:])
    receiver.poll()
    assert {read_message(each, "").header["kind"] for each in sent} == {"update"}  # the plan was sent once


# -- losses and failures -------------------------------------------------------------------------------------------------


def test_what_is_lost_costs_what_was_lost_or_all(alone):
    """If the history has room for the update, it is sent again; otherwise current cells are."""
    model = fully_shard(nn.Linear(100, 100, bias=False))
    for history_bytes, versions in ((None, 0), (10**6, 3)):
        sender, receiver, sent = pair(model, history_bytes=history_bytes)
        with mock.patch.object(receiver, "receive"):
            for step in range(3):
                change(model, step, 0.01)
                sender.publish()
        assert sender.versions == {0: 0}
        sent.clear()
        receiver.poll()
        assert receiver.apply().version == 3
        kinds = [read_message(message, "").header["kind"] for message in sent]
        assert kinds == (["update"] * versions or ["cells"])
        assert (sum(map(len, sent)) < 2500) == bool(versions)
        check_has(receiver.weights, model)
        assert sender.versions == {0: 3}
        sent.clear()
        receiver.poll()
        assert not sent  # nothing is missing


def test_a_history_has_no_room_for_any_of_several_channels(alone):
    """Receivers with different targets get every update all the same."""
    model = fully_shard(nn.Linear(10, 10, bias=False))
    routes: dict[Any, Callable[[bytes], object]] = {}
    sender = Sender(model, lambda name, message: routes[name](message), history_bytes=0)
    for name, weights in (("all", None), ("some", [Target("weight", torch.zeros(5, 10))])):
        receiver = Receiver(weights, lambda rank, message: sender.receive(message), name=name)
        routes[name] = receiver.receive
        receiver.poll()
    change(model, 0, 0.5)
    sender.publish()
    assert sender.history_nbytes == 0
    assert receiver.apply() == (1, frozenset({"weight"}))


def test_cells_of_different_versions(alone):
    """Some cells are lost and arrive later with newer values. The other cells get the updates between."""
    model = fully_shard(nn.Linear(40, 40, bias=False))
    late: list[bytes] = []
    with small_messages():
        sender = Sender(model, lambda name, message: late.append(message), dtype=torch.bfloat16, history_bytes=10**6)
        receiver = Receiver(None, lambda rank, message: sender.receive(message))

        def deliver(*chosen: int) -> list[bytes]:
            found = late.copy()
            late.clear()
            for i in chosen:
                receiver.receive(found[i])
            return found

        def heads() -> list[dict[str, Any]]:
            return [read_message(message, "").header for message in late]

        def set_all(value: float) -> None:
            with torch.no_grad():
                model.weight.copy_(torch.where(torch.arange(40) % 2 == 0, value, 0.0).expand(40, 40))
            sender.publish()

        set_all(1.0078125)
        assert repr(receiver) == "Receiver(0, version=None; rank 0 has not answered)"
        receiver.poll()
        assert [head["kind"] for head in heads()] == ["plan", *["cells"] * 4]
        _, *cells = deliver(0, 1, 3, 0)  # the second and the last of four are lost; the plan comes twice
        assert repr(receiver) == "Receiver(0, version=None; rank 0: 2 of 4 cells have not come)"
        set_all(1.0)
        set_all(0.5)  # a step of 2**7 in bits, whose direction the low half cannot tell
        deliver(*[i for i, head in enumerate(heads()) if head["version"] == 2])
        receiver.poll()
        deliver(*[i for i, head in enumerate(heads()) if head["kind"] == "cells"])
        assert receiver.apply() is None  # some cells have version 3, the others version 2
        assert repr(receiver) == "Receiver(0, version=None; rank 0: up to 2)"
        assert receiver.held_nbytes > 0
        receiver.poll()
        assert sender.versions == {0: None}
        deliver(*range(len(late)))
        assert receiver.apply() == (3, frozenset({"weight"}))
        check_has(receiver.weights, model, torch.bfloat16)
        for message in cells:  # doubled and late
            receiver.receive(message)
        assert (receiver.held_nbytes, receiver.apply()) == (0, None)


def test_a_send_that_fails(alone):
    """The version exists nevertheless: other receivers get it, and this one asks for the missing messages."""
    model = fully_shard(nn.Linear(10, 10))
    routes: dict[Any, Callable[[bytes], object]] = {}
    sender = Sender(model, lambda name, message: routes[name](message), history_bytes=10**6)
    receiver, other = (Receiver(None, lambda rank, message: sender.receive(message), name=name) for name in "ab")
    for each in (receiver, other):
        routes[each.name] = each.receive
        each.poll()
        assert each.apply().version == 0
    routes["a"] = mock.Mock(side_effect=OSError("no route"))
    change(model, 0, 0.5)
    with pytest.raises(OSError, match="no route"):
        sender.publish()
    routes["a"] = receiver.receive
    assert (sender.version, receiver.apply(), other.apply().version) == (1, None, 1)
    change(model, 1, 0.5)
    assert sender.publish() == 2
    assert receiver.apply() is None
    receiver.poll()
    assert receiver.apply().version == 2
    check_has(receiver.weights, model)


def test_errors_in_the_midst_of_a_version(alone):
    """If the sender or the receiver fails, no receiver has half a version, and the next one is complete."""
    model = fully_shard(nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20)))
    with small_messages():
        sender, receiver, _ = pair(model, history_bytes=10**6)
        change(model, 0, 1)
        found = _codec.encode_changes(0, torch.ones(2), torch.zeros(2))
        with mock.patch.object(_codec, "encode_changes", side_effect=[found, MemoryError]), pytest.raises(MemoryError):
            sender.publish()
        assert (sender.version, receiver.apply()) == (1, None)
        change(model, 1, 0.1)
        sender.publish()
        receiver.poll()
        assert receiver.apply().version == 2
        check_has(receiver.weights, model)
    change(model, 2, 0.5)
    sender.publish()
    with mock.patch.object(_codec, "nearest", side_effect=MemoryError), pytest.raises(MemoryError):
        receiver.apply()
    assert (receiver.version, receiver.apply()) == (None, None)  # everything is sent again
    receiver.poll()
    assert (receiver.apply().version, receiver.version) == (3, 3)
    check_has(receiver.weights, model)


@ranks(2)
def test_memory(ctx) -> None:
    """A training rank holds at most twice the bytes of its float32 shard, and a receiver those of its weights."""
    model = fully_shard(nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)]), process_group=ctx.group)
    shard_nbytes = sum(p.nbytes for p in model.parameters())
    mail, held = list[bytes](), MemoryWatch()
    with small_messages(2**11, 2**14):
        with held:
            sender = Sender(model, lambda *each: None, dtype=torch.bfloat16, process_group=ctx.group)
        targets = [Target(f"{i}.weight", torch.zeros(256, 256).bfloat16()) for i in range(6)]
        Receiver(targets, lambda rank, message: mail.append(message)).poll()
        sender.receive(mail.pop())
        room = shard_nbytes - held.now()
        assert room > 0.45 * shard_nbytes
        for step, share in enumerate([0.5, 1.0, 0.3, 0.3]):
            change(model, step, share)
            with held:
                sender.publish()
            assert sender.history_nbytes <= room
    assert sender.history_nbytes > room / 3
    assert held.peak + room < shard_nbytes + 64 * 2**11


def test_a_receiver_that_does_not_apply(alone):
    """It holds at most as many bytes as its weights have, and gets the rest later."""
    model = fully_shard(nn.Linear(1000, 1000, bias=False))
    sender, receiver, _ = pair(model, dtype=torch.bfloat16, history_bytes=10**7)
    with mock.patch.object(_receiver, "_SLACK", 0):
        for step in range(4):
            change(model, step, 0.7)
            sender.publish()
            assert receiver.held_nbytes <= 2_000_000
        assert receiver.held_nbytes > 1_000_000
        for version in range(1, 5):
            receiver.poll()  # dropped versions are sent again, and all but the first are dropped again
            assert receiver.held_nbytes <= 2_000_000
            assert receiver.apply().version == version
    assert receiver.held_nbytes == 0
    check_has(receiver.weights, model, torch.bfloat16)


def test_an_engine_that_loads_whole_tensors(alone):
    """The engine gets each tensor that a version changes, and after a failure also those that it missed."""
    model = fully_shard(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)))
    loaded: list[dict[str, Tensor]] = []
    fails = False

    def load_weights(weights: Iterable[tuple[str, Tensor]]) -> None:
        loaded.append({})
        for name, tensor in weights:
            loaded[-1][name] = tensor.clone()
            if fails:
                raise RuntimeError("out of memory")

    sender = Sender(model, lambda name, message: weights.receiver.receive(message), dtype=torch.bfloat16)
    weights = EngineWeights(load_weights, lambda rank, message: sender.receive(message))
    assert weights.update() is None
    weights.receiver.poll()
    assert weights.update() == 0
    assert list(loaded[0]) == [n for n, _ in model.named_parameters()]
    for layer in (0, 2):
        with torch.no_grad():
            model[layer].bias.add_(1)
        sender.publish()
        fails = layer == 0
        with pytest.raises(RuntimeError, match="out of memory") if fails else contextlib.nullcontext():
            weights.update()
    assert [list(each) for each in loaded[1:]] == [["0.bias"], ["0.bias", "2.bias"]]
    assert weights.update() == 2
    assert len(loaded) == 3  # unchanged since
    check_has({**loaded[0], **loaded[2]}, model, torch.bfloat16)


REFUSED: list[tuple[Any, str]] = [
    ({"wait": torch.zeros(3)}, "of what is asked for of 'wait'. Its module has 'weight', 'bias'"),
    ({"weight": torch.zeros(3, 4)}, "'weight' has shape (2, 3) at the sender, and elements (0, 0) to (3, 4)"),
    ({"weight": torch.zeros(6)}, "'weight' has shape (2, 3) at the sender, and elements (0,) to (6,)"),
    ({"bias": torch.zeros(2).half()}, "'bias' is sent in float32, and the receiver's tensor is float16: give"),
    ([Target("weight", torch.zeros(2, 2), (0, -1))], "elements (0, -1) to (2, 1)"),
    ([Target("weight", torch.zeros(2, 3), (1,))], "target of 'weight' has shape (2, 3), and its start (1,)"),
    ({}, "no weights are asked for"),
]


def test_what_senders_have_not(alone):
    for weights, message in REFUSED:
        with pytest.raises(ValueError, match=re.escape(message)):
            pair(fully_shard(nn.Linear(3, 2)), weights)


@ranks(2)
def test_whole_weights_for_an_engine_on_one_rank(ctx) -> None:
    """The engine fails after three tensors; ranks stay in step."""
    model = fully_shard(Big(), policy={nn.Linear}, process_group=ctx.group)
    found: list[torch.dtype] = []

    def receive(weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, value in weights:
            found.append(value.dtype)
            if len(found) == 3:
                raise ValueError("engine")

    with pytest.raises(ValueError, match="engine") if ctx.rank == 0 else contextlib.nullcontext():
        sync_weights(model, receive, dtype=torch.bfloat16, on_ranks=[0])
    assert found == [torch.bfloat16] * (3 if ctx.rank == 0 else 0)
    model(torch.ones(1, WIDTH)).sum().backward()


def test_a_sender_of_another_dtype_in_the_place_of_one_that_was_refused(alone):
    model, route = fully_shard(nn.Linear(3, 2)), list[Receiver]()
    senders = [Sender(model, lambda name, message: route[0].receive(message), dtype=d) for d in (None, torch.bfloat16)]
    receiver = Receiver({"bias": torch.zeros(2).bfloat16()}, lambda rank, message: senders[0].receive(message))
    route.append(receiver)
    for ask in (receiver.poll, receiver.apply):
        with pytest.raises(
            ValueError, match=r"'bias' is sent in float32.*give Sender\(\.\.\., dtype=torch\.bfloat16\)"
        ):
            ask()
    del senders[0]
    receiver.poll()
    assert receiver.apply().version == 0


def test_late_messages_of_the_dead(alone):
    """Both sides start anew. A former receiver's requests and answers have no effect on its successor."""
    model, mail = fully_shard(nn.Linear(3, 2)), list[bytes]()

    def start() -> tuple[Sender, Receiver]:
        return Sender(model, lambda name, m: mail.append(m)), Receiver(None, lambda rank, m: mail.append(m))

    sender, dead = start()
    for _ in range(52):
        dead.poll()
        sender.receive(mail.pop())
    *_, late, cells = mail
    dead.receive(late)
    dead.receive(cells)
    assert dead.apply().version == 0
    receipt = mail.pop()
    new_sender, receiver = start()
    receiver.receive(late)
    receiver.poll()
    mail, question = [], mail[-1]
    new_sender.receive(question)
    for message in mail:
        receiver.receive(message)
    assert receiver.apply().version == 0
    receiver.poll()
    sender.receive(mail.pop())  # from an unknown receiver and run
    sender.receive(question)
    sender.receive(receipt)
    kinds = [read_message(message, "").header["kind"] for message in mail[-4:]]
    assert (kinds, sender.versions) == (["hello", "plan", "cells", "hello"], {0: None})


def test_wrong_content(alone):
    """With a valid checksum, it raises ValueError on either side, and changes nothing."""
    sent, asked = list[bytes](), list[bytes]()
    model = fully_shard(nn.Linear(8, 8, bias=False))
    sender = Sender(model, lambda name, message: sent.append(message), dtype=torch.bfloat16, history_bytes=10**6)
    receiver = Receiver(None, lambda rank, message: asked.append(message))
    receiver.poll()
    sender.receive(asked[0])
    plan, cells = (read_message(each, "") for each in sent)
    layout = [["weight", [0, 0], [2**20, 2**20], "float32"]]
    whole = [[[0, [0, 0], [2**20, 2**20]]]]
    wrong: list[tuple[Receiver | Sender, dict[str, Any], bytes]] = [
        (receiver, {**plan.header, "asked": layout, "cells": whole}, b""),  # 4 TiB
        (receiver, {**plan.header, "asked": layout}, b""),
        (receiver, {**plan.header, "cells": [[[0, [0, 4], [8, 8]]]]}, b""),
        (receiver, {**plan.header, "cells": [[[1, [0, 0], [8, 8]]]]}, b""),
        (receiver, {**plan.header, "cells": [[]]}, b""),
        (receiver, {**plan.header, "asked": [["weight", [0, 0], [8, 8], "nn"]]}, b""),
        (receiver, {**plan.header, "ranks": [0, -1]}, b""),
        (receiver, {"kind": "plan"}, b""),
        (receiver, {"kind": []}, b""),
    ]
    for target, header, payload in wrong:
        with pytest.raises(ValueError, match=r"\.receive got a message that no Sender or Receiver of this version"):
            target.receive(message_of(header, [payload]))
    assert repr(receiver) == "Receiver(0, version=None; rank 0 has not answered)"
    for message in sent:
        receiver.receive(message)
    assert receiver.apply().version == 0
    state = read_message(asked[-1], "").header
    update = {**cells.header, "kind": "update", "version": 1, "index": 0, "last": True}
    whole_cell = bytes(cells.payload)
    for kind, header in (("cells", {**cells.header, "version": 1}), ("update", update)):
        for payload in (
            whole_cell[:-1],
            whole_cell[:5],
            whole_cell[:5] + b"\x3f" + whole_cell[6:-2],  # without the last element
            whole_cell + b"\1",
            b"\1" + whole_cell[1:],  # of another cell
            *(whole_cell[:4] + bytes([form]) + whole_cell[5:] for form in (1, 2, 3, 5, 8, 255)),
            b"\0\0\0\0\1\1\0\0\0" + b"\x40" + bytes(2),  # with an element past the last
            b"\0\0\0\0\3\x09\0\0\0" + bytes(8) + b"\1" + bytes(2),
            b"\0\0\0\0\1\1\0\0\0" + b"\xff",
        ):
            with pytest.raises(ValueError, match="that no Sender or Receiver"):
                receiver.receive(message_of(header, [payload]))
        assert (receiver.held_nbytes, receiver.apply()) == (0, None), kind
    for header in ({**state, "bases": [0, 0]}, {**state, "bases": [1]}, {**state, "applied": 1}):
        sender.receive(message_of(header))
        assert (read_message(sent.pop(), "").header["kind"], sender.versions) == ("hello", {0: None})
    for header in (
        {**state, "held": {"1": ["0"]}},
        {**state, "nonce": 3},
        {key: value for key, value in state.items() if key != "asks"},
        {**read_message(asked[0], "").header, "layout": layout},
    ):
        with pytest.raises(ValueError, match="that no Sender or Receiver"):
            sender.receive(message_of(header))
    deep = bytearray(message_of({"kind": ["x" * 10**5]}))
    at = deep.index(b"xxx")
    deep[at - 1 : at + 10**5 + 1] = b"[" * 10**5 + b"  "
    deep[20:28] = _messages._sum(deep)
    with pytest.raises(ValueError, match="its header is no JSON"):
        receiver.receive(deep)
    assert sender.versions == {0: None}
    change(model, 0, 1.0)
    sender.publish()
    sender.receive(asked[-1])
    receiver.receive(sent[-1])
    assert receiver.apply().version == 1
    check_has(receiver.weights, model, torch.bfloat16)


def test_mistakes(alone):
    model = fully_shard(nn.Linear(3, 2))
    sender, receiver, sent = pair(model)
    with pytest.raises(ValueError, match=r"Sender\.receive got what a sender has sent"):
        sender.receive(sent[0])
    with pytest.raises(ValueError, match=r"Receiver\.receive takes messages"):
        receiver.receive(b"something else")
    receiver._send = lambda rank, message: sent.append(message)
    receiver.poll()
    with pytest.raises(ValueError, match=r"Receiver\.receive got what a receiver has sent"):
        receiver.receive(sent[-1])
    with flatshard.summon_full_params(model), pytest.raises(RuntimeError, match="Call it outside"):
        sender.publish()
    sender.forget(0)
    assert (sender.versions, sender.publish()) == ({}, 1)
    receiver._send = lambda rank, message: sender.receive(message)
    receiver.poll()  # learns that it is unknown, and asks again
    hello = sent[-1]
    assert repr(receiver) == "Receiver(0, version=0; rank 0 has not answered)"
    receiver.poll()
    receiver.receive(hello)  # a late message
    assert (sender.versions, receiver.apply().version, sender.versions) == ({0: None}, 1, {0: 1})
