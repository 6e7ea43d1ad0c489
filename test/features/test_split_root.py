"""``policies.SplitRoot``: what the beginning and the end of a model need are units, in place of the outermost one."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from checkpointed import CALLS
from clean import check_clean
from expecttest import assert_expected_inline
from models import Block
from on_ranks import ranks
from parity import check_parity
from torch import Tensor, nn

import flatshard
from flatshard import BackwardPrefetch, CustomPolicy, ShardingStrategy, fully_shard
from flatshard._composable.find import units_below
from flatshard._trace import record_events
from flatshard.policies import SplitRoot

GRAD_OP = ShardingStrategy.SHARD_GRAD_OP
WIDTH, WORDS = 4, 11
SPLIT = SplitRoot({Block})


class Lm(nn.Module):
    """Two embeddings at the beginning, norm and head at the end; a scale is its own."""

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
    """As in transformers: the units are two modules further in, and the head is beside what is around them."""

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


class Towers(nn.Module):
    """Two rows of blocks, and something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.first = nn.Linear(WIDTH, WIDTH), nn.Sequential(Block(WIDTH), Block(WIDTH))
        self.between, self.second = nn.LayerNorm(WIDTH), nn.Sequential(Block(WIDTH))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.between(self.first(self.front(x)))))


def lists(model: Lm) -> None:
    model.alone = nn.ParameterList([nn.Parameter(torch.ones(2))])  # it is not called
    model.more = nn.ModuleList([nn.Linear(2, 2, bias=False)])  # nor is this, but its items are


def earlier_calls(model: Lm) -> None:
    for module in (*model.blocks, model.places):
        fully_shard(module)


def change(name: str, value: Callable[[Lm], Any]) -> Callable[[Lm], None]:
    """Sets an attribute of the module of this name."""
    path, _, last = name.rpartition(".")
    return lambda model: setattr(model.get_submodule(path), last, value(model))


MADE: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], object] | None, Callable[[Any], SplitRoot]]] = {
    "plain": (Lm, None, lambda m: SPLIT),
    "tied": (lambda: Lm(tied=True), None, lambda m: SPLIT),
    "further in": (Outer, None, lambda m: SPLIT),
    "between": (Towers, None, lambda m: SPLIT),
    "lists": (Lm, lists, lambda m: SPLIT),
    "tied to the root": (Lm, change("alias", lambda m: m.head.weight), lambda m: SPLIT),
    "tied to a block": (Lm, change("blocks.1.alias", lambda m: m.norm.weight), lambda m: SPLIT),
    "has a part of a block": (Lm, change("norm.part", lambda m: m.blocks[0].linear), lambda m: SPLIT),
    "in two modules": (Lm, change("pair", lambda m: nn.Sequential(m.head)), lambda m: SPLIT),
    "a group of the user's": (Lm, None, lambda m: SplitRoot({Block, (m.places, m.norm)})),
    "units of earlier calls": (Lm, earlier_calls, lambda m: SplitRoot(None)),
}


def test_units(world):
    world(2)
    lines = []
    for case, (make, prepare, policy) in MADE.items():
        model = make()
        if prepare is not None:
            prepare(model)
        fully_shard(model, policy=policy(model))
        names = {p: name for name, p in model.named_parameters()}
        lines.append(f"{case}:")
        for unit in units_below(model):
            has = [name for flat in unit.handle.flats for p in flat.params if ".linear." not in (name := names[p])]
            uses = [f"({each.fqn or '<root>'})" for each in unit.needs[1:]]
            if not isinstance(unit.module, Block) or uses:
                lines.append(" ".join([f"  {unit.fqn or '<root>'} |", *has, *uses]))
    assert_expected_inline(
        "\n".join(lines),
        """\
plain:
  <root> | scale
  words, places | words.weight places.weight
  norm, head | norm.weight norm.bias head.weight
tied:
  <root> | scale
  words, places | words.weight places.weight
  norm, head | norm.weight norm.bias (words, places)
further in:
  <root> | model.scale
  model.words, model.places | model.words.weight model.places.weight
  model.norm, head | model.norm.weight model.norm.bias head.0.weight head.0.bias head.1.weight head.1.bias
between:
  <root> |
  front | front.weight front.bias
  between | between.weight between.bias
  head | head.weight head.bias
lists:
  <root> | scale alone.0
  words, places | words.weight places.weight
  norm, head, more.0 | norm.weight norm.bias head.weight more.0.weight
tied to the root:
  <root> | scale alias
  words, places | words.weight places.weight
  norm, head | norm.weight norm.bias (<root>)
tied to a block:
  <root> | scale blocks.1.alias
  words, places | words.weight places.weight
  blocks.1 | (<root>)
  norm, head | norm.bias head.weight (<root>)
has a part of a block:
  <root> | scale norm.weight norm.bias
  words, places | words.weight places.weight
  blocks.0 | (<root>)
  head | head.weight
in two modules:
  <root> | scale head.weight
  words, places | words.weight places.weight
  norm | norm.weight norm.bias
a group of the user's:
  <root> | scale
  words | words.weight
  places, norm | places.weight norm.weight norm.bias
  head | head.weight
units of earlier calls:
  <root> | scale
  words | words.weight
  places | places.weight
  norm, head | norm.weight norm.bias head.weight""",
    )


