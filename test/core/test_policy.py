"""Which submodules become units, by every kind of policy, and which unit owns which parameter.

Everything here is decided before the first collective, so one process with the fake process group is enough.
"""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
from models import Mlp
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch as TorchPrefetch
from torch.distributed.fsdp import ShardingStrategy as TorchStrategy
from torch.distributed.fsdp import wrap as torch_wrap

import flatshard
from flatshard import BackwardPrefetch, CustomPolicy, ShardingStrategy, describe, fully_shard
from flatshard._composable.find import units_below
from flatshard._composable.state import unit_of
from flatshard.policies import ModuleWrapPolicy, find_blocks


@pytest.fixture(autouse=True)
def _four_ranks(world) -> None:
    """This process is the first; nobody else is there."""
    world(4)


class Block(Mlp):
    def __init__(self, width: int = 8):
        super().__init__(width)


class Wide(Block):
    """A subclass, which a policy on ``Block`` selects too."""


class Parts(nn.Module):
    """What its forward does, does not matter here."""

    def forward(self, x):
        raise NotImplementedError


class Net(Parts):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Block(), Wide(), Block()])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11)


def by_unit(module: nn.Module, value) -> dict:
    """``value(unit)`` for each unit, by the name that its module has in ``module``; in module order."""
    names = {m: n for n, m in module.named_modules()}
    return {names[unit.module]: value(unit) for unit in units_below(module)}


def owned(module: nn.Module) -> dict[str, list[str]]:
    """The names of the parameters that each unit owns."""
    names = {p: n for n, p in module.named_parameters()}
    return by_unit(module, lambda u: [names[p] for flat in u.handle.flats for p in flat.params])


def units(module: nn.Module) -> list[str]:
    return list(owned(module))


def configs(module: nn.Module) -> dict[str, tuple[ShardingStrategy, BackwardPrefetch | None, bool]]:
    return by_unit(module, lambda u: (u.config.strategy, u.config.backward_prefetch, u.config.forward_prefetch))


BLOCKS = ["", "blocks.0", "blocks.1", "blocks.2"]

# -- every kind of policy ----------------------------------------------------------------------------------------------

OURS, THEIRS = flatshard.policies, torch_wrap
BY_CLASS = {
    "class": Block,
    "set": {Block},
    "frozenset": frozenset({Block}),
    "list": [Block],
    "tuple": (Block,),
    "classes that occur or not": {Block, nn.Conv2d},
    "ModuleWrapPolicy": ModuleWrapPolicy({Block}),
    "ModuleWrapPolicy of a list": ModuleWrapPolicy([Block]),
    "torch's ModuleWrapPolicy": torch_wrap.ModuleWrapPolicy({Block}),
    "function": CustomPolicy(lambda m: isinstance(m, Block)),
    "torch's CustomPolicy": torch_wrap.CustomPolicy(lambda m: isinstance(m, Block)),
    "lambda": functools.partial(OURS.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, Block)),
    "torch's lambda": functools.partial(THEIRS.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, Block)),
    "transformer": functools.partial(OURS.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "torch's transformer": functools.partial(THEIRS.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "or": functools.partial(torch_wrap._or_policy, policies=[torch_wrap.ModuleWrapPolicy({Block})]),
    "callable": lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, Block),
    "with a default": lambda module, recurse, nonwrapped_numel, kind=Block: recurse or isinstance(module, kind),
    "callable with kwargs": lambda **kwargs: kwargs["recurse"] or isinstance(kwargs["module"], Block),
    "callable ModuleWrapPolicy": ModuleWrapPolicy({Block}).__call__,
}


def test_kinds_of_policy_that_mean_the_same():
    """A subclass of a sought class is selected too, as by isinstance. Names, order and classes are kept."""
    plain = Net()
    assert units(fully_shard(Net(), policy=None)) == [""]
    for kind, policy in BY_CLASS.items():
        model = Net()
        assert fully_shard(model, policy=policy) is model
        assert units(model) == BLOCKS, kind
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
        assert [(n, type(m)) for n, m in model.named_modules()] == [(n, type(m)) for n, m in plain.named_modules()]


# -- callables: FSDP1's own recursion is the oracle --------------------------------------------------------------------


