"""User errors: each raises before anything changes, and names the object, the problem and the cure.

``fully_shard`` checks without trying, so one process with the fake process group is enough.
"""

import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

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
from torch.distributed.tensor import distribute_tensor

from flatshard import CustomPolicy, ShardingStrategy, describe, fully_shard
from flatshard._composable.state import unit_of
from flatshard._composable.unit_config import OTHER_VALUES, SAME_VALUES


@pytest.fixture(autouse=True)
def _four_ranks(world) -> None:
    """Simulate rank 0 of four."""
    world(4)


def seen_of(root: nn.Module) -> list[Any]:
    """Return everything observable of a module tree: classes, objects, values, attributes, hooks."""
    seen: list[Any] = []
    for name, m in root.named_modules():
        hooks = [list(v.items()) for k, v in m.__dict__.items() if k.endswith("_hooks")]
        seen.append((name, id(m), type(m), list(m.__dict__), hooks))
    tensors = [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]
    return [seen, [(name, id(t), type(t), dict(t.__dict__), t._version) for name, t in tensors]]


@contextlib.contextmanager
def refused(root: nn.Module, kind: type[Exception], message: str) -> Iterator[None]:
    """Assert that the body raises ``kind`` with ``message`` (plain text, not a pattern) and leaves ``root`` unchanged."""
    before = seen_of(root)
    with pytest.raises(kind, match=re.escape(message)) as caught:
        yield
    assert caught.type is kind, f"a {caught.type.__name__} is not the error to raise here"
    assert seen_of(root) == before
    assert not hasattr(caught.value, "__notes__")  # no note to build the module anew