def test_options(world):
    """They are those of the outermost unit, a policy's own for it, too."""
    world(2)
    model = Lm()
    chosen = CustomPolicy(lambda m: {"strategy": GRAD_OP} if m is model else isinstance(m, Block))
    fully_shard(model, policy=SplitRoot(chosen))
    strategies = {u.fqn: u.config.strategy for u in units_below(model)}
    assert {fqn for fqn, strategy in strategies.items() if strategy is GRAD_OP} == {"", "words, places", "norm, head"}
    plan = flatshard.plan(Lm(), policy=SPLIT, world_size=4, device="cpu", compare=False)
    assert [unit.fqn for unit in plan.units] == ["", "words, places", *(f"blocks.{i}" for i in range(3)), "norm, head"]


def tokens(step: int, n: int) -> Tensor:
    return torch.randint(0, WORDS, (n, 5))


def vectors(step: int, n: int) -> Tensor:
    return torch.randn(n, WIDTH)


PARITY: list[tuple[Callable[[], nn.Module], dict[str, Any]]] = [
    (lambda: Lm(tied=True), {"backward_prefetch": None, "forward_prefetch": False}),
    (lambda: Lm(tied=True), {"backward_prefetch": BackwardPrefetch.BACKWARD_POST, "static_buffers": True}),
    (lambda: Lm(tied=True), {"strategy": GRAD_OP}),
    (lambda: Lm(tied=True, call="reentrant"), {}),
    (lambda: Lm(call="non-reentrant"), {"reshard_after_forward": True}),
    (lambda: Outer(tied=True), {}),
    (Towers, {"forward_prefetch": False}),
]


@ranks(2)
def test_parity(ctx):
    for number, (make, options) in enumerate(PARITY):
        ctx.note(f"{number} {options}")
        make_input = vectors if make is Towers else tokens
        shard = functools.partial(split, **options)
        check_clean(check_parity(ctx, make, make_input, steps=2, shard=shard).sharded)


def split(model: nn.Module, group: Any, **options: Any) -> nn.Module:
    return fully_shard(model, policy=SPLIT, process_group=group, **options)


def test_collectives_and_what_is_unsharded(world):
    """Units but the outermost are gathered twice; a tied one once more, for the head. They are free while a block runs."""
    world(2)
    for tied in (False, True):
        model = split(Lm(tied), None)
        x = tokens(0, 2)
        model(x).sum().backward()
        units = units_below(model)
        unsharded: dict[str, int] = {}

        def note(module: nn.Module, *_: Any, units: Any = units, unsharded: Any = unsharded) -> None:
            unsharded.update({u.fqn: 1 for u in units if not u.handle.is_sharded})

        model.blocks[1].linear.register_forward_hook(note)
        with record_events() as events:
            model(x).sum().backward()
        assert unsharded.keys() == {"", "blocks.1", "blocks.2"}  # the last one is gathered ahead
        counts = Counter(tuple(event.split(" ", 1)) for event in events)
        gathers = {u.fqn or "<root>": 2 - (u is units[0]) for u in units} | {"words, places": 2 + tied}
        assert {fqn: n for (verb, fqn), n in counts.items() if verb == "all-gather"} == gathers
        assert {fqn: n for (verb, fqn), n in counts.items() if verb == "reduce-scatter"} == dict.fromkeys(gathers, 1)