class Wrapper(nn.Module):
    """What FSDP1's recursion wraps a unit in; here it only marks it."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.wrapped = module


def fsdp1_units(root: nn.Module, policy, ignored_modules=(), ignored_params=()) -> list[str]:
    """The FQNs of the units that FSDP1's recursion makes of ``root``, which it changes.

    But for ``out_proj`` of attention, of which FSDP1 makes a unit that is never called: its model then fails.
    """
    names = {m: n for n, m in root.named_modules()}
    torch_wrap._recursive_wrap(
        root, policy, Wrapper, set(ignored_modules), set(ignored_params), only_wrap_children=True
    )
    chosen = [names[m.wrapped] for m in root.modules() if isinstance(m, Wrapper)]
    return ["", *(name for name in chosen if not name.endswith("out_proj"))]


class Tower(Parts):
    """Blocks of very different sizes, containers within containers, attention, parameters on inner modules."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(3, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Block(8)))
        self.levels = nn.ModuleDict({"a": nn.ModuleList([Block(8), Block(16)]), "b": Net()})
        self.attention = nn.MultiheadAttention(16, 2)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32)
        self.bias = nn.Parameter(torch.zeros(700))


SIZES = [{"min_num_params": size} for size in (0, 1, 100, 289, 290, 1000, 3000, 10_000)]
EXCLUSIONS = {
    "min_num_params": 90,
    "force_leaf_modules": {nn.MultiheadAttention, Block},
    "exclude_wrap_modules": {nn.ModuleList, nn.ModuleDict, nn.Embedding, nn.Sequential},
}


@pytest.mark.parametrize("make", [Net, Tower])
@pytest.mark.filterwarnings("ignore:.*matched no submodule")
def test_size_based_policies_choose_what_fsdp1_chooses(make):
    for arguments in (*SIZES, EXCLUSIONS):
        theirs, ours = (functools.partial(m.size_based_auto_wrap_policy, **arguments) for m in (torch_wrap, OURS))
        expected, found = fsdp1_units(make(), theirs), units(fully_shard(make(), policy=ours))
        if arguments["min_num_params"] == 0:  # FSDP1 also wraps what has no parameters, and would do nothing
            assert set(found) <= {n for n in expected if not n or [*make().get_submodule(n).parameters()]}
        else:
            assert found == expected, arguments
        assert units(fully_shard(make(), policy=theirs)) == found or arguments is EXCLUSIONS


@pytest.mark.parametrize("make", [Net, Tower])
@pytest.mark.filterwarnings("ignore:.*matched no submodule")
def test_transformer_policies_choose_what_fsdp1_chooses(make):
    """But for modules all of whose parameters are in inner units."""
    for classes in ({Block}, {nn.Linear}, {Block, nn.Linear}, {nn.Sequential}, {nn.LayerNorm, Net}):
        partial = functools.partial(functools.partial, transformer_layer_cls=classes)
        theirs, ours = (partial(module.transformer_auto_wrap_policy) for module in (torch_wrap, OURS))
        chosen = {name: m for name, m in make().named_modules() if isinstance(m, tuple(classes))}
        inner = {n: {p for i, m in chosen.items() if i.startswith(f"{n}.") for p in m.parameters()} for n in chosen}
        expected = [n for n in fsdp1_units(make(), theirs) if not n or not {*chosen[n].parameters()} <= inner[n]]
        for policy in (theirs, ours, ModuleWrapPolicy(classes)):
            assert units(fully_shard(make(), policy=policy)) == expected, classes


def test_size_based_policies_do_not_count_what_is_ignored():
    """The elements of an ignored module or parameter push nobody over the threshold."""
    theirs = functools.partial(torch_wrap.size_based_auto_wrap_policy, min_num_params=200)
    for pick in (
        lambda m: [m.blocks[0].up],
        lambda m: [m.blocks[0].up.weight, m.blocks[2].down.weight],
        lambda m: [m.blocks[1]],
    ):
        plain, model = Net(), Net()
        params = {p for s in pick(plain) for p in (s.parameters() if isinstance(s, nn.Module) else [s])}
        expected = fsdp1_units(plain, theirs, [s for s in pick(plain) if isinstance(s, nn.Module)], params)
        assert expected != fsdp1_units(Net(), theirs)
        assert units(fully_shard(model, policy=theirs, ignored_states=pick(model))) == expected


