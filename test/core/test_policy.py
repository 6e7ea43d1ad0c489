"""Which submodules become units, by every kind of policy, and which unit owns which parameter.

Everything here is decided before the first collective, so one process with the fake process group is enough.
Rows of the list of behaviours are named where a test states one (C5, H1, ...).
"""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch as TorchPrefetch
from torch.distributed.fsdp import ShardingStrategy as TorchStrategy
from torch.distributed.fsdp import wrap as torch_wrap

import flatshard
from flatshard import BackwardPrefetch, CustomPolicy, ShardingStrategy, describe, fully_shard
from flatshard._composable.find import units_below
from flatshard._composable.state import unit_of
from flatshard.policies import ModuleWrapPolicy


@pytest.fixture(autouse=True)
def _four_ranks(world) -> None:
    """This process is the first; nobody else is there."""
    world(4)


class Block(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Wide(Block):
    """A subclass, which a policy on ``Block`` selects too."""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Block(), Wide(), Block()])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11)

    def forward(self, i):
        x = self.embed(i) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def by_unit(module: nn.Module, value) -> dict:
    """``value(unit)`` for each unit, by the name that its module has in ``module``; in module order."""
    names = {m: n for n, m in module.named_modules()}
    return {names[unit.module]: value(unit) for unit in units_below(module)}


def owned(module: nn.Module) -> dict[str, list[str]]:
    """The names of the parameters that each unit owns (N1)."""
    names = {p: n for n, p in module.named_parameters()}
    return by_unit(module, lambda u: [names[p] for flat in u.handle.flats for p in flat.params])


def units(module: nn.Module) -> list[str]:
    return list(owned(module))


def configs(module: nn.Module) -> dict[str, tuple[ShardingStrategy, BackwardPrefetch | None, bool]]:
    return by_unit(module, lambda u: (u.config.strategy, u.config.backward_prefetch, u.config.forward_prefetch))


def uses(module: nn.Module) -> dict[str, list[str]]:
    """Which other units' parameters each unit needs."""
    names = {m: n for n, m in module.named_modules()}
    return by_unit(module, lambda u: [names[other.module] for other in u.needs if other is not u])


BLOCKS = ["", "blocks.0", "blocks.1", "blocks.2"]

# -- every kind of policy ----------------------------------------------------------------------------------------------


def test_none_is_one_unit():
    model = fully_shard(Net(), policy=None)
    assert owned(model) == {"": [name for name, _ in model.named_parameters()]}


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
    "lambda": functools.partial(flatshard.policies.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, Block)),
    "torch's lambda": functools.partial(torch_wrap.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, Block)),
    "transformer": functools.partial(flatshard.policies.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "torch's transformer": functools.partial(torch_wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "or": functools.partial(torch_wrap._or_policy, policies=[torch_wrap.ModuleWrapPolicy({Block})]),
    "callable": lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, Block),
    "callable with a default": lambda module, recurse, nonwrapped_numel, kind=Block: (
        recurse or isinstance(module, kind)
    ),
    "callable with kwargs": lambda **kwargs: kwargs["recurse"] or isinstance(kwargs["module"], Block),
    "callable ModuleWrapPolicy": ModuleWrapPolicy({Block}).__call__,
}


@pytest.mark.parametrize("kind", BY_CLASS)
def test_kinds_of_policy_that_mean_the_same(kind: str):
    """A subclass of a sought class is selected too, as by isinstance. Names, order and classes are kept."""
    model, plain = Net(), Net()
    assert fully_shard(model, policy=BY_CLASS[kind]) is model
    assert units(model) == BLOCKS
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [(n, type(m)) for n, m in model.named_modules()] == [(n, type(m)) for n, m in plain.named_modules()]


def test_each_local_part_is_this_ranks_slice_of_the_value():
    """C4, on the rank that this process is."""
    model = Net()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    fully_shard(model, policy={Block})
    for name, p in model.named_parameters():
        info = p._flatshard_info
        torch.testing.assert_close(p.detach(), before[name].flatten()[info.start : info.stop], rtol=0, atol=0)


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


