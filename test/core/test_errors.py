"""The user's mistakes: each raises before anything is changed, and says who, what and the cure.

What ``fully_shard`` refuses is refused by looking, never by trying, so one process with the fake process group is enough.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Block, Net
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.fsdp import ShardingStrategy as TorchStrategy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate, distribute_tensor

import flatshard
from flatshard import BackwardPrefetch, CustomPolicy, ShardingStrategy, describe, fully_shard
from flatshard._composable.construct.renamed import OTHER_VALUES, SAME_VALUES
from flatshard._composable.find import units_below
from flatshard._composable.state import unit_of


@pytest.fixture(autouse=True)
def _four_ranks(world) -> None:
    """This process is the first; nobody else is there."""
    world(4)


# What a module keeps besides its parameters and buffers, and what of it an object can be compared by.
HOOKS = [key for key in nn.Module().__dict__ if key.endswith("_hooks")]


def seen_of(root: nn.Module) -> list[Any]:
    """All that can be seen of a module tree: classes, objects, values, attributes, hooks."""
    modules = [
        (name, id(m), type(m), list(m.__dict__), [list(m.__dict__[key].items()) for key in HOOKS])
        for name, m in root.named_modules()
    ]
    tensors = []
    for name, t in [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]:
        is_plain = t.layout is torch.strided and not t.is_meta and type(t) in (nn.Parameter, torch.Tensor)
        tensors.append((name, id(t), type(t), dict(t.__dict__), is_plain and (t.data_ptr(), t.tolist())))
    return [modules, tensors]


@contextlib.contextmanager
def refused(root: nn.Module, kind: type[Exception], message: str) -> Iterator[None]:
    """The body raises ``kind`` with ``message`` (plain text, not a pattern), and has changed nothing in ``root``."""
    before = seen_of(root)
    with pytest.raises(kind, match=re.escape(message)) as caught:
        yield
    assert caught.type is kind, f"a {caught.type.__name__} is not the error to raise here"
    assert seen_of(root) == before
    assert not hasattr(caught.value, "__notes__")  # no "build it anew"


# -- the module and its process group ----------------------------------------------------------------------------------


def test_what_is_no_module():
    for module, what in ((None, "NoneType"), (torch.ones(2), "Tensor"), (nn.Linear, "type")):
        with pytest.raises(TypeError, match=f"fully_shard takes an nn.Module as module, got a {what}"):
            fully_shard(module)
    with pytest.raises(TypeError, match=r"an item of the list, got a str"):
        fully_shard([Block(), "head"])
    for module in (nn.ModuleList([Block()]), nn.ModuleDict({"a": Block()})):
        with refused(module, ValueError, "has no forward, so its hooks would never run. Shard its items, `for m in"):
            fully_shard(module)


def test_arguments_without_names():
    model = Net()
    for given, by in (
        ([dist.group.WORLD, ShardingStrategy.NO_SHARD], "name the ProcessGroup, by 'process_group='"),
        ([ShardingStrategy.NO_SHARD], "name the ShardingStrategy, by 'strategy='"),
        ([{Block}], "name the set, by 'policy=', 'process_group=', 'device_mesh=', 'strategy=', ... ("),
    ):
        with refused(model, TypeError, f"fully_shard takes only the module without a name: {by}"):
            fully_shard(model, *given)


def test_sharded_twice():
    model = fully_shard(Net(), policy={Block})
    with refused(model, ValueError, "this Net is sharded already: fully_shard was called on it, or a policy chose it"):
        fully_shard(model)
    with refused(model, ValueError, "this Block is sharded already"):
        fully_shard(model.blocks[1])
    model = fully_shard(Net())
    message = (
        "'weight' in this Linear is sharded already, as 'head.weight' of the unit around it, a Net: shard inner mod"
    )
    with refused(model, ValueError, message):
        fully_shard(model.head)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_scripted_module():
    scripted = torch.jit.script(nn.Linear(4, 4))
    message = "fully_shard cannot hook a RecursiveScriptModule: a scripted module can be inside a unit, but not a unit"
    with pytest.raises(TypeError, match=message):
        fully_shard(scripted)
    model = nn.Sequential(Block(), scripted)
    with pytest.raises(TypeError, match="the policy chose '1', a RecursiveScriptModule, which fully_shard cannot hook"):
        fully_shard(model, policy=CustomPolicy(lambda m: m is scripted))
    assert not units_below(model)
    fully_shard(model, policy={Block})  # as the message says
    model(torch.ones(2, 4)).sum().backward()
    assert [p.grad is not None for p in model.parameters()] == [True] * 4


def test_no_process_group():
    dist.destroy_process_group()
    model = Net()
    message = "fully_shard needs a process group: call torch.distributed.init_process_group(...) first (under torchrun,"
    with refused(model, RuntimeError, message):
        fully_shard(model)


# -- other arguments ---------------------------------------------------------------------------------------------------


def chosen(overrides: dict[str, Any]) -> CustomPolicy:
    return CustomPolicy(lambda m: overrides if isinstance(m, Block) else False)


def mesh(*shape: int, names: Any = None) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


HYBRID, PAIR, BF16 = ShardingStrategy.HYBRID_SHARD, ("replicate", "shard"), torch.bfloat16
WRONG_VALUES: list[tuple[Callable[[Net], dict[str, Any]], str]] = [
    (lambda m: {"process_group": dist.new_group([1, 2])}, "rank 0 is not a member of the given process"),
    (lambda m: {"device_mesh": DeviceMesh("cpu", [1, 2])}, "rank 0 is not a member of the given"),
    (lambda m: {"process_group": dist.group.WORLD, "device_mesh": mesh(4)}, "pass process_group or"),
    (lambda m: {"device_mesh": mesh(2, 2, names=PAIR)}, f"device_mesh has 2 dimensions {PAIR}: pass the one to"),
    (lambda m: {"device_mesh": mesh(2, 2)}, "device_mesh has 2 dimensions None: pass the one to shard"),
    (lambda m: {"strategy": HYBRID}, "LOCAL_WORLD_SIZE=None does not divide the 4 ranks: launch with"),
    (lambda m: {"strategy": TorchStrategy._HYBRID_SHARD_ZERO2}, "without device_mesh shards within a"),
    (lambda m: {"strategy": "fully_shard"}, "strategy='fully_shard' is not one of"),
    (lambda m: {"strategy": None}, "strategy=None is not one of ShardingStrategy.FULL_SHARD"),
    (lambda m: {"strategy": BackwardPrefetch.BACKWARD_PRE}, "is not one of"),
    (lambda m: {"device_id": "cud"}, "device_id='cud' is no device: pass a torch.device, its name or"),
    (lambda m: {"backward_prefetch": True}, "backward_prefetch=True is not one of"),
    (lambda m: {"backward_prefetch": HYBRID}, "is not one of BackwardPrefetch.BACKWARD_PRE"),
    (lambda m: {"limit_all_gathers": False}, "limit_all_gathers=False has no meaning here: the host"),
    (lambda m: {"policy": {nn.ModuleList}}, "the policy chose 'blocks', a ModuleList, which has no"),
    (lambda m: {"policy": chosen({"sharding_strategy": TorchStrategy.HYBRID_SHARD})}, "the policy chose"),
    (lambda m: {"policy": chosen({"process_group": None})}, "overrides 'process_group' for a Block; it"),
    (lambda m: {"ignored_states": [m.head, Block()]}, "ignored_states: a Block is not a submodule of Net"),
    (lambda m: {"ignored_states": [nn.Parameter(torch.ones(3, 2))]}, "a parameter of shape (3, 2) is"),
    (lambda m: {"ignored_states": [m]}, "ignored_states contains the module that is to be sharded"),
]
WRONG_TYPES: list[tuple[Callable[[Net], dict[str, Any]], str]] = [
    (lambda m: {"device_mesh": 4}, "device_mesh must be a DeviceMesh, got a int"),
    (lambda m: {"mixed_precision": BF16}, "mixed_precision must be a flatshard.MixedPrecision or one"),
    (lambda m: {"cpu_offload": "params"}, "cpu_offload must be a flatshard.CPUOffload, a bool, or one of"),
    (lambda m: {"policy": chosen({"mixed_precision": 16})}, "the policy's mixed_precision must be"),
    (lambda m: {"policy": chosen({"cpu_offload": 1})}, "cpu_offload must be"),
    (lambda m: {"ignored_states": m.head.weight}, "ignored_states contains a Tensor"),
    (lambda m: {"ignored_states": "head"}, "ignored_states contains a str; it takes modules and"),
    (lambda m: {"ignored_states": [torch.ones(3)]}, "ignored_states contains a Tensor"),
    (lambda m: {"ignored_states": [Block]}, "ignored_states contains a type"),
]


def test_wrong_or_missing_choices():
    for kind, table in ((ValueError, WRONG_VALUES), (TypeError, WRONG_TYPES)):
        for arguments, message in table:
            model = Net()
            with refused(model, kind, message):
                fully_shard(model, **arguments(model))


def test_arguments_of_other_kinds_and_names():
    model = Net()
    fully_shard(model, process_group=dist.group.WORLD, policy={Block})
    assert flatshard.full_shape(model.get_parameter("head.weight")) == Net().head.weight.shape
    with pytest.raises(TypeError, match=r"describe takes an nn\.Module, got a SGD"):
        describe(torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match="Net has no method 'generate'; it has none of its own"):
        flatshard.register_forward_method(model, "generate")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without an accelerator")
def test_an_accelerator_that_is_not_there():
    model = Net()
    with refused(model, ValueError, "device_id='cuda', but this process has no accelerator: omit it, or pass 'cpu'"):
        fully_shard(model, device_id="cuda")
    fully_shard(model, device_id="cpu")


def test_a_unit_inside_an_ignored_module():
    for ignored in ("blocks.1", "blocks", "blocks.1.linear"):
        model = Net()
        fully_shard(model.blocks[1].linear)
        message = "'blocks.1.linear' is sharded already, but is in an ignored module: do not shard it, or do not ignore"
        with refused(model, ValueError, message):
            fully_shard(model, ignored_states=[model.get_submodule(ignored)])


# -- FSDP1's and FSDP2's names of the arguments ------------------------------------------------------------------------


def test_every_name_of_fsdp_is_known():
    ours = set(inspect.signature(fully_shard).parameters)
    for function in (FullyShardedDataParallel.__init__, fsdp2):
        theirs = list(inspect.signature(function).parameters)[1:]
        assert {*theirs} <= {*ours, *SAME_VALUES, *OTHER_VALUES, "module", "dp_mesh_dims"}
    assert set(SAME_VALUES.values()) <= ours
    assert not ours & {*SAME_VALUES, *OTHER_VALUES}


def test_names_are_accepted():
    model = Net()
    ignored = model.head.weight
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model.blocks[0], mesh=mesh(4), mp_policy=policy, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=TorchStrategy.SHARD_GRAD_OP,
        ignored_params={ignored},
        forward_prefetch=False,
    )
    config = unit_of(model.blocks[0]).config
    assert config.mixed_precision.param_dtype is torch.bfloat16
    assert config.cpu_offload.offload_params
    outer = unit_of(model).config
    assert outer.strategy is ShardingStrategy.SHARD_GRAD_OP
    assert not outer.forward_prefetch
    assert unit_of(model.blocks[1]) is not None
    assert model.head.weight is ignored
    assert type(ignored) is nn.Parameter


WRONG_NAMES: list[tuple[dict[str, Any], str]] = [
    ({"polcy": {Block}}, r"no argument 'polcy': did you mean 'policy'\?"),
    ({"mesh_": None}, r"no argument 'mesh_': did you mean 'mesh'\?"),
    ({"zzz": 1}, r"no argument 'zzz'$"),
    ({"auto_wrap_policy": {Block}, "policy": {Block}}, "'policy' and 'auto_wrap_policy' are two names of 'policy'"),
    ({"ignored_modules": [], "ignored_params": []}, "'ignored_modules' and 'ignored_params' are two names of"),
    ({"shard_placement_fn": None}, r"no argument 'shard_placement_fn': .*layouts\.Rows\(\)"),
    ({"dp_mesh_dims": 1}, r"dp_mesh_dims must be a torch\.distributed\.fsdp\.DataParallelMeshDims, got 1"),
    ({"use_orig_params": True}, "no argument 'use_orig_params': omit it"),
]


def test_names_are_refused():
    model = Net()
    for arguments, error in WRONG_NAMES:
        with pytest.raises(TypeError, match=error):
            fully_shard(model, **arguments)
        assert unit_of(model) is None
        assert not any(m._forward_pre_hooks for m in model.modules())


# -- parameters --------------------------------------------------------------------------------------------------------


def annotated() -> nn.Parameter:
    """As the package spmd_types does it, of which the test has a stand-in."""
    made = nn.Parameter(torch.ones(4, 4))
    made._local_type = {"tp": "R"}
    return made


ODD: list[tuple[Callable[[], nn.Parameter], type[Exception], str]] = [
    (annotated, NotImplementedError, "is annotated by spmd_types with {'tp': 'R'}, which flatshard does not read"),
    (
        lambda: nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh(4), [Replicate()])),
        ValueError,
        "is a DTensor over ranks [0, 1, 2, 3], and would be sharded over ranks [0, ",
    ),
    (
        lambda: nn.Parameter(torch.eye(4).to_sparse()),
        ValueError,
        "has layout torch.sparse_coo: only dense parameters can be sharded",
    ),
    (nn.UninitializedParameter, ValueError, "is lazy and has no shape yet: run one forward before fully_shard"),
]


@pytest.mark.parametrize("policy", [None, {Block}], ids=["root", "blocks"])
def test_a_parameter_that_cannot_be_flattened(monkeypatch, policy):
    """Of tensor subclasses see ``handle/test_tensor_subclass``."""
    spmd_types = SimpleNamespace(get_local_type=lambda param: param.__dict__.get("_local_type", {}))
    monkeypatch.setitem(sys.modules, "spmd_types", spmd_types)
    for make, kind, message in ODD:
        model = Net()
        model.blocks[1].linear.weight = weight = make()
        with refused(model, kind, f"parameter 'blocks.1.linear.weight' {message}"):
            fully_shard(model, policy=policy)
        fully_shard(model, policy=policy, ignored_states=[weight])  # the cure, where there is no better one
        assert model.blocks[1].linear.weight is weight


def test_parameters_that_only_look_odd():
    class Mine(nn.Parameter):
        """A subclass without its own dispatch."""

    class DDP(nn.Linear):
        """Not torch's."""

    model = nn.Sequential(nn.LazyLinear(4), DDP(4, 4))
    model(torch.ones(2, 3))  # as the message says of lazy ones
    model[0].weight = Mine(torch.ones(4, 3))
    model.num_replicates = 2
    model[1]._replicate = True
    fully_shard(model, policy={DDP})
    assert [f.fqns for u in describe(model).units for f in u.flats] == [
        ("0.weight", "0.bias"),
        ("1.weight", "1.bias"),
    ]