def test_size_based_policies_decide_alike_on_all_ranks_where_something_is_sharded_already():
    """The part that a rank holds has another size on another rank: what is sharded counts on none."""
    seen = []

    def policy(module, recurse, nonwrapped_numel):
        seen.append((type(module).__name__, recurse, nonwrapped_numel))
        return recurse or isinstance(module, Block)

    model = Net()
    fully_shard(model.blocks[0])
    fully_shard(model, policy=policy)
    assert units(model) == BLOCKS
    block, whole = (sum(p.numel() for p in m.parameters()) for m in (Block(), Net()))
    assert ("Net", True, whole - block) in seen
    assert ("ModuleList", True, 2 * block) in seen
    assert sum(name == "Block" for name, _, _ in seen) == 2  # once to recurse, once to choose: not asked about blocks.0


# -- overrides of a single unit ----------------------------------------------------------------------------------------

DEFAULTS = (ShardingStrategy.FULL_SHARD, BackwardPrefetch.BACKWARD_PRE, True)
OVERRIDES = [
    ({"strategy": ShardingStrategy.SHARD_GRAD_OP}, (ShardingStrategy.SHARD_GRAD_OP, *DEFAULTS[1:])),
    ({"strategy": TorchStrategy.NO_SHARD}, (ShardingStrategy.NO_SHARD, *DEFAULTS[1:])),
    ({"sharding_strategy": TorchStrategy.SHARD_GRAD_OP}, (ShardingStrategy.SHARD_GRAD_OP, *DEFAULTS[1:])),
    ({"backward_prefetch": BackwardPrefetch.BACKWARD_POST}, (DEFAULTS[0], BackwardPrefetch.BACKWARD_POST, True)),
    ({"backward_prefetch": TorchPrefetch.BACKWARD_POST}, (DEFAULTS[0], BackwardPrefetch.BACKWARD_POST, True)),
    ({"backward_prefetch": None}, (DEFAULTS[0], None, True)),
    ({"mixed_precision": None, "cpu_offload": None, "forward_prefetch": False}, (*DEFAULTS[:2], False)),
]


@pytest.mark.parametrize("kind", [CustomPolicy, torch_wrap.CustomPolicy])
def test_an_override_is_for_that_unit_only(kind):
    for override, expected in OVERRIDES:
        model = Net()
        chosen = model.blocks[1]
        fully_shard(model, policy=kind(lambda m, o=override, c=chosen: o if m is c else isinstance(m, Block)))
        assert configs(model) == {name: expected if name == "blocks.1" else DEFAULTS for name in BLOCKS}
        assert (chosen.up.weight.shape == (16, 8)) is (expected[0] is ShardingStrategy.NO_SHARD)
    # An empty dict is a no, as FSDP1's CustomPolicy has it.
    model = fully_shard(Net(), policy=kind(lambda m: {} if isinstance(m, Block) else isinstance(m, nn.Linear)))
    assert units(model) == ["", *[f"blocks.{i}.{name}" for i in range(3) for name in ("up", "down")], "head"]


def test_all_others_have_the_roots_settings():
    """What the root was given goes to every unit that says nothing else; an override of the root is for the root."""
    model = Net()
    policy = CustomPolicy(lambda m: {"forward_prefetch": True} if m is model.head else isinstance(m, Block))
    options = {"strategy": TorchStrategy.SHARD_GRAD_OP, "backward_prefetch": None, "forward_prefetch": False}
    fully_shard(model, policy=policy, **options)
    given = (ShardingStrategy.SHARD_GRAD_OP, None, False)
    assert configs(model) == {**dict.fromkeys(BLOCKS, given), "head": (*given[:2], True)}
    model = Net()
    fully_shard(model, policy=CustomPolicy(lambda m: {"forward_prefetch": False} if m is model else m is model.head))
    assert configs(model) == {"": (*DEFAULTS[:2], False), "head": DEFAULTS}


# -- policies that are none --------------------------------------------------------------------------------------------


def overriding(**arguments) -> CustomPolicy:
    return CustomPolicy(lambda m: arguments if isinstance(m, Block) else False)


