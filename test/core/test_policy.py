"""The submodules that become units, for every kind of policy, and the unit that owns each parameter.

All of this is decided before the first collective, so one process with the fake process group is enough.
"""

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
    """Simulate rank 0 of four."""
    world(4)


class Block(Mlp):
    def __init__(self, width: int = 8):
        super().__init__(width)


class Wide(Block):
    """A subclass, selected by a policy on ``Block`` too."""


class Parts(nn.Module):
    """A container of ``parts``, never run."""

    def __init__(self, **parts: Any):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        raise NotImplementedError


Layer, Stage, Pair, Parent, Shared = (type(n, (Parts,), {}) for n in ("Layer", "Stage", "Pair", "Parent", "Shared"))


class Net(Parts):
    def __init__(self):
        super().__init__(scale=nn.Parameter(torch.ones(8)), embed=nn.Embedding(11, 8))
        self.blocks = nn.ModuleList([Block(), Wide(), Block()])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11)


def by_unit(module: nn.Module, value) -> dict:
    """Return ``value(unit)`` for each unit in module order, by its module's name in ``module``."""
    names = {m: n for n, m in module.named_modules()}
    return {names[unit.module]: value(unit) for unit in units_below(module)}


def owned(module: nn.Module) -> dict[str, list[str]]:
    """Return the names of the parameters that each unit owns."""
    names = {p: n for n, p in module.named_parameters()}
    return by_unit(module, lambda u: [names[p] for flat in u.handle.flats for p in flat.params])


def units(module: nn.Module) -> list[str]:
    return list(owned(module))


def configs(module: nn.Module) -> dict[str, tuple[ShardingStrategy, BackwardPrefetch | None, bool]]:
    return by_unit(module, lambda u: (u.config.strategy, u.config.backward_prefetch, u.config.forward_prefetch))


BLOCKS = ["", "blocks.0", "blocks.1", "blocks.2"]