class Tower(nn.Module):
    """Blocks of very different sizes, containers within containers, attention, parameters on inner modules."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(3, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Block(8)))
        self.levels = nn.ModuleDict({"a": nn.ModuleList([Block(8), Block(16)]), "b": Net()})
        self.attention = nn.MultiheadAttention(16, 2)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32)
        self.bias = nn.Parameter(torch.zeros(700))

    def forward(self, x):
        raise NotImplementedError


SIZES = [0, 1, 100, 289, 290, 1000, 3000, 10_000]


@pytest.mark.parametrize("make", [Net, Tower])
@pytest.mark.parametrize("min_num_params", SIZES)
@pytest.mark.filterwarnings("ignore:.*matched no submodule")
def test_size_based_policies_choose_what_fsdp1_chooses(make, min_num_params: int):
    theirs = functools.partial(torch_wrap.size_based_auto_wrap_policy, min_num_params=min_num_params)
    ours = functools.partial(flatshard.policies.size_based_auto_wrap_policy, min_num_params=min_num_params)
    expected = fsdp1_units(make(), theirs)
    if min_num_params == 0:  # FSDP1 also wraps what has no parameters; such units would do nothing, and are dropped
        modules = dict(make().named_modules())
        expected = [name for name in expected if not name or any(True for _ in modules[name].parameters())]
        kept = fully_shard(make(), policy=theirs)
        assert set(units(kept)) <= set(expected)
        assert units(kept) == units(fully_shard(make(), policy=ours))
        return
    assert units(fully_shard(make(), policy=theirs)) == expected
    assert units(fully_shard(make(), policy=ours)) == expected


@pytest.mark.parametrize("make", [Net, Tower])
def test_size_based_policies_with_their_own_leaves_and_exclusions(make):
    arguments = {
        "min_num_params": 90,
        "force_leaf_modules": {nn.MultiheadAttention, Block},
        "exclude_wrap_modules": {nn.ModuleList, nn.ModuleDict, nn.Embedding, nn.Sequential},
    }
    expected = fsdp1_units(make(), functools.partial(torch_wrap.size_based_auto_wrap_policy, **arguments))
    ours = functools.partial(flatshard.policies.size_based_auto_wrap_policy, **arguments)
    assert units(fully_shard(make(), policy=ours)) == expected


@pytest.mark.parametrize("make", [Net, Tower])
@pytest.mark.parametrize("classes", [{Block}, {nn.Linear}, {Block, nn.Linear}, {nn.Sequential}, {nn.LayerNorm, Net}])
@pytest.mark.filterwarnings("ignore:.*matched no submodule")
def test_transformer_policies_choose_what_fsdp1_chooses(make, classes):
    theirs = functools.partial(torch_wrap.transformer_auto_wrap_policy, transformer_layer_cls=classes)
    ours = functools.partial(flatshard.policies.transformer_auto_wrap_policy, transformer_layer_cls=classes)
    expected = [name for name in fsdp1_units(make(), theirs) if name not in without_own_parameters(make(), classes)]
    assert units(fully_shard(make(), policy=theirs)) == expected
    assert units(fully_shard(make(), policy=ours)) == expected
    assert units(fully_shard(make(), policy=ModuleWrapPolicy(classes))) == expected


def without_own_parameters(root: nn.Module, classes: set[type]) -> set[str]:
    """Modules of ``classes`` all of whose parameters are in inner modules of ``classes``."""
    chosen = {name: m for name, m in root.named_modules() if isinstance(m, tuple(classes))}
    empty = set()
    for name, module in chosen.items():
        inner = {p for n, m in chosen.items() if n.startswith(f"{name}.") for p in m.parameters()}
        if name and set(module.parameters()) <= inner:
            empty.add(name)
    return empty


def test_size_based_policies_do_not_count_what_is_ignored():
    """The elements of an ignored module or parameter push nobody over the threshold."""
    make, size = Net, 200
    theirs = functools.partial(torch_wrap.size_based_auto_wrap_policy, min_num_params=size)
    for pick in (
        lambda m: [m.blocks[0].up],
        lambda m: [m.blocks[0].up.weight, m.blocks[2].down.weight],
        lambda m: [m.blocks[1]],
    ):
        plain, model = make(), make()
        params = {p for s in pick(plain) for p in (s.parameters() if isinstance(s, nn.Module) else [s])}
        expected = fsdp1_units(plain, theirs, [s for s in pick(plain) if isinstance(s, nn.Module)], params)
        assert expected != fsdp1_units(make(), theirs)
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
    block = sum(p.numel() for p in Block().parameters())
    whole = sum(p.numel() for p in Net().parameters())
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
        policy = kind(lambda m, o=override, c=chosen: o if m is c else isinstance(m, Block))
        fully_shard(model, policy=policy)
        assert configs(model) == {name: expected if name == "blocks.1" else DEFAULTS for name in BLOCKS}


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


@pytest.mark.parametrize("kind", [CustomPolicy, torch_wrap.CustomPolicy])
def test_an_empty_dict_is_a_no(kind):
    """As FSDP1's CustomPolicy has it."""
    model = fully_shard(Net(), policy=kind(lambda m: {} if isinstance(m, Block) else isinstance(m, nn.Linear)))
    linears = [f"blocks.{i}.{name}" for i in range(3) for name in ("up", "down")]
    assert units(model) == ["", *linears, "head"]