def test_what_is_no_module():
    for module, what in ((None, "NoneType"), (torch.ones(2), "Tensor"), (nn.Linear, "type"), (["head"], "str")):
        with pytest.raises(TypeError, match=f", got a {what}"):
            fully_shard(module)
    with refused(module := nn.ModuleDict({"a": Block()}), ValueError, "has no forward, so its hooks would never run."):
        fully_shard(module)
    scripted = torch.jit.script(nn.Linear(4, 4))
    with pytest.raises(TypeError, match="cannot hook a RecursiveScriptModule: a scripted module can be inside a unit"):
        fully_shard(scripted)
    model = nn.Sequential(Block(), scripted)
    fully_shard(model, policy={Block})  # the cure in the message
    model(torch.ones(2, 4)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_arguments_without_names():
    model = Net()
    for given, by in (
        ([ShardingStrategy.NO_SHARD, {Block}], "name the ShardingStrategy, by 'strategy='"),
        ([{Block}], "name the set, by 'policy=', 'process_group=', 'device_mesh=', 'strategy=', ... ("),
    ):
        with refused(model, TypeError, f"fully_shard takes only the module without a name: {by}"):
            fully_shard(model, *given)


def test_sharded_twice():
    model = fully_shard(Net(), policy={Block})
    for module in (model, model.blocks[1]):
        with refused(model, ValueError, f"this {type(module).__name__} is sharded already: fully_shard was called"):
            fully_shard(module)
    model = fully_shard(Net())
    with refused(model, ValueError, "'weight' in this Linear is sharded already, as 'head.weight' of the unit around"):
        fully_shard(model.head)
    for ignored in ("blocks.1", "blocks.1.linear"):
        model = Net()
        fully_shard(model.blocks[1].linear)
        with refused(model, ValueError, "'blocks.1.linear' is sharded already, but is in an ignored module: do not"):
            fully_shard(model, ignored_states=[model.get_submodule(ignored)])


def chosen(overrides: dict[str, Any]) -> CustomPolicy:
    return CustomPolicy(lambda m: overrides if isinstance(m, Block) else False)


def mesh(*shape: int, names: Any = None) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


HYBRID, BF16 = ShardingStrategy.HYBRID_SHARD, torch.bfloat16
WRONG: list[tuple[Callable[[Net], dict[str, Any]], type[Exception], str]] = [
    (lambda m: {"process_group": dist.new_group([1, 2])}, ValueError, "rank 0 is not a member of the given process"),
    (lambda m: {"device_mesh": DeviceMesh("cpu", [1, 2])}, ValueError, "rank 0 is not a member of the given"),
    (lambda m: {"process_group": dist.group.WORLD, "device_mesh": mesh(4)}, ValueError, "pass process_group or"),
    (lambda m: {"device_mesh": mesh(2, 2)}, ValueError, "device_mesh has 2 dimensions None: pass the one to shard"),
    (lambda m: {"device_mesh": 4}, TypeError, "device_mesh must be a DeviceMesh, got a int"),
    (lambda m: {"strategy": HYBRID}, ValueError, "LOCAL_WORLD_SIZE=None does not divide the 4 ranks: launch with"),
    (lambda m: {"strategy": TorchStrategy._HYBRID_SHARD_ZERO2}, ValueError, "without device_mesh shards within a"),
    (lambda m: {"strategy": None}, ValueError, "strategy=None is not one of ShardingStrategy.FULL_SHARD"),
    (lambda m: {"device_id": "cud"}, ValueError, "device_id='cud' is no device: pass a torch.device, its name or"),
    (lambda m: {"device_id": "cuda"}, ValueError, "device_id='cuda', but this process has no accelerator: omit it"),
    (lambda m: {"backward_prefetch": HYBRID}, ValueError, "is not one of BackwardPrefetch.BACKWARD_PRE"),
    (lambda m: {"limit_all_gathers": False}, ValueError, "limit_all_gathers=False has no meaning here: the host"),
    (lambda m: {"mixed_precision": BF16}, TypeError, "mixed_precision must be a flatshard.MixedPrecision or one"),
    (lambda m: {"cpu_offload": "params"}, TypeError, "cpu_offload must be a flatshard.CPUOffload, a bool, or one of"),
    (lambda m: {"policy": {nn.ModuleList}}, ValueError, "the policy chose 'blocks', a ModuleList, which has no"),
    (lambda m: {"policy": chosen({"sharding_strategy": TorchStrategy.HYBRID_SHARD})}, ValueError, "the policy chose"),
    (lambda m: {"policy": chosen({"mixed_precision": 16})}, TypeError, "the policy's mixed_precision must be"),
    (lambda m: {"ignored_states": [m.head, Block()]}, ValueError, "ignored_states: a Block is not a submodule of Net"),
    (lambda m: {"ignored_states": [nn.Parameter(torch.ones(3, 2))]}, ValueError, "a parameter of shape (3, 2) is"),
    (lambda m: {"ignored_states": [m]}, ValueError, "ignored_states contains the module that is to be sharded"),
    (lambda m: {"ignored_states": m.head.weight}, TypeError, "ignored_states contains a Tensor"),
    (lambda m: {"ignored_states": "head"}, TypeError, "ignored_states contains a str; it takes modules and"),
    (lambda m: {"polcy": {Block}}, TypeError, "no argument 'polcy': did you mean 'policy'?"),
    (lambda m: {"zzz": 1}, TypeError, "no argument 'zzz'"),
    (lambda m: {"auto_wrap_policy": {Block}, "policy": {Block}}, TypeError, "'policy' and 'auto_wrap_policy' are two"),
    (lambda m: {"shard_placement_fn": None}, TypeError, "no argument 'shard_placement_fn': "),
    (lambda m: {"dp_mesh_dims": 1}, TypeError, "must be a torch.distributed.fsdp.DataParallelMeshDims, got 1"),
    (lambda m: {"use_orig_params": True}, TypeError, "no argument 'use_orig_params': omit it"),
]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without an accelerator")
def test_wrong_or_missing_choices():
    for arguments, kind, message in WRONG:
        model = Net()
        with refused(model, kind, message):
            fully_shard(model, **arguments(model))
    dist.destroy_process_group()
    with refused(model, RuntimeError, "needs a process group: call torch.distributed.init_process_group(...)"):
        fully_shard(model)


def test_every_name_of_fsdp_is_known():
    ours = set(inspect.signature(fully_shard).parameters)
    for function in (FullyShardedDataParallel.__init__, fsdp2):
        theirs = list(inspect.signature(function).parameters)[1:]
        assert {*theirs} <= {*ours, *SAME_VALUES, *OTHER_VALUES, "module", "dp_mesh_dims"}
    assert set(SAME_VALUES.values()) <= ours
    assert not ours & {*SAME_VALUES, *OTHER_VALUES}


def test_names_are_accepted():
    model = Net()
    ignored, policy = model.head.weight, MixedPrecisionPolicy(param_dtype=BF16)
    fully_shard(model.blocks[0], mesh=mesh(4), mp_policy=policy, offload_policy=CPUOffloadPolicy(pin_memory=False))
    arguments = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "sharding_strategy": TorchStrategy.SHARD_GRAD_OP}
    fully_shard(model, ignored_params={ignored}, **arguments)
    config = unit_of(model.blocks[0]).config
    assert (config.mixed_precision.param_dtype, config.cpu_offload.offload_params) == (BF16, True)
    assert describe(model.blocks[1]).units[0].strategy == "SHARD_GRAD_OP"
    assert model.head.weight is ignored
    for name, strategy in (("zero1", "SHARD_OPTIM"), ("zero2", "SHARD_GRAD_OP"), ("zero3", "FULL_SHARD")):
        assert describe(fully_shard(Net(), strategy=name)).units[0].strategy == strategy


