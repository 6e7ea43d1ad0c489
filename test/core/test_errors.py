"""The user's mistakes: each raises before anything is changed, and says who, what and the cure.

What ``fully_shard`` refuses is refused by looking, never by trying, so one process with the fake process group is enough.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy as TorchStrategy

import flatshard
from flatshard import BackwardPrefetch, CustomPolicy, ShardingStrategy, describe, fully_shard
from flatshard._composable.find import units_below
from flatshard._composable.state import unit_of


@pytest.fixture(autouse=True)
def _four_ranks(world) -> None:
    """This process is the first; nobody else is there."""
    world(4)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        return torch.relu(self.linear(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 7)

    def forward(self, i):
        x = self.embed(i)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# What a module keeps besides its parameters and buffers, and what of it an object can be compared by.
HOOKS = [key for key in nn.Module().__dict__ if key.endswith("_hooks")]


class Snapshot:
    """All that can be seen of a module tree: classes, objects, values, attributes, hooks."""

    def __init__(self, root: nn.Module) -> None:
        self.modules = [(n, m, type(m)) for n, m in root.named_modules()]
        self.keys = {n: list(m.__dict__) for n, m, _ in self.modules}
        self.hooks = {(n, key): list(m.__dict__[key].items()) for n, m, _ in self.modules for key in HOOKS}
        self.tensors = [
            (name, t, type(t), t.data_ptr() if _has_memory(t) else None, _copy(t), dict(t.__dict__))
            for name, t in [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]
        ]

    def assert_same(self, other: Snapshot) -> None:
        assert [n for n, _, _ in self.modules] == [n for n, _, _ in other.modules]
        for (n, m, kind), (_, m2, kind2) in zip(self.modules, other.modules, strict=True):
            assert m is m2, n
            assert kind is kind2, n
        assert self.keys == other.keys
        assert self.hooks == other.hooks
        assert [t[0] for t in self.tensors] == [t[0] for t in other.tensors]
        for (name, t, *look, value, _), (_, t2, *look2, value2, _) in zip(self.tensors, other.tensors, strict=True):
            assert t is t2, name
            assert look == look2, name
            assert _same(value, value2), name
        assert [t[-1] for t in self.tensors] == [t[-1] for t in other.tensors]


def _has_memory(t: torch.Tensor) -> bool:
    return t.layout is torch.strided and not t.is_meta and type(t) in (nn.Parameter, torch.Tensor)


def _copy(t: torch.Tensor) -> Any:
    if isinstance(t, nn.UninitializedParameter):
        return None
    return t.detach().clone()


def _same(a: Any, b: Any) -> bool:
    if a is None or a.is_meta:
        return (a is None) == (b is None) and (a is None or a.shape == b.shape)
    if type(a) is not torch.Tensor or a.layout is not torch.strided:
        return str(a) == str(b)
    return torch.equal(a, b)


@contextlib.contextmanager
def refused(root: nn.Module, kind: type[Exception], message: str) -> Iterator[None]:
    """The body raises ``kind`` with ``message`` (plain text, not a pattern), and has changed nothing in ``root``."""
    before = Snapshot(root)
    with pytest.raises(kind, match=re.escape(message)) as caught:
        yield
    assert caught.type is kind, f"a {caught.type.__name__} is not the error to raise here"
    before.assert_same(Snapshot(root))
    assert not hasattr(caught.value, "__notes__")  # no "build it anew"


# -- the module --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "kind", "message"),
    [
        (None, TypeError, "fully_shard takes an nn.Module as module, got a NoneType"),
        (torch.ones(2), TypeError, "fully_shard takes an nn.Module as module, got a Tensor"),
        (nn.Linear, TypeError, "fully_shard takes an nn.Module as module, got a type"),
        ([Block(), "head"], TypeError, "an item of the list, got a str"),
        (
            nn.ModuleList([Block()]),
            ValueError,
            "has no forward, so its hooks would never run. Shard its items, `for m in",
        ),
        (
            nn.ModuleDict({"a": Block()}),
            ValueError,
            "has no forward, so its hooks would never run. Shard its items, `for m",
        ),
    ],
    ids=["None", "tensor", "class", "item", "list", "dict"],
)
def test_what_is_no_module(module, kind, message: str):
    with (
        refused(module, kind, message)
        if isinstance(module, nn.Module)
        else pytest.raises(kind, match=re.escape(message))
    ):
        fully_shard(module)


def test_sharded_twice():
    model = fully_shard(Net(), policy={Block})
    with refused(model, ValueError, "this Net is sharded already: fully_shard was called on it, or a policy chose it"):
        fully_shard(model)
    with refused(model, ValueError, "this Block is sharded already"):
        fully_shard(model.blocks[1])
    model = fully_shard(Net())
    message = (
        "'weight' in this Linear is sharded already, as 'head.weight' of the unit around it, a Net: shard inner modu"
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


# -- process groups ----------------------------------------------------------------------------------------------------


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
WRONG: list[tuple[Callable[[Net], dict[str, Any]], type[Exception], str]] = [
    (lambda m: {"process_group": dist.new_group([1, 2])}, ValueError, "rank 0 is not a member of the given process"),
    (lambda m: {"device_mesh": DeviceMesh("cpu", [1, 2])}, ValueError, "rank 0 is not a member of the given"),
    (lambda m: {"process_group": dist.group.WORLD, "device_mesh": mesh(4)}, ValueError, "pass process_group or"),
    (
        lambda m: {"device_mesh": mesh(2, 2, names=PAIR)},
        ValueError,
        f"device_mesh has 2 dimensions {PAIR}: pass the one to",
    ),
    (lambda m: {"device_mesh": mesh(2, 2)}, ValueError, "device_mesh has 2 dimensions None: pass the one to shard"),
    (lambda m: {"device_mesh": 4}, TypeError, "device_mesh must be a DeviceMesh, got a int"),
    (lambda m: {"strategy": HYBRID}, ValueError, "LOCAL_WORLD_SIZE=None does not divide the 4 ranks: launch with"),
    (lambda m: {"strategy": TorchStrategy._HYBRID_SHARD_ZERO2}, ValueError, "without device_mesh shards within a"),
    (lambda m: {"strategy": "fully_shard"}, ValueError, "strategy='fully_shard' is not one of"),
    (lambda m: {"strategy": None}, ValueError, "strategy=None is not one of ShardingStrategy.FULL_SHARD"),
    (lambda m: {"strategy": BackwardPrefetch.BACKWARD_PRE}, ValueError, "is not one of"),
    (lambda m: {"device_id": "cud"}, ValueError, "device_id='cud' is no device: pass a torch.device, its name or"),
    (lambda m: {"backward_prefetch": True}, ValueError, "backward_prefetch=True is not one of"),
    (lambda m: {"backward_prefetch": HYBRID}, ValueError, "is not one of BackwardPrefetch.BACKWARD_PRE"),
    (lambda m: {"limit_all_gathers": False}, ValueError, "limit_all_gathers=False has no meaning here: the host"),
    (lambda m: {"limit_all_gathers": 2}, ValueError, "limit_all_gathers"),
    (lambda m: {"mixed_precision": BF16}, TypeError, "mixed_precision must be a flatshard.MixedPrecision or one"),
    (lambda m: {"cpu_offload": "params"}, TypeError, "cpu_offload must be a flatshard.CPUOffload, a bool, or one of"),
    (lambda m: {"policy": {nn.ModuleList}}, ValueError, "the policy chose 'blocks', a ModuleList, which has no"),
    (lambda m: {"policy": CustomPolicy(lambda m: isinstance(m, nn.ModuleList))}, ValueError, "the policy chose"),
    (lambda m: {"policy": chosen({"mixed_precision": 16})}, TypeError, "the policy's mixed_precision must be"),
    (lambda m: {"policy": chosen({"cpu_offload": 1})}, TypeError, "cpu_offload must be"),
    (lambda m: {"policy": chosen({"sharding_strategy": TorchStrategy.HYBRID_SHARD})}, ValueError, "the policy chose"),
    (lambda m: {"policy": chosen({"process_group": None})}, ValueError, "overrides 'process_group' for a Block; it"),
    (lambda m: {"policy": chosen({"ignored_states": []})}, ValueError, "the policy overrides 'ignored_states' for a"),
    (lambda m: {"ignored_states": m.head.weight}, TypeError, "ignored_states contains a Tensor"),
    (lambda m: {"ignored_states": ["head"]}, TypeError, "ignored_states contains a str; it takes modules and"),
    (lambda m: {"ignored_states": "head"}, TypeError, "ignored_states contains a str; it takes modules and"),
    (lambda m: {"ignored_states": [m.blocks[0].seen]}, TypeError, "ignored_states contains a Tensor"),
    (lambda m: {"ignored_states": [Block]}, TypeError, "ignored_states contains a type"),
    (lambda m: {"ignored_states": [None]}, TypeError, "ignored_states contains a NoneType"),
    (lambda m: {"ignored_states": [m.head, Block()]}, ValueError, "ignored_states: a Block is not a submodule of Net"),
    (lambda m: {"ignored_states": [nn.Parameter(torch.ones(3, 2))]}, ValueError, "a parameter of shape (3, 2) is"),
    (lambda m: {"ignored_states": [m]}, ValueError, "ignored_states contains the module that is to be sharded"),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), WRONG)
def test_wrong_or_missing_choices(arguments, kind, message: str):
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


@pytest.mark.parametrize("ignored", ["blocks.1", "blocks", "blocks.1.linear"])
def test_a_unit_inside_an_ignored_module(ignored: str):
    model = Net()
    fully_shard(model.blocks[1].linear)
    message = "'blocks.1.linear' is sharded already, but is in an ignored module: do not shard it, or do not ignore"
    with refused(model, ValueError, message):
        fully_shard(model, ignored_states=[model.get_submodule(ignored)])


# -- parameters --------------------------------------------------------------------------------------------------------


class Labelled(torch.Tensor):
    """A tensor subclass with its own dispatch, such as a quantised weight."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Labelled:
        result = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        result.inner = inner
        return result

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(args[0].inner)
        raise NotImplementedError(str(func))

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"Labelled({self.inner})"