def test_a_unit_without_sharding_beside_sharded_ones():
    model = Net()
    answer = {"strategy": ShardingStrategy.NO_SHARD}
    fully_shard(model, policy=CustomPolicy(lambda m: answer if m is model.head else isinstance(m, Block)))
    assert model.head.weight.shape == (11, 8)
    assert model.norm.weight.dim() == 1
    assert sum(p.numel() for p in model.blocks[0].parameters()) < sum(p.numel() for p in Block().parameters())


# -- policies that are none (C14) --------------------------------------------------------------------------------------


def overriding(**arguments) -> CustomPolicy:
    return CustomPolicy(lambda m: arguments if isinstance(m, Block) else False)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("Block", "'Block' is not a callable object.* for the modules of some classes policy={Block}"),
        ({"Block"}, "policy: 'Block' is not an nn.Module class"),
        ([Block, None], "policy: None is not an nn.Module class"),
        (int, "policy: <class 'int'> is not an nn.Module class"),
        (set(), "an empty collection of classes selects nothing; pass policy=None"),
        (torch_wrap.ModuleWrapPolicy(set()), "an empty collection of classes selects nothing"),
        (torch_wrap.ModuleWrapPolicy({int}), "<class 'int'> is not an nn.Module class"),
        (CustomPolicy(lambda m: 1), "the CustomPolicy function returned 1 for a Net; it must return True, False, or a"),
        (CustomPolicy(lambda m: None), "returned None for a Net"),
        (torch_wrap.CustomPolicy(lambda m: "yes"), "returned 'yes' for a Net"),
        (Block(), "for the modules of some classes policy={Block}"),
        (
            lambda m: isinstance(m, Block),
            r"cannot be called as policy\(module=..., recurse=..., non.* use policy=flatshard\.CustomPolicy",
        ),
        (
            functools.partial(flatshard.policies.transformer_auto_wrap_policy),
            "missing a required argument: 'transformer_layer_cl",
        ),
        (
            overriding(device_id=3),
            r"the policy overrides 'device_id' for a Block; it can override \['backward_prefetch', ",
        ),
        (overriding(strategy="full"), "the policy's strategy='full' is not one of ShardingStrategy.FULL_SHARD, "),
        (overriding(backward_prefetch="pre"), "backward_prefetch='pre' is not one of BackwardPrefetch.BACKWARD_PRE, "),
    ],
)
def test_what_is_no_policy(policy, message: str):
    model = Net()
    with pytest.raises(ValueError, match=message):
        fully_shard(model, policy=policy)
    assert not units_below(model)
    assert type(model.scale) is nn.Parameter