@pytest.mark.parametrize("policy", [None, {nn.Linear}], ids=["one unit", "two units"])
def test_two_parameters_in_the_same_memory(policy):
    names = "'blocks.0.linear.weight' and 'blocks.1.linear.weight'"
    for views in (
        lambda base: (base, base),  # the same elements under two objects
        lambda base: (base, base.t()),
        lambda base: (base[:3], base[1:]),
        lambda base: (base, base[3:]),
    ):
        model = Net()
        first, second = views(torch.ones(4, 4))
        model.blocks[0].linear.weight, model.blocks[1].linear.weight = nn.Parameter(first), nn.Parameter(second)
        with refused(model, ValueError, f"parameters {names} are different Parameter objects in the same"):
            fully_shard(model, policy=policy)
    base = torch.ones(8, 4)  # side by side they are two
    model.blocks[0].linear.weight, model.blocks[1].linear.weight = nn.Parameter(base[:4]), nn.Parameter(base[4:])
    assert describe(fully_shard(model)).numel == sum(p.numel() for p in Net().parameters())


@pytest.mark.gpu
def test_parameters_on_different_devices():
    model = Net()
    model.head.cuda()
    message = "parameters are on different devices: 'front.weight', 'front.bias', 'blocks.0.linear.weight', ... ("
    with refused(model, ValueError, message):
        fully_shard(model)
    fully_shard(model, device_id="cuda")  # the cure that the message names
    assert describe(model).device == torch.device("cuda", 0)


