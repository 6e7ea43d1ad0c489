"""Patches: changed elements by their numbers in the full parameter, of all ranks' messages, and at which cost."""

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_ranks import ranks
from parity import everybody
from saving import CommunicationWatch, layers, make, on_four, shard, train
from torch import Tensor, nn

import flatshard
from flatshard import fully_shard
from flatshard.checkpoint import full_state_dict
from flatshard.checkpoint._boxes import Part
from flatshard.weights import Patch, PatchSource, apply_patches, decode_patches
from flatshard.weights._gaps import bits, differ
from flatshard.weights._patches import split_changes
from flatshard.weights._sent import PlacedPart


def copies(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return an engine's tensors, each parameter by its first name."""
    full = full_state_dict(model, dtype=dtype)
    return {name: full[name].clone() for name, _ in model.named_parameters()}


def change(model: nn.Module, seed: int, share: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            chosen = torch.rand(p.shape, generator=generator) < share
            if flatshard.tensors.shard_info(p) is not None and p.numel():
                p.copy_(torch.where(chosen, torch.randn(p.shape, generator=generator).to(p.dtype), p))


def check_has(engine: dict[str, Tensor], model: nn.Module, dtype: torch.dtype | None = None) -> None:
    expected = full_state_dict(model, dtype=dtype)
    for name, value in engine.items():
        assert value.dtype is expected[name].dtype
        assert torch.equal(bits(value.reshape(-1)), bits(expected[name].reshape(-1))), name


def follow(ctx: Any, model: nn.Module, dtype: torch.dtype | None, steps: list[Callable[[], object]]) -> None:
    """Let an engine on every rank follow the model after each step."""
    engine = copies(model, dtype)
    with CommunicationWatch() as watch:
        source = PatchSource(model, dtype=dtype)
    assert decode_patches(everybody(ctx, source.encode_changes())) == []
    for step in steps:
        step()
        with watch:
            message = source.encode_changes()
        patches = decode_patches(reversed(everybody(ctx, message)))
        assert patches
        for patch in patches:
            assert patch.indices.dtype is torch.int32
            assert (patch.indices[1:] > patch.indices[:-1]).all()
        assert len({patch.name for patch in patches}) == len(patches)
        apply_patches(engine, patches)
        check_has(engine, model, dtype)
    assert watch.seen == []


@ranks(1, 3)
def test_an_engine_follows_every_kind_of_parameter(ctx) -> None:
    for dtype, policy in ((torch.bfloat16, {nn.Linear}), (None, None)):
        model = shard(ctx, make(), policy=policy)
        seeds = ((ctx.rank, 0.2), (10 + ctx.rank, 1.0))
        follow(ctx, model, dtype, [functools.partial(change, model, seed, share) for seed, share in seeds])


@ranks(4)
def test_tensor_parallelism_and_replicas(ctx) -> None:
    """Blocks of tensor-parallel ranks are parts of the full parameter, and of two replicas one sends."""
    for how in ("tp", "replicas"):
        model = on_four(ctx, how)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        follow(ctx, model, None, [functools.partial(train, model, optimizer)] * 2)


@pytest.fixture
def alone(world: Callable[[int], None]) -> None:
    world(1)


@pytest.mark.parametrize(
    ("dtype", "share", "most"), [(torch.bfloat16, 0.01, 1.7), (torch.float32, 0.01, 1.35)], ids=str
)
def test_bytes(alone, dtype: torch.dtype, share: float, most: float):
    """At 1 % changed elements, a step's messages have at most 1.7 times the bytes of these. All bytes are counted."""
    model = fully_shard(nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(2))))
    before, source = copies(model, dtype), PatchSource(model, dtype=dtype)
    change(model, 0, share)
    message, after = source.encode_changes(), copies(model, dtype)
    changed = sum(int(differ(after[n].view(-1), t.view(-1)).sum()) * t.itemsize for n, t in before.items())
    assert changed > 0.009 * sum(t.nbytes for t in before.values())
    assert len(message) <= most * changed
    assert sum(patch.values.nbytes for patch in decode_patches([message])) == changed
    assert decode_patches([source.encode_changes()]) == []


@ranks(2)
def test_messages_that_are_not_those_of_a_step(ctx) -> None:
    """Damaged, missing, doubled and old messages raise, and the error names a weight."""
    model = fully_shard(layers(), process_group=ctx.group)
    source = PatchSource(model)
    steps = []
    for seed in range(2):
        change(model, seed + 2 * ctx.rank, 0.3)
        steps.append(everybody(ctx, source.encode_changes()))
    (old, _), (first, second) = steps
    names = {name for name, _ in model.named_parameters()}

    def refused(*messages: bytes, match: str = "") -> None:
        with pytest.raises(ValueError, match=match or "|".join(map(re.escape, names))):
            decode_patches(messages)

    refused(first[:-1], second)
    refused(first[:-1] + bytes([first[-1] ^ 1]), second)
    refused(first)
    refused(first, second, second)
    refused(old, second, match=r"of steps \[1, 2\]")
    # The header is damaged, so no weight is known.
    for end in (0, 5, 40):
        refused(first[:end], second, match="a message is damaged")
    refused(first[:40] + bytes([first[40] ^ 1]) + first[41:], second, match="a message is damaged")
    generator = torch.Generator().manual_seed(ctx.rank)
    for at in torch.randint(8, len(first), (40,), generator=generator).tolist():
        refused(
            first[:at] + bytes([first[at] ^ 4]) + first[at + 1 :], second, match="damaged|a message ends|takes messages"
        )
    assert decode_patches([first, second])


@pytest.mark.parametrize(
    ("patch", "why"),
    [
        (Patch("other", (4,), torch.tensor([0]), torch.ones(1)), "none of the weights"),
        (Patch("w", (4,), torch.tensor([0]), torch.ones(1)), "of shape"),
        (Patch("w", (2, 3), torch.tensor([0]), torch.ones(1).bfloat16()), "is torch.float32"),
        (Patch("w", (2, 3), torch.tensor([0, 1]), torch.ones(1)), "for values of shape"),
        (Patch("w", (2, 3), torch.tensor([0.0]), torch.ones(1)), "torch.float32 indices"),
        (Patch("w", (2, 3), torch.tensor([6]), torch.ones(1)), "elements 6 to 6, and has 6"),
        (Patch("w", (2, 3), torch.tensor([-1]), torch.ones(1)), "elements -1 to -1"),
        (Patch("w", (2, 3), torch.tensor([1, 1]), torch.ones(2)), "an element twice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_patches_that_do_not_fit(patch: Patch, why: str):
    """A patch that does not fit raises with the weight's name, and no other patch is written."""
    weights = {"w": torch.zeros(3, 2).t()}
    good = Patch("w", (2, 3), torch.tensor([1, 5]), torch.tensor([1.0, 2.0]))
    with pytest.raises(ValueError, match=f"{patch.name!r} .*{re.escape(why)}"):
        apply_patches(weights, [good, patch])
    assert not weights["w"].any()
    apply_patches(weights, [good])
    assert weights["w"].tolist() == [[0, 1, 0], [0, 0, 2]]


def test_numbers_of_elements_have_32_bits_if_all_fit():
    for numel, dtype in ((2**31, torch.int32), (2**31 + 1, torch.int64)):
        last = PlacedPart(("w",), 0, Part.of_whole((numel,), (1,), numel - 2, numel))
        ((_, _, numbers),) = split_changes([last], None, 2)
        assert (numbers.dtype, numbers.tolist()) == (dtype, [numel - 2, numel - 1])
    assert not [*split_changes([], None, 2)]  # of elements that have no place