NO_POLICIES: list[tuple[Any, str]] = [
    (
        "Block",
        "policy='Block': the only policy with a name is 'auto'.* For the modules of some classes: policy={Block}",
    ),
    ({"Block"}, "policy: 'Block' is not an nn.Module class"),
    ([Block, None], "policy: None is not an nn.Module class"),
    (int, "policy: <class 'int'> is not an nn.Module class"),
    (set(), "an empty collection of classes selects nothing; pass policy=None"),
    (torch_wrap.ModuleWrapPolicy(set()), "an empty collection of classes selects nothing"),
    (torch_wrap.ModuleWrapPolicy({int}), "<class 'int'> is not an nn.Module class"),
    (CustomPolicy(lambda m: 1), "the CustomPolicy function returned 1 for a Net; it must return True, False, or a"),
    (CustomPolicy(lambda m: None), "returned None for a Net"),
    (torch_wrap.CustomPolicy(lambda m: "yes"), "returned 'yes' for a Net"),
    (Block(), "policy is a Block: pass the class, policy={Block}"),
    (lambda m: True, r"cannot be called as policy\(module=..., recurse=..., non.* use policy=flatshard\.CustomPolicy"),
    (functools.partial(OURS.transformer_auto_wrap_policy), "missing a required argument: 'transformer_layer_cl"),
    (overriding(device_id=3), r"the policy overrides 'device_id' for a Block; it can override \['backward_prefetch', "),
    (overriding(strategy="full"), "the policy's strategy='full' is not one of ShardingStrategy.FULL_SHARD, "),
    (overriding(backward_prefetch="pre"), "backward_prefetch='pre' is not one of BackwardPrefetch.BACKWARD_PRE, "),
]


def test_what_is_no_policy():
    for policy, message in NO_POLICIES:
        model = Net()
        with pytest.raises(ValueError, match=message):
            fully_shard(model, policy=policy)
        assert not units_below(model)
        assert type(model.scale) is nn.Parameter
    for classes in ({"Block"}, set(), {int}, [Block()]):  # ours looks when it is made
        with pytest.raises(ValueError, match=r"is not an nn\.Module class|holds an instance of Block|selects nothing"):
            ModuleWrapPolicy(classes)

    def fails(module, recurse, nonwrapped_numel):
        raise TypeError("mine")

    with pytest.raises(TypeError, match=r"^mine$"):
        fully_shard(Net(), policy=fails)


def test_units_by_name():
    """With the options of each; "" is the module itself."""
    options = {"backward_prefetch": None}
    model = fully_shard(Net(), policy={"blocks.1": {}, "head": options, "": {"forward_prefetch": False}})
    full, pre = ShardingStrategy.FULL_SHARD, BackwardPrefetch.BACKWARD_PRE
    assert configs(model) == {"": (full, pre, False), "blocks.1": (full, pre, True), "head": (full, None, True)}
    model = Net()
    for policy, message in (
        ({"blocks.3": {}}, "the policy names 'blocks.3', and Net has no such module. Its modules: .*'blocks.2'"),
        ({"blocks.0": {}}, "and Net has it, but it is ignored or sharded already"),
        ({"head": True}, "the policy has True for 'head': it must be a dict of arguments"),
        ({"head": {"color": 1}}, "the policy overrides 'color' for a Linear"),
    ):
        with pytest.raises(ValueError, match=message):
            fully_shard(model, policy=policy, ignored_states=[model.blocks[0]])


class Stage(Parts):
    """Layers of one width, each with two experts."""

    def __init__(self, width: int, count: int):
        super().__init__()
        self.layers = nn.Sequential(*[Layer(width) for _ in range(count)])


class Layer(Parts):
    def __init__(self, width: int):
        super().__init__()
        self.experts = nn.ModuleList([Block(width), Block(width)])


def staged(*widths: int, count: int = 3) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), *[Stage(width, count) for width in widths])
    model.add_module("head", nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    return model


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Net, ["blocks.0", "blocks.2"]),  # `Wide` is another class
        (
            lambda: staged(8, 16, count=2),
            [f"{s}.layers.{i}" for s in (1, 2) for i in (0, 1)],
        ),  # not experts, not stages
        (lambda: staged(8, 8), ["1", "2"]),  # stages that are alike
        (lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]), ["0", "1", "2"]),
        (lambda: nn.Sequential(nn.Linear(4, 4), Block()), []),
    ],
)
def test_repeated_blocks(make, expected):
    model = make()
    assert list(find_blocks(model)) == expected
    if expected:
        assert units(fully_shard(model, policy="auto")) == ["", *expected]
        assert find_blocks(model) == {}
    else:
        with pytest.warns(
            UserWarning, match="policy='auto', which looks for blocks that are repeated, matched no submodule"
        ):
            fully_shard(model, policy="auto")