# -- other wrappers ----------------------------------------------------------------------------------------------------


def replicate(module: nn.Module, newest: bool) -> nn.Module:
    name = "replicate_with_fsdp" if newest else "replicate"
    replicating = pytest.importorskip(f"torch.distributed._composable.{name}")
    return replicating.replicate(module, **({"mesh": mesh(4, names=("replicate",))} if newest else {}))


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DistributedDataParallel": nn.parallel.DistributedDataParallel,
    "FullyShardedDataParallel": lambda m: FullyShardedDataParallel(
        m, use_orig_params=True, device_id=torch.device("cpu")
    ),
    "FSDPModule": lambda m: fsdp2(m, mesh=mesh(4)),
    "DDP": lambda m: replicate(m, False),
    "ReplicateModule": lambda m: replicate(m, True),
}


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.filterwarnings("ignore")
def test_what_another_wrapper_manages(name: str):
    model = WRAPPERS[name](Net())
    with pytest.raises(ValueError, match=f"'the module' is managed by {name} already"):
        fully_shard(model)
    assert not units_below(model)
    model = Net()
    model.blocks[1] = WRAPPERS[name](model.blocks[1])
    before = [n for n, _ in model.named_modules()], [p for _, p in model.named_parameters()]
    message = f"'blocks.1' is managed by {name} already: unwrap it, or pass it in ignored_states"
    with pytest.raises(ValueError, match=re.escape(message)):
        fully_shard(model)
    assert before[0] == [n for n, _ in model.named_modules()]
    assert all(a is b for a, b in zip(before[1], model.parameters(), strict=True))
    assert not units_below(model)
    fully_shard(model, ignored_states=[model.blocks[1]])
    assert describe(model).numel == sum(p.numel() for p in Net(2).parameters())