ODD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: torch.ones(4, 4), NotImplementedError, "is annotated by spmd_types with {'tp': 'R'}, which flatshard"),
    (lambda: distribute_tensor(torch.ones(4, 4), mesh(4)), ValueError, "is a DTensor over ranks [0, 1, 2, 3], and"),
    (lambda: torch.eye(4).to_sparse(), ValueError, "has layout torch.sparse_coo: only dense parameters can be sharded"),
    (nn.UninitializedParameter, ValueError, "is lazy and has no shape yet: run one forward before fully_shard"),
]


@pytest.mark.parametrize("policy", [None, {Block}], ids=["root", "blocks"])
def test_a_parameter_that_cannot_be_flattened(monkeypatch, policy):
    """Tests of tensor subclasses are in ``handle/test_tensor_subclass``. A stand-in replaces the package spmd_types."""
    for make, kind, message in ODD:
        model = Net()
        made = make()
        weight = model.blocks[1].linear.weight = made if isinstance(made, nn.Parameter) else nn.Parameter(made)
        spmd_types = SimpleNamespace(get_local_type=lambda p, w=weight: {"tp": "R"} if p is w else {})
        with monkeypatch.context() as patch, refused(model, kind, f"parameter 'blocks.1.linear.weight' {message}"):
            if kind is NotImplementedError:
                patch.setitem(sys.modules, "spmd_types", spmd_types)
            fully_shard(model, policy=policy)
        fully_shard(model, policy=policy, ignored_states=[weight])  # the cure if there is no better one
        assert model.blocks[1].linear.weight is weight


def test_parameters_that_only_look_odd():
    class Mine(nn.Parameter):
        """A subclass without its own dispatch."""

    class DDP(nn.Linear):
        """A class with the name of torch's."""

    model = nn.Sequential(nn.LazyLinear(4), DDP(4, 4))
    model(torch.ones(2, 3))  # the cure for lazy parameters in the message
    model[0].weight = Mine(torch.ones(4, 3))
    model.num_replicates = 2
    model[1]._replicate = True
    fully_shard(model, policy={DDP})
    assert [len(u.flats[0].fqns) for u in describe(model).units] == [2, 2]


