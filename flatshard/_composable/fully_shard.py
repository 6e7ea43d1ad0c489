"""``fully_shard``: the phases of the construction, in order."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flatshard._base.config import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from flatshard._base.errors import InternalError, warn_user
from flatshard._base.names import UNIT_KEY, module_names
from flatshard._comm.collectives import CollectivesFactory
from flatshard._comm.runtime import Runtime
from flatshard._composable.construct.groups import (
    as_device,
    choose_meshes,
    default_device,
    resolve_groups,
    runtimes_over,
)
from flatshard._composable.construct.layout_plan import Loads, plan_flats
from flatshard._composable.construct.materialize import Materialization
from flatshard._composable.construct.partition import (
    PlannedUnit,
    check_parameters,
    list_paths,
    plan_units,
    resolve_ignored,
    warn_of_experts,
    warn_of_old_parameters,
)
from flatshard._composable.construct.policy import Policy, check_group, check_module, choose_units
from flatshard._composable.extensions import Extension, ForwardFeature, extensions, overriding, set_up
from flatshard._composable.find import units_below
from flatshard._composable.hooks import UnitHooks
from flatshard._composable.module_tree import ModuleGroup, ModuleTree, called_modules, copy_with_attributes
from flatshard._composable.state import Context, Unit, owner_of
from flatshard._composable.unit_config import (
    FSDPNamed,
    MeshChoice,
    UnitConfig,
    check_limit_all_gathers,
    check_named,
    configure_units,
    renamed,
    unit_config,
)
from flatshard._handle.adapters.tensor_subclass import wrapping_of
from flatshard._handle.handle import FlatParamHandle
from flatshard._handle.layout import Groups, PlannedFlat
from flatshard._handle.unit_ranks import Runtimes, UnitRanks
from flatshard._handle.unsharded import Pools
from flatshard.layouts import LayoutChoice

M = TypeVar("M", bound=nn.Module | Sequence[nn.Module])


def fully_shard(
    module: M,
    *unnamed: NoReturn,
    policy: Policy = None,
    process_group: dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None,
    device_mesh: DeviceMesh | None = None,
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
    mixed_precision: MixedPrecision | Any = None,
    cpu_offload: CPUOffload | Any = None,
    ignored_states: Iterable[nn.Module | nn.Parameter] | None = None,
    device_id: int | torch.device | str | None = None,
    param_init_fn: Callable[[nn.Module], None] | None = None,
    sync_module_states: bool = False,
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
    forward_prefetch: bool = True,
    prefetch_limit_bytes: int | None = None,
    reshard_after_forward: bool | int | None = None,
    limit_all_gathers: bool = True,
    collectives: CollectivesFactory | None = None,
    layout: LayoutChoice = None,
    static_buffers: bool = False,
    shard_mesh_fn: MeshChoice = None,
    recompute: bool = False,
    **fsdp_names: Any,
) -> M:
    """Shard ``module``'s parameters, gradients and optimizer state over the ranks of a process group, in place.

    Returns the same object, of the same class, with the same FQNs. Between steps each parameter is the user's own
    ``nn.Parameter``, which holds this rank's shard as a 1-D tensor; :func:`full_shape` gives its unsharded shape. Inside
    forward, modules see parameters of full shape. Gradients are averaged over the ranks, as in DDP.

    Example::

        flatshard.fully_shard(model, policy={Block})  # every Block a unit, the rest of the model one more
        optimizer = torch.optim.AdamW(model.parameters())

    Args:
        module: the module to shard. Submodules that earlier calls have sharded stay as they are. A list of modules, such as
            ``[model.norm, model.head]``, becomes one unit, with one all-gather. It is gathered when the first of them runs,
            and freed after the last one, or at the end of a pass in which not all of them run. The list is returned.
        policy: which submodules become units of their own, gathered one at a time: a module class, a set of classes,
            :class:`ModuleWrapPolicy`, :class:`CustomPolicy`, or a callable ``(module, recurse, nonwrapped_numel) -> bool``;
            also the policies of ``torch.distributed.fsdp.wrap``. None makes ``module`` a single unit. A tuple of modules
            beside the classes is one unit: ``policy={Block, (model.norm, model.head)}``. ``"auto"`` chooses the blocks that
            ``module`` repeats, see :func:`~flatshard.policies.find_blocks`. Names of modules choose these, each with the
            arguments that it overrides: ``policy={"layers.0": {}, "layers.1": {"reshard_after_forward": False}}``. The name
            of ``module`` itself is "".
        process_group: the ranks to shard over, by default all. For hybrid strategies, a tuple (ranks to shard over, ranks
            that replicate this rank's shard); by default, units are sharded within a node.
        device_mesh: the same as a 1-D mesh, such as ``mesh["dp"]``; for hybrid strategies, a 2-D mesh (replicate, shard).
        strategy: see :class:`ShardingStrategy`.
        mixed_precision: see :class:`MixedPrecision`; also the policies of FSDP1 and FSDP2.
        cpu_offload: see :class:`CPUOffload`; also True, and the policies of FSDP1 and FSDP2.
        ignored_states: modules or parameters that are not sharded. The caller must reduce their gradients.
        device_id: the device to move parameters and buffers to before they are sharded, one unit at a time.
        param_init_fn: a function that initialises the parameters and buffers that a module itself has on the meta device.
            It is called after their memory has been allocated. By default ``module.reset_parameters()`` is called. The result
            is broadcast from rank 0. So a module must be on meta on all ranks or on none; with ``sync_module_states`` it may
            be on some. A module whose parameters are all on meta stays there if none of ``param_init_fn``, ``device_id`` and
            ``sync_module_states`` is given. Then call ``module.to_empty(device=...)`` next, and initialise it or load a
            state. ``init_weights()`` sees unsharded parameters, unit by unit, and DTensors as such: seed all ranks alike.
        sync_module_states: whether to give every rank the parameters and buffers of the group's rank 0.
        backward_prefetch: when to gather the next unit in backward, or None for not ahead of time.
        forward_prefetch: whether to gather, while a unit computes, the unit that came next in the last pass.
        prefetch_limit_bytes: a limit for unsharded parameters that are gathered ahead and not in use yet. A prefetch that
            would exceed it is not done. None means no limit.
        reshard_after_forward: whether to free the parameters after forward, and gather them again for backward. None does
            what the strategy says, but the outermost unit always keeps them. An int ``k`` that divides the number of ranks
            sharded over keeps a k-th of them, in the compute dtype, and gathers for backward among ``k`` consecutive ranks
            only, usually those of a node. This creates process groups, so every rank of the world must make the same calls.
            The number of ranks means True; 1 means False. :func:`configure` changes it.
        limit_all_gathers: must be True; see Raises.
        collectives: a factory ``(group, device) -> Collectives`` for the collectives of these units, instead of the backend's
            own: :class:`QuantizedCollectives`, or a class that you write like :class:`Collectives`. A :class:`CustomPolicy`
            may override it per unit.
        layout: how parameters may be cut between ranks: :class:`Elements` (the default: anywhere), :class:`Rows`,
            :class:`Blocks`, :class:`Whole`, or a callable ``(fqn, parameter) -> layout``. With ``Rows`` and ``Whole`` a
            rank's shard keeps its dimensions. A :class:`CustomPolicy` may override it per unit. Checkpoints fit any layout. A
            tensor subclass with several tensors inside is sharded as bytes, without rows or blocks: it is cut anywhere.
        static_buffers: whether to gather parameters into a few buffers that are allocated once and used in turn, and to
            reduce gradients from such buffers. Otherwise the device's allocator provides memory each time. For CUDA graphs
            and registered buffers. The buffers permanently take the memory that two units and the outermost one need in any
            case; a model shares them with no other. Collectives with an ``allocate`` always use such buffers. Buffers
            are assigned in the first pass: units that share one cannot be unsharded at the same time later.
        shard_mesh_fn: a callable ``(fqn, parameter) -> mesh`` that chooses the mesh of single parameters, such as experts.
            It returns a mesh as for ``device_mesh``, here of the ranks that hold the same experts (``mesh["dp"]``), or None
            for the mesh of the call. The gradients are summed over that mesh, and divided by the number of ranks of the
            call, or by ``configure(divide_factor=...)``. Total norms add the experts of all ranks. For a checkpoint with
            all experts under one name, first make them DTensors over the other dimension of the mesh. A
            :class:`CustomPolicy` may override it per unit. Not for ``NO_SHARD``, nor for ``reshard_after_forward=k``.
        recompute: whether units keep only their inputs from forward to backward, and compute their forward again in
            backward (activation checkpointing). Nothing is gathered for it, and no name changes. It does not apply to
            ``module`` itself if there are units in it. A policy may override it per unit. The forward must compute the same
            twice: torch's checkpoint refuses a cache that it extends (``use_cache=True``).
        fsdp_names: arguments under the names that FSDP1 and FSDP2 have for them: ``auto_wrap_policy``, ``mesh``,
            ``mp_policy``, ... A name with another meaning raises an error that says what to write.

    Raises:
        TypeError, ValueError: an argument is wrong; the message says which, and what to do. Nothing has been changed.
        RuntimeError: no process group is initialised; or a parameter or buffer on the meta device was not initialised. If
            this is found after its module's initialiser ran, the module is half sharded, and a note says so.
        NotImplementedError: a parameter is a DTensor with another tensor subclass inside.
        ValueError: ``limit_all_gathers=False``. In FSDP1 it removes a wait of the host that bounds memory. Here the host
            never waits, and the order of streams bounds memory.
    """
    check_named(fully_shard, unnamed)
    if fsdp_names:
        ours = FSDPNamed(policy, device_mesh, strategy, mixed_precision, cpu_offload, ignored_states)
        ours = renamed(fsdp_names, ours, fully_shard.__kwdefaults__ or {})
        policy, device_mesh, strategy, mixed_precision, cpu_offload, ignored_states = ours
    # Options.
    config = unit_config(
        strategy=strategy,
        backward_prefetch=backward_prefetch,
        forward_prefetch=forward_prefetch,
        mixed_precision=mixed_precision,
        cpu_offload=cpu_offload,
        collectives=collectives,
        prefetch_limit_bytes=prefetch_limit_bytes,
        reshard_after_forward=reshard_after_forward,
        layout=layout,
        static_buffers=static_buffers,
        shard_mesh_fn=shard_mesh_fn,
        recompute=recompute,
    )
    check_limit_all_gathers(limit_all_gathers)
    # Units, and the parameters that each owns.
    if isinstance(module, list | tuple):
        check_group(module)
        root = module[0] if len(module) == 1 else ModuleGroup(module)
    else:
        check_module(module)
        root = module
    groups = resolve_groups(process_group, device_mesh, config.strategy)
    axes = groups if config.strategy.joins_axes else groups[:1]
    world_size = math.prod([dist.get_world_size(axis) for axis in axes])
    choice = choose(root, policy, config, ignored_states, world_size)
    choose_meshes(choice.planned, groups)
    # Values and layouts: checked before anything is changed.
    device = check_parameters(choice.planned, as_device(device_id), groups) or default_device()
    values = Materialization(
        root, choice.planned, choice.ignored_params, device, param_init_fn, device_id is not None, sync_module_states
    )
    for warning in choice.check_layouts(world_size):
        warn_user(warning)
    # Groups, context and memory that units share.
    chosen = [each for unit in choice.planned for each in unit.groups]
    runtime, runtimes, context = runtimes_over(chosen, groups, config.strategy, device)
    pools = Pools([flat.ranks.pool for unit in choice.earlier for flat in unit.handle.flats])
    for unit in choice.planned:
        if (factory := unit.config.collectives) is not None:
            for each in unit.groups:
                runtimes[each][0].using(factory)  # raises for what is none, before anything is changed
    set_up()
    values.agree(runtimes)
    # Handles and hooks: from here on modules change.
    with _changing(root):
        made = build(choice, context, runtime, runtimes, pools, values.prepare)
        install(root, choice, made, extensions())
    warn_of_old_parameters(choice.planned)
    tree = ModuleTree()
    for below in (*made.values(), *choice.earlier):
        below.tree = tree
    names = module_names(root) if choice.earlier else {}
    for below in choice.earlier:  # whose FQNs start further in
        below.rename(names)
    warn_of_experts(choice.earlier, runtime.group)
    return module


@dataclass(frozen=True)
class Choice:
    """The units of one call with their options, known before anything is changed and without a process group."""

    planned: list[PlannedUnit]
    strategy: ShardingStrategy  # from the arguments of the call; a CustomPolicy may override it for a unit
    ignored: set[nn.Module]
    ignored_params: set[nn.Parameter]
    earlier: list[Unit]  # units of earlier calls in the module

    @property
    def configs(self) -> list[UnitConfig]:
        """The options of all units."""
        return [unit.config for unit in self.planned]

    def check_layouts(self, world_size: int) -> list[str]:
        """Plan layouts other than the default. Returns a warning for each that cannot be used.

        Raises:
            TypeError, ValueError: see ``plan_flats``.
        """
        loads: Loads = {}
        laid_out = [unit for unit in self.planned if unit.config.layout is not None]
        flats = [flat for unit in laid_out for flat in plan_flats(unit, world_size, loads)]
        return [f.warning for f in flats if f.warning is not None]


def choose(
    module: nn.Module,
    policy: Policy,
    config: UnitConfig,
    ignored_states: Iterable[nn.Module | nn.Parameter] | None,
    world_size: int,
) -> Choice:
    """Choose the units of ``module`` over ``world_size`` ranks, the parameters that each owns, and its options.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """
    ignored, ignored_params = resolve_ignored(module, ignored_states)
    paths = list_paths(module, ignored)
    earlier = units_below(module)
    overrides, ends = choose_units(module, policy, ignored, ignored_params, [unit.module for unit in earlier])
    configs = configure_units(config, overrides, world_size)
    planned = plan_units(module, paths, configs, ignored_params, ends)
    return Choice(planned, config.strategy, ignored, ignored_params, earlier)


def build(
    choice: Choice,
    context: Context,
    runtime: Runtime,
    runtimes: Runtimes,
    pools: Pools,
    prepare: Callable[[PlannedUnit], None],
) -> dict[nn.Module, Unit]:
    """Shard the parameters of every unit, and call ``prepare`` with each before. ``install`` must follow."""
    made: dict[nn.Module, Unit] = {}
    loads: Loads = {}
    for unit in choice.planned:  # one by one, so that at most one unit is unsharded on the device
        prepare(unit)
        made[unit.module] = _make_unit(unit, context, runtime, runtimes, pools, loads)
    for unit in choice.planned:
        if unit.uses or unit.foreign:
            _link(made[unit.module], unit, made)
    return made


def install(module: nn.Module, choice: Choice, made: dict[nn.Module, Unit], using: Sequence[Extension]) -> None:
    """Attach the features of the extensions in ``using`` to the units from ``build``, and install their hooks."""
    planned = [(made[each.module], each.modules) for each in choice.planned]
    features: dict[Unit, list[ForwardFeature]] = {unit: [] for unit, _ in planned}
    for extension in overriding(using, "attach"):
        for unit, modules in planned:
            if extension.concerns(unit) and (feature := extension.attach(unit, modules)) is not None:
                features[unit].append(feature)
    for unit, own in features.items():
        UnitHooks.install(unit, own)
    for extension in overriding(using, "finish"):
        if any(map(extension.concerns, (*features, *choice.earlier))):
            extension.finish(module, made.values())


@contextlib.contextmanager
def _changing(module: nn.Module) -> Iterator[None]:
    """Add a note to errors: from here on they leave ``module`` half sharded, as undoing it would take communication."""
    try:
        yield
    except BaseException as e:
        e.add_note(f"fully_shard had begun to change this {type(module).__name__}: build it anew before you try again.")
        raise


def _make_unit(
    planned: PlannedUnit, context: Context, every: Runtime, runtimes: Runtimes, pools: Pools, loads: Loads
) -> Unit:
    config = planned.config
    for owned in planned.owned:
        if type(owned.param) is not nn.Parameter and (wrapping := wrapping_of(owned.param)) is not None:
            owned.was = weakref.ref(owned.param)
            owned.replace(wrapping.take_apart(owned.param))
    flats = plan_flats(planned, every.world_size, loads)
    all_ranks: dict[Groups | None, UnitRanks] = {}
    for groups in planned.groups:
        on_these = flats if len(planned.groups) == 1 else [flat for flat in flats if flat.groups == groups]
        all_ranks[groups] = ranks_of(planned.fqn, config, on_these, pools, runtimes[groups], all_ranks.get(None))
    handle = FlatParamHandle.shard(flats, all_ranks)
    unit = Unit(planned.module, handle, context, every, config)
    for module in {planned.module, *called_modules(planned.module)}:
        module.__dict__[UNIT_KEY] = unit
        if type(module).__reduce__ is not object.__reduce__ and not hasattr(type(module), "__deepcopy__"):
            module.__dict__["__deepcopy__"] = functools.partial(copy_with_attributes, module)
    return unit


def ranks_of(
    fqn: str,
    config: UnitConfig,
    flats: Sequence[PlannedFlat],
    pools: Pools,
    runtimes: tuple[Runtime, Runtime | None],
    unit: UnitRanks | None = None,
) -> UnitRanks:
    """Return the ranks of ``runtimes`` that have ``flats``, of the unit ``fqn``. For ``unit`` see ``UnitRanks.of``."""
    shards, replicas = runtimes
    if (factory := config.collectives) is not None:
        shards, replicas = shards.using(factory), None if replicas is None else replicas.using(factory)
    pool = pools.of(shards, config.static_buffers)
    if config.strategy.is_replicated:  # the ranks to shard over are replicas
        return UnitRanks.of(fqn, flats, None, shards, pool, unit)
    return UnitRanks.of(fqn, flats, shards, replicas, pool, unit)


def _link(unit: Unit, planned: PlannedUnit, made: dict[nn.Module, Unit]) -> None:
    """Find the other units whose parameters ``unit`` needs, and add their registrations in it to these units."""
    needs = [unit, *[made[m] for m in planned.uses]]
    for module, name, param in planned.foreign:
        owner = owner_of(param)
        if owner is None:
            raise InternalError(f"the sharded parameter registered as {name!r} in unit {unit.fqn!r} has no owner")
        owner.handle.add_registration(module, name, param)
        if owner not in needs:
            needs.append(owner)
    unit.needs = tuple(needs)
