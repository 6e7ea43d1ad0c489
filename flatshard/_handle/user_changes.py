"""What users do to a unit's parameters, and what follows: the one place that looks for it.

[Note: What users change]

| the user | noticed by | what follows |
|---|---|---|
| ``p.data = ...``, ``module.to()`` | ``find_moved`` | values are copied into the shard, or the shard is converted |
| ``m.weight = nn.Parameter(...)``, | ``Registrations.replaced`` | values, ``requires_grad`` and ``grad_dtype`` are copied; |
| ``load_state_dict(assign=True)`` | | the sharded parameter is registered again |
| deletes or parametrizes ``m.weight`` | ``Registrations.replaced`` | an error |
| ``p.requires_grad_()`` | ``follow_requires_grad`` | the unsharded parameter does the same |
| ``p.grad_dtype = ...`` | ``FlatGradients.is_outdated`` | gradients arrive and are reduced in other dtypes |
| ``module.to()``, while unsharded | ``conversions`` | the unit is resharded; sharded parameters are converted |
| changes unsharded ones, in a forward | ``UnshardedBuffer.was_changed`` | values are written back to the shard |
| changes sharded ones, as a step does | ``FlatParamHandle.version`` | the next forward gathers anew |

``FlatParamHandle.check_parameters`` adopts changes of sharded parameters before a forward, and before anything reads them.
It looks for them only if some were counted: changes.py, [Note: Looking only after a change]. Conversions of parameters that
the user has unsharded are looked for where these are used or resharded, and changes in a forward at its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from flatshard._base.errors import InternalError, name_list
from flatshard._comm.progress import Label
from flatshard._handle.adapters.tensor_subclass import TensorSubclass
from flatshard._handle.flat_param import FlatParam
from flatshard._handle.registrations import Registrations
from flatshard._handle.tensors.changes import changes
from flatshard._handle.tensors.grad_dtype import hand_on
from flatshard._handle.tensors.shard import warn_of_memory_format
from flatshard._handle.tensors.sharded_parameter import shard_info, show_shards
from flatshard._handle.unit_gradients import UnitGradients


class Conversion(NamedTuple):
    """Another dtype or device that the user gave to a parameter while it was unsharded."""

    param: nn.Parameter
    dtype: torch.dtype
    device: torch.device


class UserChanges:
    """Looks for changes by the user of one unit's parameters. [Note: What users change]"""

    def __init__(
        self, flats: Sequence[FlatParam], registrations: Registrations, gradients: UnitGradients, label: Label
    ) -> None:
        self._flats, self._registrations, self._gradients = flats, registrations, gradients
        self._label = label
        # `changes.count` when all changes had been adopted. Local to this rank: it counts all models of the process. So it
        # tells only where to look. Users change parameters on all ranks, and versions tell of that also for empty shards.
        self.seen_at = -1

    def look_again(self) -> None:
        """Look for changes even if none is counted: the flat parameters or registrations are others."""
        self.seen_at = -1

    def mark_seen(self) -> None:
        """Record that all changes so far have been adopted."""
        self.seen_at = changes.count

    def locate(self, param: nn.Parameter) -> tuple[FlatParam, int]:
        """Return the flat parameter of ``param``, and its index there."""
        for flat in self._flats:
            if (index := flat.index_of(param)) is not None:
                return flat, index
        raise InternalError(f"unit {self._label.unit!r} does not own a parameter of shape {tuple(param.shape)}")

    # -- registrations -------------------------------------------------------------------------------------------------

    def adopt_registered(self) -> None:
        """Adopt parameters that the user registered in place of sharded ones.

        Raises:
            RuntimeError: a parameter is gone, or was replaced by a sharded one or by one of another shape.
        """
        show_shards()
        for module, name, sharded, new in self._registrations.replaced():
            where = f"parameter {name!r} of a {type(module).__name__} in unit {self._label.unit or '<root>'!r}"
            if not isinstance(new, nn.Parameter):
                raise RuntimeError(
                    f"{where} is no longer registered: it was deleted, parametrized or swapped (functional_call) after "
                    "fully_shard, which must come last"
                )
            if (other := shard_info(new)) is not None:
                raise RuntimeError(
                    f"{where} was replaced by {other.fqn!r}, which is sharded: the two would not be tied. Tie parameters "
                    "before fully_shard. To copy values, register the original parameter again, and copy into it"
                )
            flat, index = self.locate(sharded)
            _check_data(flat, index, new)
            if flat.filling is not None and not new.is_meta:
                flat.filling.allocate(new.device)
            sharded.data = new.data  # the optimizer refers to `sharded`, so this object is kept
            hand_on(new, sharded)
            sharded.requires_grad_(new.requires_grad)
            self._registrations.write(module, name, sharded)
            new._flatshard_adopted = sharded  # type: ignore[attr-defined]  # for an optimizer that was given `new` before

    # -- data ----------------------------------------------------------------------------------------------------------

    def find_moved(self) -> dict[FlatParam, list[int]]:
        """Return the flat parameters whose data the user replaced, each with the indices of these parameters.

        Raises:
            RuntimeError: one was converted while its gradients are being reduced.
        """
        found = {flat: moved for flat in self._flats if (moved := find_moved(flat))}
        for flat in found:
            if {(p.dtype, p.device) for p in flat.params} != {(flat.kind.dtype, flat.kind.device)}:
                self._gradients.check_not_deferred("parameters were given another dtype or device")
        return found

    def conversions(self, copies: Mapping[int, nn.Parameter] | None = None) -> list[Conversion]:
        """Return conversions of unsharded parameters, as ``module.to()`` does.

        It converts the sharded ones, too, if these have another dtype or device than the parameters in modules.

        ``copies``: the parameters in modules, in their own dtypes, by the ids of the sharded ones; by default, the unsharded
        parameters.
        """
        found = list[Conversion]()
        for flat in self._flats:
            buffer = flat.unsharded.flat
            dtype, device = (buffer.dtype, buffer.device) if copies is None else (flat.kind.dtype, None)
            for param, compute, wrapping in zip(flat.params, flat.unsharded.params, flat.wrappings, strict=True):
                shown = compute if copies is None else copies[id(param)]
                new = param.dtype if shown.dtype is dtype else shown.dtype
                to = param.device if device in (None, shown.device) else shown.device
                if not isinstance(wrapping, TensorSubclass) and (new, to) != (flat.kind.dtype, flat.kind.device):
                    found.append(Conversion(param, new, to))
        return found

    # -- gradients -----------------------------------------------------------------------------------------------------

    def follow_requires_grad(self, unfrozen_only: bool = False) -> None:
        """Have unsharded parameters require grad as the user's do, with gradients of the dtypes that the user chose.

        ``unfrozen_only``: leave out parameters that the user froze.
        """
        for grads in self._gradients.flats:
            if grads.is_outdated:
                self._gradients.check_not_deferred("p.grad_dtype was set")
                with torch.inference_mode(False), torch.no_grad():  # the caller may be an inference, later ones not
                    grads.update()
        synced = [flat.sync_requires_grad(unfrozen_only) for flat in self._flats]
        # A wrapped parameter may have become another leaf: see `swap_inside`.
        if any(synced) or any([any(flat.wrappings) for flat in self._flats]):
            self._gradients.accumulators.find()