def test_a_policy_that_matches_nothing_warns_with_what_it_sought_and_what_there_is():
    for policy, sought in (
        ({nn.Conv2d}, "the policy's classes 'Conv2d' matched"),
        (torch_wrap.ModuleWrapPolicy([nn.Conv2d]), "the policy's classes 'Conv2d' matched"),
        (CustomPolicy(lambda m: False), "the policy's function matched"),
        (lambda module, recurse, nonwrapped_numel: recurse, "the policy's condition matched"),
    ):
        with pytest.warns(UserWarning, match="matched no submodule") as caught:
            model = fully_shard(Net(), policy=policy)
        (warning,) = caught
        assert sought in str(warning.message)
        assert "'Block', 'Embedding', 'LayerNorm', 'Linear', 'ModuleList', 'Net', 'Wide'" in str(warning.message)
        assert warning.filename == __file__  # the line to change is the caller's
        assert units(model) == [""]
    for policy in (None, {Block}, {Net}):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fully_shard(Net(), policy=policy)


# -- who owns what -----------------------------------------------------------------------------------------------------


def nested() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4)),
        nn.Linear(4, 4),
        nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(4, 4, bias=False)))),
    )


class Tied(Parts):
    """``head`` is tied to ``embed``; both are children of the root."""

    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(11, 8), Block(), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight


class Pair(Parts):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.right.weight = self.left.weight


class Parent(Parts):
    """Registers its child's weight as its own too."""

    def __init__(self):
        super().__init__()
        self.child = nn.Linear(4, 4)
        self.weight = self.child.weight


class Shared(Parts):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.own = inner, nn.Linear(8, 8, bias=False)


def sharing() -> nn.Module:
    inner = nn.Linear(8, 8, bias=False)
    return nn.Sequential(Shared(inner), Shared(inner))


def twice() -> nn.Module:
    pair = Pair()
    return nn.Sequential(pair, nn.Linear(4, 4), pair)


def aliased() -> nn.Module:
    model = nn.Linear(4, 4)
    model.alias = model.weight
    return model


OWNERS: dict[str, tuple[Any, Any, str]] = {
    "the root owns the leftovers": (
        Net,
        {Wide, nn.LayerNorm},
        "root: scale embed.weight blocks.0.up.weight blocks.0.up.bias blocks.0.down.weight blocks.0.down.bias "
        "blocks.2.up.weight blocks.2.up.bias blocks.2.down.weight blocks.2.down.bias head.weight head.bias | "
        "blocks.1: up.weight up.bias down.weight down.bias | norm: weight bias",
    ),
    "inner containers own theirs, outer ones the rest, and what would own nothing is no unit": (
        nested,
        {nn.Sequential},
        "root: 1.weight 1.bias | 0: 0.weight 0.bias 2.weight 2.bias | "
        "0.1: 0.weight 0.bias 1.weight 1.bias | 2.0.0: 0.weight",
    ),
    "a parameter of two siblings goes to the root once; they stay units, so that each can be called alone": (
        Tied,
        {nn.Embedding, nn.Linear, Block},
        "root: embed.weight | embed: of root | body.up: weight bias | body.down: weight bias | head: of root",
    ),
    "the lowest common ancestor that is a unit": (
        lambda: nn.Sequential(Pair(), Pair()),
        {Pair, nn.Linear},
        "root: | 0: left.weight | 0.left: bias of 0 | 0.right: bias of 0 | "
        "1: left.weight | 1.left: bias of 1 | 1.right: bias of 1",
    ),
    "where the pair is no unit, the next one up": (
        lambda: nn.Sequential(Pair()),
        {nn.Linear},
        "root: 0.left.weight | 0.left: bias of root | 0.right: bias of root",
    ),
    "of parent and child: the parent, under the first name": (
        lambda: nn.Sequential(Parent(), Parent()),
        {Parent, nn.Linear},
        "root: | 0: weight | 0.child: bias of 0 | 1: weight | 1.child: bias of 1",
    ),
    "of a module in two units: their common ancestor": (
        sharing,
        {Shared},
        "root: 0.inner.weight | 0: own.weight of root | 1: own.weight of root",
    ),
    "as a unit, it keeps its parameters": (
        sharing,
        {Shared, nn.Linear},
        "root: | 0.inner: weight | 0.own: weight | 1.own: weight",
    ),
    "a module that is there twice": (twice, {Pair}, "root: 1.weight 1.bias | 0: left.weight left.bias right.bias"),
    "a parameter with two names": (aliased, None, "root: weight bias"),
    "nothing at all": (lambda: nn.Sequential(nn.ReLU(), nn.Flatten()), None, "root:"),
}
"""The model, the policy, and the units: their parameters, and the units whose parameters they use, too."""


