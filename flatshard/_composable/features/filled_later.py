"""Units whose parameters stay on the meta device in ``fully_shard``, and get memory and values later.

[Note: Filled later]
``to_empty`` gives a flat parameter the memory of its shard, filled with a byte pattern that no initialiser leaves behind.
From then on an initialiser finds *full* parameters, so that it draws the numbers that it draws in one process. An
initialiser is code that reads a parameter from its module (``self.weight`` in ``reset_parameters``), lists a module's own
(``named_parameters(recurse=False)``), or draws random numbers for one (``normal_``). Its values are cut, and this rank's
shard kept, when code comes to another unit, or looks at parameters as no initialiser does: it lists those of a model,
builds or steps an optimizer, reads a ``.grad``, calls a verb or a forward. So one unit is unsharded at a time, or all units
of one module's parameters (some are tied to others), and nothing is communicated. A DTensor is shown as a DTensor again, over
this rank's full local tensor. A parameter that has values already is shown with NaN in the place of other ranks' elements:
it can be overwritten, scaled or filled, but not summed. A parameter that still shows the pattern at the first forward
was never filled, which is an error. Code that writes to a shard (a load, or the end of ``summon_full_params``) ends this for
the parameter, on all ranks: its version tells. From then on modules show the shard. Before a pass starts, all ranks find out
together whether everything in the pass has been filled.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from flatshard._base.errors import name_list
from flatshard._base.names import plain_name
from flatshard._comm.runtime import Runtime
from flatshard._composable.construct.materialize import fill_with_pattern, shows_pattern, swap_memory
from flatshard._composable.extensions import Extension
from flatshard._composable.find import units_of_parameters
from flatshard._composable.state import Context, Unit
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.handle import FILL
from flatshard._handle.tensors.changes import changes
from flatshard._handle.tensors.grad_dtype import hand_on
from flatshard._handle.tensors.shard_info import in_memory_order
from flatshard._handle.tensors.sharded_parameter import (
    ShardedParameter,
    fillings,
    flat_param_of,
    show_shards,
    shown_full,
)
from flatshard._handle.user_changes import adopt_data, find_moved

_data: Any = torch.Tensor.data


class FilledLater(Extension):
    """Fills parameters on meta, and checks in the passes of their units whether they have values."""

    concerns = operator.attrgetter("handle.on_meta")

    def attach(self, unit: Unit, modules: list[nn.Module]) -> None:
        for flat in unit.handle.on_meta:
            flat.fill_by(FillFlat(flat))

    def finish(self, module: nn.Module, made: Collection[Unit]) -> None:
        if any(unit.handle.on_meta for unit in made):
            Context.checks.append(functools.partial(_check, weakref.WeakSet(made)))


class FillFlat:
    """The ``Filling`` of one flat parameter. [Note: Filled later]"""

    def __init__(self, flat: FlatParam) -> None:
        self._flat = flat
        self._whole: dict[int, tuple[torch.Tensor, nn.Parameter]] = {}  # by index: the memory, and what is shown of it
        self._versions: dict[int, int] = {}  # by index: that of a parameter to which only initialisers have written
        fillings.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> FillFlat:
        return FillFlat(memo[id(self._flat)])

    @property
    def unit(self) -> str:
        return self._flat.ranks.label.unit

    def allocate(self, device: torch.device) -> None:
        """Give parameters on meta their memory, to be filled.

        Raises:
            RuntimeError: ``device`` is not where the shard belongs.
        """
        flat, kind = self._flat, self._flat.kind
        if not flat.kind.is_on_meta:  # allocated with the first parameter of its unit
            return
        if device != kind.home:
            raise RuntimeError(
                f"parameter {flat.layout.params[0].fqn!r} belongs on {kind.home}, and is given memory on {device}: "
                f"call module.to_empty(device={str(kind.home)!r})"
            )
        if moved := find_moved(flat):  # converted on meta: ``module.half()``
            adopt_data(flat, moved)
        flat.convert(flat.kind.dtype, device)
        fill_with_pattern(flat.shard)
        for index, param in enumerate(flat.params):
            real = nn.Parameter(_data.__get__(flat.shard_view(index)), param.requires_grad)  # with its own version
            hand_on(param, real)
            swap_memory(param, real)  # `param.data = ...` cannot leave the meta device
            self._versions[index] = param._version
        changes.note()

    def show(self, param: ShardedParameter, beside: Iterable[Any]) -> nn.Parameter:
        """Show ``param`` unsharded until ``cut``. Return ``param``, or a DTensor in its place.

        ``beside``: parameters of the same module, whose units stay unsharded.
        """
        flat = self._flat
        if flat.kind.is_on_meta:
            return param
        index = next(i for i, own in enumerate(flat.params) if own is param)
        if index in self._whole:
            return self._whole[index][1]
        if param._version != self._versions.setdefault(index, param._version):
            return param  # it was loaded, or filled where all of it was unsharded
        fillings_beside = [each.filling for each in map(flat_param_of, beside) if each is not None]
        kept = {self.unit, *(each.unit for each in fillings_beside if each)}
        for other in [each for each in shown_full if each.unit not in kept]:
            other.cut()
        info, part = flat.layout.params[index], flat.slices[index]
        own = flat.shard[part.start : part.stop]
        whole = torch.empty_strided(info.shape, info.stride, dtype=flat.kind.dtype, device=flat.kind.device)
        fill_with_pattern(whole)
        if part.numel and not shows_pattern(own):
            if whole.is_floating_point() or whole.is_complex():
                whole.fill_(torch.nan)
            in_memory_order(whole, info.stride)[part.offset : part.offset + part.numel] = own
        wrapping = flat.wrappings[index]
        shown: nn.Parameter = param
        if wrapping is None:
            self._point(index, whole)
        else:
            shown = nn.Parameter(wrapping.wrap(whole), param.requires_grad)
        self._whole[index] = whole, shown
        if self not in shown_full:
            shown_full.append(self)
        _show_shards_to_readers(True)
        return shown

    def cut(self) -> None:
        """Keep this rank's shard of the parameters that are shown unsharded."""
        flat, shown = self._flat, dict(self._whole)
        self._whole.clear()
        shown_full.remove(self)
        if not shown_full:
            _show_shards_to_readers(False)
        for index, (memory, what) in shown.items():
            param, info, part = flat.params[index], flat.layout.params[index], flat.slices[index]
            if what is param:
                memory = param.detach()
            if memory.shape != info.shape:
                raise RuntimeError(
                    f"parameter {info.fqn!r} of shape {info.shape} was given the shape {tuple(memory.shape)}: resize a "
                    "module before fully_shard"
                )
            if part.numel:
                mine = in_memory_order(memory, info.stride)[part.offset : part.offset + part.numel]
                flat.shard[part.start : part.stop].copy_(mine)
            self._point(index, flat.shard_view(index))

    def shows(self, param: nn.Parameter) -> bool:
        """Return whether ``param`` is unsharded now."""
        return any(shown is param for _, shown in self._whole.values())

    def _point(self, index: int, data: torch.Tensor) -> None:
        param = self._flat.params[index]
        _data.__set__(param, data)
        increment_version(param)
        self._versions[index] = param._version
        changes.note()