class Watched(nn.Parameter):
    """A parameter subclass with its own ``__torch_function__``."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def _dtensor() -> nn.Parameter:
    from torch.distributed.tensor import Replicate, distribute_tensor

    return nn.Parameter(distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (4,)), [Replicate()]))


def _annotated() -> nn.Parameter:
    """As the package spmd_types does it, of which the test has a stand-in."""
    made = nn.Parameter(torch.ones(4, 4))
    made._local_type = {"tp": "R"}
    return made


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (
            _annotated,
            NotImplementedError,
            "parameter 'blocks.1.linear.weight' is annotated by spmd_types with {'tp': 'R'}, which flatshard does not read",
        ),
        (
            _dtensor,
            ValueError,
            "parameter 'blocks.1.linear.weight' is a DTensor over ranks [0, 1, 2, 3], and would be sharded over ranks [0, ",
        ),
        (
            lambda: nn.Parameter(Labelled(torch.ones(4, 4))),
            ValueError,
            "parameter 'blocks.1.linear.weight' is a Labelled, a tensor subclass that does not say which tensors are inside: "
            "give it __tensor_flatten__ and __tensor_unflatten__, or pass it in ignored_states",
        ),
        (lambda: Watched(torch.ones(4, 4)), ValueError, "parameter 'blocks.1.linear.weight' is a Watched"),
        (
            lambda: nn.Parameter(torch.eye(4).to_sparse()),
            ValueError,
            "parameter 'blocks.1.linear.weight' has layout torch.sparse_coo: only dense parameters can be sharded",
        ),
        (
            nn.UninitializedParameter,
            ValueError,
            "parameter 'blocks.1.linear.weight' is lazy and has no shape yet: run one",
        ),
    ],
    ids=["spmd_types", "DTensor", "dispatch", "function", "sparse", "lazy"],
)
@pytest.mark.parametrize("policy", [None, {Block}], ids=["root", "blocks"])
def test_a_parameter_that_cannot_be_flattened(monkeypatch, make, kind, message: str, policy):
    spmd_types = SimpleNamespace(get_local_type=lambda param: param.__dict__.get("_local_type", {}))
    monkeypatch.setitem(sys.modules, "spmd_types", spmd_types)
    model = Net()
    model.blocks[1].linear.weight = make()
    with refused(model, kind, message):
        fully_shard(model, policy=policy)
    weight = model.blocks[1].linear.weight
    fully_shard(model, policy=policy, ignored_states=[weight])  # the cure, where there is no better one
    assert model.blocks[1].linear.weight is weight


def test_lazy_modules():
    model = nn.Sequential(nn.LazyLinear(4), Block())
    message = "parameter '0.weight' is lazy and has no shape yet: run one forward before fully_shard"
    with refused(model, ValueError, message):
        fully_shard(model)
    model(torch.ones(2, 3))
    assert describe(fully_shard(model)).numel == 3 * 4 + 4 + 4 * 4 + 4


def test_a_parameter_subclass_without_its_own_dispatch_is_a_parameter():
    class Mine(nn.Parameter):
        pass

    model = Net()
    model.head.weight = Mine(torch.ones(7, 4))
    assert "head.weight" in describe(fully_shard(model)).units[0].flats[0].fqns


@pytest.mark.parametrize("policy", [None, {nn.Linear}], ids=["one unit", "two units"])
def test_two_parameters_in_the_same_memory(policy):
    message = (
        "parameters 'blocks.0.linear.weight' and 'blocks.1.linear.weight' are different Parameter objects in the same"
    )
    for views in (
        lambda base: (base, base),  # the same elements under two objects
        lambda base: (base, base.t()),
        lambda base: (base[:3], base[1:]),
        lambda base: (base, base[3:]),
    ):
        model = Net()
        first, second = views(torch.ones(4, 4))
        model.blocks[0].linear.weight, model.blocks[1].linear.weight = nn.Parameter(first), nn.Parameter(second)
        with refused(model, ValueError, message):
            fully_shard(model, policy=policy)
    base = torch.ones(8, 4)  # side by side they are two
    model.blocks[0].linear.weight, model.blocks[1].linear.weight = nn.Parameter(base[:4]), nn.Parameter(base[4:])
    assert describe(fully_shard(model)).numel == sum(p.numel() for p in Net().parameters())


@pytest.mark.gpu
def test_parameters_on_different_devices():
    model = Net()
    model.head.cuda()
    message = (
        "parameters are on different devices: 'embed.weight', 'blocks.0.linear.weight', 'blocks.0.linear.bias', ... ("
    )
    with refused(model, ValueError, message):
        fully_shard(model)
    fully_shard(model, device_id="cuda")  # the cure that the message names
    assert describe(model).device == torch.device("cuda", 0)


# -- other wrappers ----------------------------------------------------------------------------------------------------


def _ddp(module: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module)


def _fsdp1(module: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))


def _fsdp2(module: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard as theirs

    return theirs(module, mesh=init_device_mesh("cpu", (4,)))


def _replicate(module: nn.Module) -> nn.Module:
    from torch.distributed._composable.replicate import replicate

    return replicate(module)


def _replicate_with_fsdp(module: nn.Module) -> nn.Module:
    replicating = pytest.importorskip("torch.distributed._composable.replicate_with_fsdp")
    return replicating.replicate(module, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("replicate",)))


WRAPPERS = {
    "DistributedDataParallel": _ddp,
    "FullyShardedDataParallel": _fsdp1,
    "FSDPModule": _fsdp2,
    "DDP": _replicate,
    "ReplicateModule": _replicate_with_fsdp,
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
    assert describe(model).numel == sum(p.numel() for m in (Net().embed, Block(), Net().head) for p in m.parameters())


def test_a_users_names_are_not_mistaken_for_another_wrapper():
    class DDP(nn.Linear):
        """The user's own class of that name."""

    model = nn.Sequential(DDP(4, 4))
    model.num_replicates = 2
    model[0]._replicate = True
    fully_shard(model, policy={DDP})
    assert len(units_below(model)) == 2


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