def test_who_owns_what():
    for what, (make, policy, expected) in OWNERS.items():
        model, plain = fully_shard(make(), policy=policy), make()
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
        names = {m: n or "root" for n, m in model.named_modules()}
        others = by_unit(model, lambda u, names=names: [f"of {names[o.module]}" for o in u.needs if o is not u])
        found = [
            " ".join([f"{unit or 'root'}:", *(n.removeprefix(f"{unit}.") for n in params), *others[unit]])
            for unit, params in owned(model).items()
        ]
        assert " | ".join(found) == expected, what


def test_units_without_parameters_are_dropped_except_the_root():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Dropout(), nn.Linear(4, 4)))
    fully_shard(model, policy={nn.Linear, nn.ReLU, nn.Sequential, nn.Dropout})
    assert owned(model) == {"": [], "0": ["0.weight", "0.bias"], "2.1": ["2.1.weight", "2.1.bias"]}
    assert not model[1]._forward_pre_hooks
    assert fully_shard(nn.Sequential(nn.ReLU(), nn.Flatten()))(torch.ones(2, 3)).shape == (2, 3)


def test_ignored_modules_and_parameters_are_in_no_unit():
    model = Net()
    ignored = [model.blocks[1], model.scale, model.head.weight]
    fully_shard(model, policy={Block}, ignored_states=iter(ignored))
    fqns = owned(model)
    assert list(fqns) == ["", "blocks.0", "blocks.2"]
    assert fqns[""] == ["embed.weight", "norm.weight", "norm.bias", "head.bias"]
    assert type(model.blocks[1].up.weight) is type(model.scale) is type(model.head.weight) is nn.Parameter
    assert model.head.weight.shape == (11, 8)


@pytest.mark.parametrize("depth_first", [True, False])
def test_nesting_by_hand_gives_the_units_of_the_policy(depth_first: bool):
    """Inner first, root last. The flat parameters are the same ones, in the same order, of the same sizes."""
    by_policy, by_hand = fully_shard(Net(), policy={Block, nn.Linear}), Net()
    for block in by_hand.blocks if depth_first else reversed(by_hand.blocks):
        fully_shard(block.up)
        fully_shard(block.down)
    fully_shard(by_hand.head)
    fully_shard(by_hand)
    found, expected = (
        [[(f.fqns, f.numel, f.padded_numel, f.shard_numel, f.dtype) for f in u.flats] for u in describe(m).units]
        for m in (by_hand, by_policy)
    )
    assert found == expected
    assert owned(by_hand) == owned(by_policy)
    assert by_hand.head.weight._flatshard_info.fqn == "head.weight"  # seen from the root


def test_earlier_calls():
    """A policy leaves their units as they are; the root owns what none of them has taken; device names are one device."""
    model = Net()
    fully_shard(model.blocks[1], strategy=ShardingStrategy.NO_SHARD)
    before = unit_of(model.blocks[1])
    fully_shard(model, policy=CustomPolicy(lambda m: {"forward_prefetch": False} if isinstance(m, Block) else False))
    assert unit_of(model.blocks[1]) is before
    assert configs(model)["blocks.1"] == (ShardingStrategy.NO_SHARD, *DEFAULTS[1:])
    assert units(model) == BLOCKS
    model = nn.Sequential(Block(), Block())
    fully_shard(model[0])
    copied = copy.deepcopy(model)
    fully_shard(model)
    names = [n for n, _ in Block().named_parameters()]
    assert owned(model) == {"": [f"1.{n}" for n in names], "0": [f"0.{n}" for n in names]}
    fully_shard(copied[1])
    fully_shard(copied)
    assert [len(u.handle.flats) for u in units_below(copied)] == [0, 1, 1]
    for device_id in (None, 0, "cpu", "cpu:0", torch.device("cpu", 0)):
        model = Net()
        fully_shard(model.head)
        fully_shard(model, policy={Block}, device_id=device_id)
        assert describe(model).device == torch.device("cpu")
        assert len({id(u.context) for u in units_below(model)}) == 1


def test_dtypes_and_frozen_parameters_share_a_unit_but_no_flat_parameter():
    model = Net()
    model.blocks[0].down.to(torch.bfloat16)
    model.blocks[0].up.bias.requires_grad_(False)
    fully_shard(model, policy={Block})
    flats = describe(model).units[1].flats
    assert [(f.fqns, f.dtype, f.trainable) for f in flats] == [
        (("blocks.0.up.weight",), torch.float32, True),
        (("blocks.0.up.bias",), torch.float32, False),
        (("blocks.0.down.weight", "blocks.0.down.bias"), torch.bfloat16, True),
    ]