OURS, THEIRS = flatshard.policies, torch_wrap
BY_CLASS = {
    "class": Block,
    "list": [Block],
    "classes that occur or not": {Block, nn.Conv2d},
    "ModuleWrapPolicy": ModuleWrapPolicy([Block]),
    "torch's ModuleWrapPolicy": torch_wrap.ModuleWrapPolicy({Block}),
    "function": CustomPolicy(lambda m: isinstance(m, Block)),
    "an empty dict is a no": CustomPolicy(lambda m: {} if isinstance(m, nn.Linear) else isinstance(m, Block)),
    "lambda": functools.partial(OURS.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, Block)),
    "torch's lambda": functools.partial(THEIRS.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, Block)),
    "transformer": functools.partial(OURS.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "torch's transformer": functools.partial(THEIRS.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "or": functools.partial(torch_wrap._or_policy, policies=[torch_wrap.ModuleWrapPolicy({Block})]),
    "with a default": lambda module, recurse, nonwrapped_numel, kind=Block: recurse or isinstance(module, kind),
    "callable with kwargs": lambda **kwargs: kwargs["recurse"] or isinstance(kwargs["module"], Block),
    "callable ModuleWrapPolicy": ModuleWrapPolicy({Block}).__call__,
}


def test_kinds_of_policy_that_mean_the_same():
    """A policy also selects subclasses, like isinstance. Names, order and classes stay."""
    plain = Net()
    assert units(fully_shard(Net(), policy=None)) == [""]
    for kind, policy in BY_CLASS.items():
        model = Net()
        assert fully_shard(model, policy=policy) is model
        assert units(model) == BLOCKS, kind
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
        assert [(n, type(m)) for n, m in model.named_modules()] == [(n, type(m)) for n, m in plain.named_modules()]


class Wrapper(nn.Sequential):
    """Marker for units that FSDP1's recursion would wrap."""


def fsdp1_units(root: nn.Module, policy, ignored_modules=()) -> list[str]:
    """Return the FQNs of the units of FSDP1's recursion, which changes ``root``.

    ``out_proj`` of attention is left out: FSDP1 makes a unit of it that is never called, so its model fails.
    """
    names = {m: n for n, m in root.named_modules()}
    params = {p for m in ignored_modules for p in m.parameters()}
    torch_wrap._recursive_wrap(root, policy, Wrapper, set(ignored_modules), params, only_wrap_children=True)
    chosen = [names[m[0]] for m in root.modules() if isinstance(m, Wrapper)]
    return ["", *(name for name in chosen if not name.endswith("out_proj"))]


@pytest.mark.filterwarnings("ignore:.*matched no submodule")
def test_size_based_policies_choose_what_fsdp1_chooses():
    def tower() -> nn.Module:
        levels = Parts(a=nn.ModuleList([Block(8), Block(16)]), b=Net())
        return nn.Sequential(nn.MultiheadAttention(16, 2), nn.Sequential(nn.Linear(3, 8), nn.ReLU(), Block()), levels)

    excluded = {"force_leaf_modules": {Block}, "exclude_wrap_modules": {nn.ModuleList, nn.Embedding, nn.Sequential}}
    for arguments in ({"min_num_params": 1}, {"min_num_params": 1000}, {"min_num_params": 90} | excluded):
        theirs, ours = (functools.partial(m.size_based_auto_wrap_policy, **arguments) for m in (torch_wrap, OURS))
        for make in (Net, tower):
            assert units(fully_shard(make(), policy=ours)) == fsdp1_units(make(), theirs), arguments
    policy = functools.partial(torch_wrap.size_based_auto_wrap_policy, min_num_params=200)
    plain, model = Net(), Net()  # ignored parameters do not count towards the threshold
    expected = fsdp1_units(plain, policy, [plain.blocks[1]])
    assert expected != fsdp1_units(Net(), policy)
    assert units(fully_shard(model, policy=policy, ignored_states=[model.blocks[1]])) == expected


def test_size_based_policies_decide_alike_on_all_ranks_where_something_is_sharded_already():
    """Shards differ in size between ranks, so parameters that are already sharded count on no rank."""
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


FULL, GRAD_OP, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
PRE, POST = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST
NO_PREFETCH = {"backward_prefetch": None, "forward_prefetch": False}
USUAL = (FULL, PRE, True)
# Settings of a policy for the head and for the root, and of the call; then the results for head, root and a block.
SETTINGS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], Any, Any, Any]] = [
    ({"strategy": GRAD_OP}, {}, {}, (GRAD_OP, PRE, True), USUAL, USUAL),
    ({"sharding_strategy": TorchStrategy.NO_SHARD}, {}, {}, (NO_SHARD, PRE, True), USUAL, USUAL),
    ({"backward_prefetch": TorchPrefetch.BACKWARD_POST}, {}, {}, (FULL, POST, True), USUAL, USUAL),
    ({"mixed_precision": None, **NO_PREFETCH}, {}, {}, (FULL, None, False), USUAL, USUAL),
    ({"forward_prefetch": True}, {}, NO_PREFETCH, (FULL, None, True), *[(FULL, None, False)] * 2),
    (
        {},
        NO_PREFETCH,
        {"strategy": TorchStrategy.SHARD_GRAD_OP},
        (GRAD_OP, PRE, True),
        (GRAD_OP, None, False),
        (GRAD_OP, PRE, True),
    ),
]


@pytest.mark.parametrize("kind", [dict, CustomPolicy, torch_wrap.CustomPolicy])
def test_settings(kind):
    """A policy's settings apply to the chosen unit only, the root included; other units use the call's."""
    for of_head, of_root, given, *expected in SETTINGS:
        model = Net()
        chosen = {"head": of_head, "": of_root, "blocks.0": {}}
        names = {m: n for n, m in model.named_modules()}
        policy = chosen if kind is dict else kind(lambda m, c=chosen, n=names: c.get(n[m]) or n[m] in c)
        fully_shard(model, policy=policy, **given)
        assert [configs(model)[name] for name in ("head", "", "blocks.0")] == expected
        assert (model.head.weight.shape == (11, 8)) is (expected[0][0] is NO_SHARD)


def overriding(**arguments) -> CustomPolicy:
    return CustomPolicy(lambda m: arguments if isinstance(m, Block) else False)