@pytest.mark.parametrize("policy", [None, {nn.Linear}], ids=["one unit", "two units"])
def test_two_parameters_in_the_same_memory(policy):
    names = "'blocks.0.linear.weight' and 'blocks.1.linear.weight'"
    for views in (lambda base: (base, base.t()), lambda base: (base[:3], base[1:]), lambda base: (base, base[3:])):
        model = Net()
        model.blocks[0].linear.weight, model.blocks[1].linear.weight = map(nn.Parameter, views(torch.ones(4, 4)))
        with refused(model, ValueError, f"parameters {names} are different Parameter objects in the same"):
            fully_shard(model, policy=policy)
    base = torch.ones(8, 4)  # adjacent views are two parameters
    model.blocks[0].linear.weight, model.blocks[1].linear.weight = nn.Parameter(base[:4]), nn.Parameter(base[4:])
    assert describe(fully_shard(model)).numel == sum(p.numel() for p in Net().parameters())


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DistributedDataParallel": nn.parallel.DistributedDataParallel,
    "FullyShardedDataParallel": lambda m: FullyShardedDataParallel(
        m, use_orig_params=True, device_id=torch.device("cpu")
    ),
    "FSDPModule": lambda m: fsdp2(m, mesh=mesh(4)),
    "DDP": lambda m: pytest.importorskip("torch.distributed._composable.replicate").replicate(m),
    "ReplicateModule": lambda m: pytest.importorskip("torch.distributed._composable.replicate_with_fsdp").replicate(
        m, mesh=mesh(4, names=("replicate",))
    ),
}


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.filterwarnings("ignore")
def test_what_another_wrapper_manages(name: str):
    model = WRAPPERS[name](Net())
    with pytest.raises(ValueError, match=f"'the module' is managed by {name} already"):
        fully_shard(model)
    model = Net()
    model.blocks[1] = WRAPPERS[name](model.blocks[1])
    with pytest.raises(ValueError, match=f"'blocks.1' is managed by {name} already: unwrap it, or pass it in ignored"):
        fully_shard(model)
    assert type(model.head.weight) is nn.Parameter
    fully_shard(model, ignored_states=[model.blocks[1]])
    assert describe(model).numel == sum(p.numel() for p in Net(2).parameters())


def on_meta() -> nn.Sequential:
    """Return a model on meta whose second layer has a buffer that its initialiser does not fill."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].register_buffer("table", torch.ones(3))
    return model


def test_a_failure_after_the_change_has_begun_says_so():
    """An unfilled buffer shows only after the initialiser has run, when earlier units are already sharded."""
    model = on_meta()
    with pytest.raises(RuntimeError, match=r"'1\.table' were on the meta device and have not been initialised") as e:
        fully_shard(model, policy={nn.Linear}, device_id="cpu")
    assert e.value.__notes__ == ["fully_shard had begun to change this Sequential: build it anew before you try again."]
    # No hook is left, so the half-sharded module neither trains nor can be sharded again by mistake.
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert unit_of(model[1]) is None
    with pytest.raises(ValueError, match="this Sequential is sharded already"):
        fully_shard(model)
    for init in (None, lambda m: m.reset_parameters()):
        model = on_meta()
        with (
            mock.patch.object(nn.Linear, "reset_parameters", side_effect=ZeroDivisionError("mine")),
            pytest.raises(ZeroDivisionError, match="mine") as e,
        ):
            fully_shard(model, policy={nn.Linear}, param_init_fn=init, device_id="cpu")
        assert "build it anew" in e.value.__notes__[0]
        assert not torch.__future__.get_swap_module_params_on_conversion()


def test_what_a_dtensor_would_have(world):
    """Ported scripts learn what to write; ``hasattr`` and ``getattr`` with a default find nothing."""
    world(2)
    model = fully_shard(nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    param, value = model.weight, model.state_dict()["weight"]
    cures = {
        "full_tensor": r"flatshard\.summon_full_params\(module\)",
        "redistribute": "it stays as it is.*summon_full_params",
        "to_local": "use it as it is",
        "placements": r"shard_info\(p\).*module.load_state_dict",
        "device_mesh": r"shard_info\(p\).*module.load_state_dict",
    }
    for who, shard in (
        ("parameter 'weight' is this rank's shard", param),
        ("the gradient of parameter 'weight' is this rank's shard", param.grad),
        ("parameter 'weight' is this rank's shard", param.detach()),
        (r"this is the sharded tensor 'weight' of shape \(4, 4\)", value),
    ):
        for name in cures.keys() - ({"full_tensor", "to_local"} if shard is value else set()):
            told = rf"^{who}, and not a DTensor with {name}: .*{cures[name]}"
            with pytest.raises(AttributeError, match=told):
                getattr(shard, name)
            assert not hasattr(shard, name)