@pytest.mark.parametrize("classes", [{"Block"}, set(), {int}, [Block()]], ids=str)
def test_our_module_wrap_policy_checks_at_construction(classes):
    with pytest.raises(ValueError, match=r"is not an nn\.Module class|holds an instance of Block|selects nothing"):
        ModuleWrapPolicy(classes)


def test_an_error_of_the_policy_itself_comes_through():
    def policy(module, recurse, nonwrapped_numel):
        raise TypeError("mine")

    with pytest.raises(TypeError, match=r"^mine$"):
        fully_shard(Net(), policy=policy)


# -- nothing matched ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "sought"),
    [
        ({nn.Conv2d}, "the policy's classes 'Conv2d' matched"),
        (torch_wrap.ModuleWrapPolicy([nn.Conv2d]), "the policy's classes 'Conv2d' matched"),
        (CustomPolicy(lambda m: False), "the policy's function matched"),
        (lambda module, recurse, nonwrapped_numel: recurse, "the policy's condition matched"),
    ],
    ids=["set", "torch's", "function", "callable"],
)
def test_a_policy_that_matches_nothing_warns_with_what_it_sought_and_what_there_is(policy, sought: str):
    model = Net()
    with pytest.warns(UserWarning, match="matched no submodule") as caught:
        fully_shard(model, policy=policy)
    (warning,) = caught
    assert sought in str(warning.message)
    assert "'Block', 'Embedding', 'LayerNorm', 'Linear', 'ModuleList', 'Net', 'Wide'" in str(warning.message)
    assert warning.filename == __file__  # the line to change is the caller's
    assert units(model) == [""]


@pytest.mark.parametrize("policy", [None, {Block}, {Net}], ids=str)
def test_no_warning_otherwise(policy):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fully_shard(Net(), policy=policy)


# -- what comes of nested choices --------------------------------------------------------------------------------------


def test_nested_sequentials_under_a_class_policy():
    """C9: inner containers become their own units, outer ones keep the rest."""
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4)),
        nn.Linear(4, 4),
        nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(4, 4, bias=False)))),
    )
    fully_shard(model, policy={nn.Sequential})
    assert owned(model) == {
        "": ["1.weight", "1.bias"],
        "0": ["0.0.weight", "0.0.bias", "0.2.weight", "0.2.bias"],
        "0.1": ["0.1.0.weight", "0.1.0.bias", "0.1.1.weight", "0.1.1.bias"],
        "2.0.0": ["2.0.0.0.weight"],  # the two around it would own nothing
    }


def test_units_without_parameters_are_dropped_except_the_root():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Dropout(), nn.Linear(4, 4)))
    fully_shard(model, policy={nn.Linear, nn.ReLU, nn.Sequential, nn.Dropout})
    assert owned(model) == {"": [], "0": ["0.weight", "0.bias"], "2.1": ["2.1.weight", "2.1.bias"]}
    assert unit_of(model[1]) is None
    assert not model[1]._forward_pre_hooks
    model = fully_shard(nn.Sequential(nn.ReLU(), nn.Flatten()))
    assert owned(model) == {"": []}
    assert model(torch.ones(2, 3)).shape == (2, 3)


def test_ignored_modules_and_parameters_are_in_no_unit():
    model = Net()
    ignored = [model.blocks[1], model.scale, model.head.weight]
    fully_shard(model, policy={Block}, ignored_states=iter(ignored))
    fqns = owned(model)
    assert list(fqns) == ["", "blocks.0", "blocks.2"]
    assert fqns[""] == ["embed.weight", "norm.weight", "norm.bias", "head.bias"]
    assert type(model.blocks[1].up.weight) is type(model.scale) is type(model.head.weight) is nn.Parameter
    assert model.head.weight.shape == (11, 8)


# -- who owns what -----------------------------------------------------------------------------------------------------