_GRAD: Any = ShardedParameter.grad


def _show_shards_to_readers(flag: bool) -> None:
    """Choose whether a read of ``is_leaf`` or ``grad`` of any sharded parameter ends the filling.

    An optimizer reads ``is_leaf`` when it is built, and ``grad`` when it steps. While no parameter is shown in full, both are
    C functions, for speed.
    """
    ShardedParameter.is_leaf = _after_shards(torch.Tensor.is_leaf) if flag else torch.Tensor.is_leaf
    ShardedParameter.grad = _after_shards(_GRAD) if flag else _GRAD


def _after_shards(plain: Any) -> Any:
    """Return the attribute ``plain``, which shows shards everywhere before it is read or set."""

    def read(param: ShardedParameter) -> Any:
        show_shards()
        return plain.__get__(param)

    def write(param: ShardedParameter, value: Any) -> None:
        show_shards()
        plain.__set__(param, value)

    return property(read, write, plain.__delete__)


def _check(made: weakref.WeakSet[Unit], outermost: Unit) -> bool:
    """Check values when a pass of ``outermost`` starts. Return whether to check again in the next pass.

    Raises:
        RuntimeError: a parameter in it was never filled. All ranks raise.
    """
    show_shards()
    inside = units_of_parameters(outermost.module)
    todo = [unit for unit in inside if unit in made]
    if not todo:
        return bool(made)
    for unit in todo:
        unit.handle.check_parameters()
    # Ranks agree on which parameters are on meta.
    left = [i.fqn for unit in todo for flat in unit.handle.on_meta for i in flat.layout.params]
    prefix = f"{outermost.fqn}." if outermost.fqn else ""
    left += [prefix + plain_name(name) for name, b in outermost.module.named_buffers() if b.is_meta]
    if left:
        raise RuntimeError(f"{name_list(left)} are on the meta device. {FILL}")
    filled = [flat for unit in todo for flat in unit.handle.flats if flat.filling is not None]
    if left := _left_on_any_rank(filled, outermost.runtime):
        raise RuntimeError(
            f"{name_list(left)} got memory by to_empty, and nothing has filled them. Initialise them before the first "
            "forward: by init_weights() or reset_parameters() of their modules, inside "
            "`with flatshard.summon_full_params(model):`, by load_state_dict() or flatshard.load_checkpoint()"
        )
    if left := _unequal_copies(filled, outermost.runtime):
        raise RuntimeError(
            f"{name_list(left)} are replicated over a tensor-parallel mesh, and its ranks have filled them with different "
            "values: call torch.manual_seed with the same number on all ranks before init_weights(), and again now"
        )
    for flat in filled:
        if flat.ranks.replicas is not None:  # they get the values of the first one, as random generators may differ
            flat.ranks.replicas.broadcast_now(flat.shard)
        flat.fill_by(None)
    made.difference_update(todo)
    return bool(made)