NO_POLICIES: list[tuple[Any, str]] = [
    (
        "Block",
        "policy='Block': the only policy with a name is 'auto'.* For the modules of some classes: policy={Block}",
    ),
    ([Block, None], "policy: None is not an nn.Module class"),
    (int, "policy: <class 'int'> is not an nn.Module class"),
    (torch_wrap.ModuleWrapPolicy(set()), "an empty collection of classes selects nothing"),
    (CustomPolicy(lambda m: 1), "the CustomPolicy function returned 1 for a Net; it must return True, False, or a"),
    (torch_wrap.CustomPolicy(lambda m: "yes"), "returned 'yes' for a Net"),
    (Block(), "policy is a Block: pass the class, policy={Block}"),
    (lambda m: True, r"cannot be called as policy\(module=..., recurse=..., non.* use policy=flatshard\.CustomPolicy"),
    (functools.partial(OURS.transformer_auto_wrap_policy), "missing a required argument: 'transformer_layer_cl"),
    (overriding(device_id=3), r"the policy overrides 'device_id' for a Block; it can override \['backward_prefetch', "),
    (overriding(strategy="full"), "the policy's strategy='full' is not one of ShardingStrategy.FULL_SHARD, "),
    ({"blocks.3": {}}, "the policy names 'blocks.3', and Net has no such module. Its modules: .*'blocks.2'"),
    ({"blocks.2": {}}, "and Net has it, but it is ignored or sharded already"),
    ({"head": True}, "the policy has True for 'head': it must be a dict of arguments"),
]


def test_what_is_no_policy():
    for policy, message in NO_POLICIES:
        model = Net()
        with pytest.raises(ValueError, match=message):
            fully_shard(model, policy=policy, ignored_states=[model.blocks[2]])
        assert not units_below(model)
        assert type(model.scale) is nn.Parameter
    for classes in ({"Block"}, set(), [Block()]):  # our class checks at construction
        with pytest.raises(ValueError, match=r"is not an nn\.Module class|holds an instance of Block|selects nothing"):
            ModuleWrapPolicy(classes)


def staged(*widths: int, count: int = 3) -> nn.Module:
    """Return stages of layers of one width, each layer with two experts."""
    layers = [[Layer(experts=nn.ModuleList([Block(n), Block(n)])) for _ in range(count)] for n in widths]
    stages = [Stage(layers=nn.Sequential(*each)) for each in layers]
    return nn.Sequential(nn.Linear(3, 3), *stages, nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))


def unet(middle: int, **others: Any) -> nn.Module:
    """Return blocks on the way down and up, of three widths, and between them a single module of two layers."""
    down, up = (nn.ModuleList(Block(n) for n in widths) for widths in ((8, 16, 32), (32, 16, 8)))
    return Parts(
        embed=nn.Embedding(999, 8), down=down, mid=Parts(first=Block(middle), second=Block(middle)), up=up, **others
    )


def with_a_tie() -> nn.Module:
    model = unet(12)
    model.other = nn.Linear(12, 24)
    model.other.weight = model.mid.first.up.weight
    return model


UNET = [f"{way}.{i}" for way in ("down", "up") for i in range(3)]


def test_repeated_blocks():
    for make, expected in (
        (Net, BLOCKS[1:]),  # `Wide` is another class, and large
        (lambda: unet(12), [*UNET[:3], "mid", *UNET[3:]]),
        (lambda: unet(8), UNET),  # less than a quarter of the largest block
        (with_a_tie, UNET),  # the same, without the tied weight
        (lambda: unet(12, head=Parts(proj=nn.Linear(8, 999))), [*UNET[:3], "mid", *UNET[3:]]),  # a single layer inside
        (lambda: staged(8, 16, count=2), [f"{s}.layers.{i}" for s in (1, 2) for i in (0, 1)]),  # not experts
        (lambda: staged(8, 8), ["1", "2"]),  # equal stages
    ):
        model = make()
        assert list(find_blocks(model)) == expected
        assert units(fully_shard(model, policy="auto")) == ["", *expected]
        assert find_blocks(model) == {}