def test_the_root_owns_the_leftovers():
    """N1, as a table."""
    model = fully_shard(Net(), policy={Block})
    assert_expected_inline(
        "\n".join(f"{unit or '<root>'}: {', '.join(fqns)}" for unit, fqns in owned(model).items()),
        """\
<root>: scale, embed.weight, norm.weight, norm.bias, head.weight, head.bias
blocks.0: blocks.0.up.weight, blocks.0.up.bias, blocks.0.down.weight, blocks.0.down.bias
blocks.1: blocks.1.up.weight, blocks.1.up.bias, blocks.1.down.weight, blocks.1.down.bias
blocks.2: blocks.2.up.weight, blocks.2.up.bias, blocks.2.down.weight, blocks.2.down.bias""",
    )


@pytest.mark.parametrize("depth_first", [True, False])
def test_nesting_by_hand_gives_the_units_of_the_policy(depth_first: bool):
    """C8: inner first, root last. The flat parameters are the same ones, in the same order, of the same sizes."""
    by_policy = fully_shard(Net(), policy={Block, nn.Linear})
    by_hand = Net()
    for block in by_hand.blocks if depth_first else reversed(by_hand.blocks):
        fully_shard(block.up)
        fully_shard(block.down)
    fully_shard(by_hand.head)
    fully_shard(by_hand)

    def sizes(model):
        return [[(f.numel, f.padded_numel, f.shard_numel, f.dtype) for f in u.flats] for u in describe(model).units]

    assert owned(by_hand) == owned(by_policy)
    assert sizes(by_hand) == sizes(by_policy)
    assert {n: p.shape for n, p in by_hand.named_parameters()} == {n: p.shape for n, p in by_policy.named_parameters()}


def test_a_policy_leaves_units_of_earlier_calls_as_they_are():
    model = Net()
    fully_shard(model.blocks[1], strategy=ShardingStrategy.NO_SHARD)
    before = unit_of(model.blocks[1])
    fully_shard(model, policy=CustomPolicy(lambda m: {"forward_prefetch": False} if isinstance(m, Block) else False))
    assert unit_of(model.blocks[1]) is before
    assert before.config.strategy is ShardingStrategy.NO_SHARD
    assert before.config.forward_prefetch
    assert len(units_below(model)) == 4


def test_the_root_owns_what_no_earlier_call_has_taken():
    model = nn.Sequential(Block(), Block())
    fully_shard(model[0])
    copied = copy.deepcopy(model)
    fully_shard(model)
    names = [n for n, _ in Block().named_parameters()]
    assert owned(model) == {"": [f"1.{n}" for n in names], "0": [f"0.{n}" for n in names]}
    fully_shard(copied[1])
    fully_shard(copied)
    assert [len(u.handle.flats) for u in units_below(copied)] == [0, 1, 1]


class Tied(nn.Module):
    """``head`` is tied to ``embed``; both are children of the root."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.body = Block()
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, i):
        return self.head(self.body(self.embed(i)))


def test_a_parameter_of_two_siblings_goes_to_the_root_once():
    """H1. The siblings stay units, so that each can be called alone: they use the root's parameter."""
    model = fully_shard(Tied(), policy={nn.Embedding, nn.Linear, Block})
    assert owned(model) == {
        "": ["embed.weight"],
        "embed": [],
        "body.up": ["body.up.weight", "body.up.bias"],
        "body.down": ["body.down.weight", "body.down.bias"],
        "head": [],
    }
    assert uses(model) == {"": [], "embed": [""], "body.up": [], "body.down": [], "head": [""]}
    assert model.embed.weight is model.head.weight
    assert model.embed(torch.arange(3)).shape == (3, 8)
    assert model.head(torch.ones(3, 8)).shape == (3, 11)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.right.weight = self.left.weight

    def forward(self, x):
        return self.right(self.left(x))


class TwoPairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Pair(), Pair()

    def forward(self, x):
        return self.second(self.first(x))