def _on_meta(*makes: Callable[[], nn.Module]) -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(4, 4), *(make() for make in makes))


@pytest.mark.parametrize("policy", [None, {Bare}], ids=["one unit", "two units"])
def test_a_meta_module_without_reset_parameters(policy):
    model = _on_meta(Bare)
    message = (
        "'1.scale', '1.table' are on the meta device and their modules cannot initialise them. Give their modules a "
        "reset_parameters() that sets every parameter and buffer (non-persistent ones too), or pass param_init_fn=..."
    )
    with refused(model, RuntimeError, message):
        fully_shard(model, policy=policy, device_id="cpu")


def test_a_failure_after_the_change_has_begun_says_so():
    """What an initialiser leaves out can only show when it has run, unit by unit, with earlier units sharded by then."""
    model = _on_meta(Forgetful)
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


@pytest.mark.parametrize("in_function", [False, True])
def test_an_error_of_the_users_own_initialiser_comes_through(in_function: bool):
    model = _on_meta(Broken)
    init = (lambda m: m.reset_parameters()) if in_function else None
    with pytest.raises(ZeroDivisionError, match="mine") as e:
        fully_shard(model, policy={Broken}, param_init_fn=init, device_id="cpu")
    assert "build it anew" in e.value.__notes__[0]
    assert not torch.__future__.get_swap_module_params_on_conversion()


def test_a_param_init_fn_that_leaves_something_out():
    model = _on_meta(Bare)
    message = r"'1\.table' were on the meta device and have not been initialised \(param_init_fn was called for their "
    with pytest.raises(RuntimeError, match=message):
        fully_shard(model, param_init_fn=lambda m: None)