def test_a_policy_that_matches_nothing_warns_with_what_it_sought_and_what_there_is():
    for policy, sought in (
        (torch_wrap.ModuleWrapPolicy([nn.Conv2d]), "the policy's classes 'Conv2d' matched"),
        (CustomPolicy(lambda m: False), "the policy's function matched"),
        (lambda module, recurse, nonwrapped_numel: recurse, "the policy's condition matched"),
        ("auto", "which looks for blocks that are repeated, matched"),
    ):
        with pytest.warns(UserWarning, match="matched no submodule") as caught:
            model = fully_shard(nn.Sequential(nn.Linear(4, 4), Block()), policy=policy)
        (warning,) = caught
        assert sought in str(warning.message)
        assert "'Block', 'Linear', 'Sequential'" in str(warning.message)
        assert warning.filename == __file__  # points to the caller's line
        assert units(model) == [""]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fully_shard(Net(), policy=None)
        fully_shard(Net(), policy={Net})


def nested() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4)),
        nn.Linear(4, 4),
        nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(4, 4, bias=False)))),
    )


def tied(kind: type[Parts], first: nn.Module, second: nn.Module, **others: nn.Module) -> Parts:
    second.weight = first.weight
    return kind(left=first, **others, right=second)


def pair() -> nn.Module:
    return tied(Pair, nn.Linear(4, 4), nn.Linear(4, 4))


def parent() -> nn.Module:
    """Return a module that also registers its child's weight as its own."""
    child = nn.Linear(4, 4)
    return Parent(child=child, weight=child.weight)


def sharing() -> nn.Module:
    inner = nn.Linear(8, 8, bias=False)
    return nn.Sequential(*(Shared(inner=inner, own=nn.Linear(8, 8, bias=False)) for _ in range(2)))


def twice() -> nn.Module:
    same = pair()
    return nn.Sequential(same, nn.Linear(4, 4), same)


OWNERS: dict[str, tuple[Any, Any, str]] = {
    "inner containers own theirs, outer ones the rest, and what would own nothing is no unit": (
        nested,
        {nn.Sequential},
        "root: 1.weight 1.bias | 0: 0.weight 0.bias 2.weight 2.bias | "
        "0.1: 0.weight 0.bias 1.weight 1.bias | 2.0.0: 0.weight",
    ),
    "a parameter of two siblings goes to the root once; they stay units, so that each can be called alone": (
        lambda: tied(Parts, nn.Embedding(11, 8), nn.Linear(8, 11, bias=False), body=Block()),
        {nn.Embedding, nn.Linear, Block},
        "root: left.weight | left: of root | body.up: weight bias | body.down: weight bias | right: of root",
    ),
    "the lowest common ancestor that is a unit": (
        lambda: nn.Sequential(pair(), pair()),
        {Pair, nn.Linear},
        "root: | 0: left.weight | 0.left: bias of 0 | 0.right: bias of 0 | "
        "1: left.weight | 1.left: bias of 1 | 1.right: bias of 1",
    ),
    "of parent and child: the parent, under the first name": (
        lambda: nn.Sequential(parent(), parent()),
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
    "without parameters: no unit but the root": (nn.ReLU, {nn.ReLU}, "root:"),
}


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


def test_earlier_calls():
    """A policy keeps units of earlier calls, the root owns the other parameters, and a device's names are equivalent."""
    for device_id in (None, 0, "cpu:0", torch.device("cpu", 0)):
        model = Net()
        fully_shard(model.blocks[1], strategy=NO_SHARD)
        before = unit_of(model.blocks[1])
        policy = CustomPolicy(lambda m: {"forward_prefetch": False} if isinstance(m, Block) else False)
        fully_shard(model, policy=policy, device_id=device_id)
        assert unit_of(model.blocks[1]) is before
        assert configs(model)["blocks.1"] == (NO_SHARD, PRE, True)
        assert units(model) == BLOCKS
        assert describe(model).device == torch.device("cpu")
        assert len({id(u.context) for u in units_below(model)}) == 1
    model = nn.Sequential(Block(), Block())
    fully_shard(model[0])
    copied = copy.deepcopy(model)
    for each in (copied[1], copied):
        fully_shard(each)
    assert [len(u.handle.flats) for u in units_below(copied)] == [0, 1, 1]


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