def test_the_lowest_common_ancestor_that_is_a_unit():
    """H1: not the root where something nearer holds both."""
    model = fully_shard(TwoPairs(), policy={Pair, nn.Linear})
    assert owned(model) == {
        "": [],
        "first": ["first.left.weight"],
        "first.left": ["first.left.bias"],
        "first.right": ["first.right.bias"],
        "second": ["second.left.weight"],
        "second.left": ["second.left.bias"],
        "second.right": ["second.right.bias"],
    }
    assert uses(model) == {
        "": [],
        "first": [],
        "first.left": ["first"],
        "first.right": ["first"],
        "second": [],
        "second.left": ["second"],
        "second.right": ["second"],
    }
    # Where the pair is no unit, the next one up is.
    model = fully_shard(TwoPairs(), policy={nn.Linear})
    assert owned(model)[""] == ["first.left.weight", "second.left.weight"]


class Parent(nn.Module):
    """Registers its child's weight as its own too."""

    def __init__(self):
        super().__init__()
        self.child = nn.Linear(4, 4)
        self.weight = self.child.weight

    def forward(self, x):
        return self.child(x) @ self.weight


def test_a_parameter_of_parent_and_child_goes_to_the_parent_once():
    """H2. Its name is the first that the module gives it, as ``named_parameters`` has it."""
    model = nn.Sequential(Parent(), Parent())
    names = [n for n, _ in model.named_parameters()]
    fully_shard(model, policy={Parent, nn.Linear})
    assert owned(model) == {
        "": [],
        "0": ["0.weight"],
        "0.child": ["0.child.bias"],
        "1": ["1.weight"],
        "1.child": ["1.child.bias"],
    }
    assert [n for n, _ in model.named_parameters()] == names
    assert model[0].weight is model[0].child.weight


def test_what_is_there_twice_is_one():
    block = Block()
    model = nn.Sequential(block, nn.Linear(8, 8), block)
    fully_shard(model, policy={Block})
    assert list(owned(model)) == ["", "0"]
    assert unit_of(model[0]) is unit_of(model[2])
    assert len(block._forward_pre_hooks) == 1
    model = nn.Linear(4, 4)  # a parameter with two slots
    model.alias = model.weight
    fully_shard(model)
    assert owned(model) == {"": ["weight", "bias"]}
    assert model.alias is model.weight


class Shared(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.own = inner, nn.Linear(8, 8)

    def forward(self, x):
        return self.own(self.inner(x))


def test_a_module_shared_by_two_units():
    """It belongs to their common ancestor; as a unit, it keeps its parameters."""
    names = [f"0.inner.{n}" for n, _ in Block().named_parameters()]
    for policy, unit in (({Shared}, ""), ({Shared, Block}, "0.inner")):
        inner = Block()
        model = fully_shard(nn.Sequential(Shared(inner), Shared(inner)), policy=policy)
        own = {"": [], "0": ["0.own.weight", "0.own.bias"], "1": ["1.own.weight", "1.own.bias"]}
        assert owned(model) == own | {unit: names}
        needs = [""] if unit == "" else []
        assert uses(model) == {name: [] for name in own | {unit: names}} | {"0": needs, "1": needs}


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


@pytest.mark.parametrize("device_id", [None, 0, "cpu", "cpu:0", torch.device("cpu", 0)], ids=str)
def test_device_id_cpu_in_every_spelling(device_id):
    """They are one device, so units of separate calls share their runtime."""
    model = Net()
    fully_shard(model.head)
    fully_shard(model, policy={Block}, device_id=device_id)
    assert describe(model).device == torch.device("cpu")
    assert len({id(u.context) for u in units_below(model)}) == 1


def test_manual_nesting_names_units_from_the_root():
    inner = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    chosen = fully_shard(copy.deepcopy(inner), policy=ModuleWrapPolicy({nn.Linear}))
    for module in (inner[1][0], inner[1], inner):
        fully_shard(module)
    names = [(u.fqn, f.fqns) for u in describe(inner).units for f in u.flats]
    assert names == [("", ("0.weight", "0.bias")), ("1.0", ("1.0.weight", "1.0.bias"))]
    assert describe(chosen).units[-1].flats[0].fqns == ("1.0.weight", "1.0.bias")
    assert inner[1][0].weight._flatshard_info.fqn == "1.0.weight"
