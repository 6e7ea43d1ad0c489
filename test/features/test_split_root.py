"""``policies.SplitRoot``: the model's first and last layers become units instead of belonging to the root."""

import copy
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from checkpointed import CALLS
from clean import check_clean
from expecttest import assert_expected_inline
from models import Block
from on_ranks import ranks
from parity import check_parity, check_same_gradients, twins
from torch import Tensor, nn

from flatshard import BackwardPrefetch, CustomPolicy, ShardingStrategy, describe, fully_shard
from flatshard._base.trace import record_events
from flatshard._composable.find import units_below
from flatshard.policies import SplitRoot

GRAD_OP = ShardingStrategy.SHARD_GRAD_OP
WIDTH, WORDS = 4, 11
SPLIT = SplitRoot({Block})


class Lm(nn.Module):
    """Two embeddings first, norm and head last, and a scale of its own."""

    def __init__(self, tied: bool = False, call: str = "none") -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(5, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.call = CALLS[call]
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = self.call(block, x * self.scale)
        return self.call(self.head, self.norm(x))


class Outer(nn.Module):
    """Like transformers' models, with units two modules deep and the head beside the module around them."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.model = Lm()
        self.model.head = nn.Identity()
        self.drop = nn.Dropout(0.0)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS))
        if tied:
            self.head[1].weight = self.model.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.drop(self.model(tokens)))


class Towers(nn.Sequential):
    """Two rows of blocks, with a norm in between."""

    def __init__(self) -> None:
        rows = nn.Sequential(Block(WIDTH), Block(WIDTH)), nn.Sequential(Block(WIDTH))
        super().__init__(nn.Linear(WIDTH, WIDTH), rows[0], nn.LayerNorm(WIDTH), rows[1], nn.Linear(WIDTH, 2))


def cases() -> Iterator[tuple[str, nn.Module, SplitRoot]]:
    yield "plain", Lm(), SPLIT
    yield "tied", Lm(tied=True), SPLIT
    yield "further in", Outer(), SPLIT
    yield "between", Towers(), SPLIT
    model = Lm()
    model.alone = nn.ParameterList([nn.Parameter(torch.ones(2))])  # the list is never called
    model.more = nn.ModuleList([nn.Linear(2, 2, bias=False)])  # the list is not called either, but its items are
    yield "lists", model, SPLIT
    model = Lm()
    model.alias = model.head.weight
    yield "tied to the root", model, SPLIT
    model = Lm()
    model.blocks[1].alias = model.norm.weight
    yield "tied to a block", model, SPLIT
    model = Lm()
    model.norm.part = model.blocks[0].linear
    yield "has a part of a block", model, SPLIT
    model = Lm()
    model.pair = nn.Sequential(model.head)
    yield "in two modules", model, SPLIT
    model = Lm()
    yield "a group of the user's", model, SplitRoot({Block, (model.places, model.norm)})
    model = Lm()
    for module in (*model.blocks, model.places):
        fully_shard(module)
    yield "units of earlier calls", model, SplitRoot(None)


def test_units(world):
    world(2)
    lines = list[str]()  # all units of the first case, changed units of the others
    for case, model, policy in cases():
        fully_shard(model, policy=policy)
        names = {p: name for name, p in model.named_parameters()}
        lines.append(f"{case}:")
        for unit in units_below(model):
            has = [name for flat in unit.handle.flats for p in flat.params if ".linear." not in (name := names[p])]
            uses = [f"({each.fqn or '<root>'})" for each in unit.needs[1:]]
            line = " ".join([f"  {unit.fqn or '<root>'} |", *has, *uses])
            if (not isinstance(unit.module, Block) or uses) and line not in lines[:4]:
                lines.append(line)
    assert_expected_inline(
        "\n".join(lines),
        """\
plain:
  <root> | scale
  words, places | words.weight places.weight
  norm, head | norm.weight norm.bias head.weight
tied:
  norm, head | norm.weight norm.bias (words, places)
further in:
  <root> | model.scale
  model.words, model.places | model.words.weight model.places.weight
  model.norm, head | model.norm.weight model.norm.bias head.0.weight head.0.bias head.1.weight head.1.bias
between:
  <root> |
  0 | 0.weight 0.bias
  2 | 2.weight 2.bias
  4 | 4.weight 4.bias
lists:
  <root> | scale alone.0
  norm, head, more.0 | norm.weight norm.bias head.weight more.0.weight
tied to the root:
  <root> | scale alias
  norm, head | norm.weight norm.bias (<root>)
tied to a block:
  <root> | scale blocks.1.alias
  blocks.1 | (<root>)
  norm, head | norm.bias head.weight (<root>)
has a part of a block:
  <root> | scale norm.weight norm.bias
  blocks.0 | (<root>)
  head | head.weight
in two modules:
  <root> | scale head.weight
  norm | norm.weight norm.bias
a group of the user's:
  words | words.weight
  places, norm | places.weight norm.weight norm.bias
  head | head.weight
units of earlier calls:
  words | words.weight
  places | places.weight""",
    )


def test_options(world):
    """The new units get the root's options, even if a policy sets them."""
    world(2)
    model = Lm()
    chosen = CustomPolicy(lambda m: {"strategy": GRAD_OP} if m is model else isinstance(m, Block))
    fully_shard(model, policy=SplitRoot(chosen))
    found = {u.fqn for u in describe(model).units if u.strategy == GRAD_OP.name}
    assert found == {"", "words, places", "norm, head"}


def tokens(step: int, n: int) -> Tensor:
    return torch.randint(0, WORDS, (n, 5))


def split(model: nn.Module, group: Any, **options: Any) -> nn.Module:
    return fully_shard(model, policy=SPLIT, process_group=group, **options)


@ranks(2)
def test_parity(ctx):
    """Options that decide when units are gathered give equal parameters. Otherwise, such a unit is like any group."""
    post, never = BackwardPrefetch.BACKWARD_POST, {"backward_prefetch": None, "forward_prefetch": False}
    for make, options in (
        (lambda: Lm(tied=True, call="reentrant"), {"backward_prefetch": post, "static_buffers": True}),
        (lambda: Lm(tied=True), {"strategy": GRAD_OP}),
        (lambda: Lm(call="non-reentrant"), {"reshard_after_forward": True}),
        (lambda: Outer(tied=True), never),
    ):
        ctx.note(str(options))
        run = check_parity(ctx, make, tokens, steps=2, shard=functools.partial(split, **options))
        check_clean(run.sharded)


def test_collectives_and_what_is_unsharded(world):
    """Each unit except the root is gathered twice, a tied one again for the head. All are free while a block runs."""
    world(2)
    for tied in (False, True):
        model = split(Lm(tied), None)
        x = tokens(0, 2)
        model(x).sum().backward()
        seen: list[Any] = []
        look = model.blocks[1].linear.register_forward_hook(lambda *_, m=model, to=seen: to.append(describe(m).units))
        with look, record_events() as events:
            model(x).sum().backward()
        unsharded = {u.fqn for u in seen[0] if u.state != "sharded"}
        assert unsharded == {"", "blocks.1", "blocks.2"}  # the last one is prefetched
        counts = Counter(tuple(event.split(" ", 1)) for event in events)
        gathers = {u.fqn or "<root>": 1 + bool(u.fqn) for u in seen[0]} | {"words, places": 2 + tied}
        assert {fqn: n for (verb, fqn), n in counts.items() if verb == "all-gather"} == gathers
        assert {fqn: n for (verb, fqn), n in counts.items() if verb == "reduce-scatter"} == dict.fromkeys(gathers, 1)


class Fused(Lm):
    """Reads its head's weight in the loss."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return (self.norm(x) @ self.head.weight.T).logsumexp(-1)


@ranks(2)
def test_a_head_whose_weight_is_read(ctx):
    """The error names the unit and a policy without it, with which the model trains."""
    plain, model = twins(ctx, Fused, SPLIT)
    tokens = torch.arange(6).view(2, 3)
    with pytest.raises(RuntimeError) as caught:
        model(tokens)
    text = str(caught.value)
    assert "'head.weight' is sharded" in text
    assert "Fused.forward computes with it" in text
    assert "policy={Block} in place of SplitRoot({Block})" in text
    model = fully_shard(copy.deepcopy(plain), policy={Block}, process_group=ctx.group)
    for m in (plain, model):
        m(tokens).sum().backward()
    check_same_gradients(model, plain)