def find_moved(flat: FlatParam) -> list[int]:
    """Return the indices of parameters that are no longer their slice of the shard: ``p.data = ...``, ``module.to(...)``."""
    kind, start, size = flat.kind, flat.shard.data_ptr(), flat.shard.itemsize
    return [
        index
        for index, (param, part) in enumerate(zip(flat.params, flat.slices, strict=True))
        if param.dtype is not kind.dtype
        or param.device != kind.device
        or param.numel() != part.numel
        or (part.numel and start and param.data_ptr() != start + part.start * size)  # no addresses on meta
    ]


def adopt_data(flat: FlatParam, indices: Sequence[int]) -> None:
    """Copy the values of parameters whose data the user replaced into the shard, or adopt their new dtype or device.

    Raises:
        RuntimeError: the new data has another shape, or only some parameters have a new dtype or device.
    """
    for i in indices:
        _check_data(flat, i, flat.params[i])
    kinds = {(p.dtype, p.device) for p in flat.params}
    if len(kinds) > 1:
        odd = [flat.layout.params[i].fqn for i in indices]
        raise RuntimeError(
            f"parameters {name_list(odd)} changed dtype or device, but others of the same unit did not: {kinds}. "
            "Convert the whole unit, e.g. module.to(...)"
        )
    values = {i: flat.params[i].data for i in indices}
    (kind,) = kinds
    if kind != (flat.kind.dtype, flat.kind.device):
        flat.convert(*kind)
    for i, value in values.items():
        view = flat.shard_view(i)
        if value.dim() > 3 and value.stride() != view.stride():
            warn_of_memory_format(flat.layout.params[i].fqn)
        view.copy_(value)
        flat.params[i].data = view


def _check_data(flat: FlatParam, index: int, new: torch.Tensor) -> None:
    """Raise if ``new``, the user's data for parameter ``index``, has no values, or not the shape of this rank's shard."""
    info, expected = flat.layout.params[index], flat.shard_view(index).shape
    if new.is_meta and not flat.params[index].is_meta:
        raise RuntimeError(
            f"parameter {info.fqn!r} was moved to the meta device after fully_shard, and has no values any more. "
            "Build the model anew, shard it, and load a checkpoint"
        )
    if new.shape != expected:
        raise RuntimeError(
            f"parameter {info.fqn!r} was replaced by a tensor of shape {tuple(new.shape)}; this rank's shard has shape "
            f"{tuple(expected)} (of a parameter of shape {info.shape}). A sharded parameter cannot be resized: resize "
            "the module before fully_shard, or change values inside `with flatshard.summon_full_params(module):`"
        )