# -- meta modules ------------------------------------------------------------------------------------------------------


class Bare(nn.Module):
    """Nothing that could initialise it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.ones(3), persistent=False)

    def forward(self, x):
        return x * self.scale


class Forgetful(Bare):
    """Its initialiser leaves the buffer out."""

    def reset_parameters(self):
        nn.init.ones_(self.scale)


class Broken(Bare):
    def reset_parameters(self):
        raise ZeroDivisionError("mine")


def on_meta(make: Callable[[], nn.Module]) -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(4, 4), make())


@pytest.mark.parametrize("policy", [None, {Bare}], ids=["one unit", "two units"])
def test_a_meta_module_without_reset_parameters(policy):
    model = on_meta(Bare)
    message = (
        "'1.scale', '1.table' are on the meta device and their modules cannot initialise them. Give their modules a "
        "reset_parameters() that sets every parameter and buffer (non-persistent ones too), or pass param_init_fn=..."
    )
    with refused(model, RuntimeError, message):
        fully_shard(model, policy=policy, device_id="cpu")


def test_a_failure_after_the_change_has_begun_says_so():
    """What an initialiser leaves out can only show when it has run, unit by unit, with earlier units sharded by then."""
    model = on_meta(Forgetful)
    message = r"'1\.table' were on the meta device and have not been initialised\. Gi"
    with pytest.raises(RuntimeError, match=message) as e:
        fully_shard(model, policy={Forgetful}, device_id="cpu")
    assert e.value.__notes__ == ["fully_shard had begun to change this Sequential: build it anew before you try again."]
    # What is left. Nothing hooked, so a half-sharded module does not train; and it is not sharded again by mistake.
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert unit_of(model) is not None
    assert unit_of(model[1]) is None
    with pytest.raises(ValueError, match="this Sequential is sharded already"):
        fully_shard(model)


def test_an_error_of_the_users_own_initialiser_comes_through():
    for init in (None, lambda m: m.reset_parameters()):
        with pytest.raises(ZeroDivisionError, match="mine") as e:
            fully_shard(on_meta(Broken), policy={Broken}, param_init_fn=init, device_id="cpu")
        assert "build it anew" in e.value.__notes__[0]
        assert not torch.__future__.get_swap_module_params_on_conversion()