def _left_on_any_rank(filled: Iterable[FlatParam], runtime: Runtime) -> list[str]:
    """Return the FQNs of parameters whose shard on some rank has not been filled. One all-reduce."""
    left = [
        (info.fqn, bool(part.numel) and shows_pattern(flat.shard[part.start : part.stop]))
        for flat in filled
        for info, part in zip(flat.layout.params, flat.slices, strict=True)
    ]
    told = torch.tensor([float(flag) for _, flag in left], device=runtime.device)
    if left and runtime.world_size > 1:
        runtime.all_reduce_now(told, "max", "whether all parameters have been filled")
    return [fqn for (fqn, _), flag in zip(left, told.tolist(), strict=True) if flag]


def _unequal_copies(filled: Iterable[FlatParam], runtime: Runtime) -> list[str]:
    """Return the FQNs of DTensors whose copies on different ranks have different values.

    Their random generators differed. The copies may be cut differently, so checksums of full tensors are compared.
    """
    found = [copied for flat in filled for copied in _copied(flat)]
    if not found:
        return []
    sums = torch.tensor([checksum for _, checksum, _ in found], dtype=torch.float64, device=runtime.device)
    if runtime.world_size > 1:
        runtime.all_reduce_now(sums, "sum", "checksums of parameters")
    most = torch.stack([sums, -sums])
    for replicas in dict.fromkeys(each for _, _, runtimes in found for each in runtimes):
        of_these = torch.tensor([replicas in runtimes for _, _, runtimes in found], device=runtime.device)
        told = torch.where(of_these, most, -torch.inf)
        replicas.all_reduce_now(told, "max", "checksums of parameters")
        most = torch.where(of_these, told, most)
    differ = (most[0] != -most[1]).tolist()
    return [fqn for (fqn, _, _), differs in zip(found, differ, strict=True) if differs]


def _copied(flat: FlatParam) -> Iterator[tuple[str, float, list[Runtime]]]:
    """Yield the FQN of each DTensor with copies, the checksum of this rank's shard, and the groups of ranks with copies."""
    for info, part, wrapping in zip(flat.layout.params, flat.slices, flat.wrappings, strict=True):
        if wrapping is not None and (runtimes := wrapping.replicas(flat.kind.device)):
            mine = flat.shard[part.start : part.stop].view(torch.uint8)
            counted = not flat.holds_all or flat.ranks.is_first_replica
            yield info.fqn, float(mine.sum(dtype=torch.int64)) * counted, runtimes
