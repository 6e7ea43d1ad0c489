"""The state of a whole job on disk: saved whole or not at all, loaded whole or not at all, by any number of ranks.

Over the files of ``torch.distributed.checkpoint``, to which ``model.state_dict()`` can be handed just as well. What these
functions add: they need no numpy, they name the ranks that do not come, a save that dies leaves the previous checkpoint as it
was, a load that cannot succeed changes nothing on any rank, and nothing in a checkpoint is executed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from flatshard._composable.state import units_below
from flatshard._handle.adapters.tensor_parallel import is_dtensor
from flatshard.checkpoint._meeting import Meeting
from flatshard.checkpoint._optim_names import parameter_names, rekey, steps_only
from flatshard.checkpoint._optim_options import options_of
from flatshard.checkpoint._optim_state_dict import optim_state_dict
from flatshard.checkpoint._optim_state_load import load_optim_state_dict, stepped_elsewhere

_MINUTE = timedelta(seconds=60)
_saving: list[Future[None]] = []  # saves under way, by threads of their own: one at a time


def save_checkpoint(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
    overwrite: bool = False,
    wait: bool = True,
    timeout: timedelta = _MINUTE,
    progress: Callable[[str], None] | None = None,
) -> Future[None]:
    """Write ``state`` to the directory ``path``, which all ranks see. Every rank must call it, with the same path.

    Each rank writes its own parts, with no collective on them. The directory appears when all is written, flushed to disk
    and every element accounted for; until then whatever was at ``path`` is as it was.

    >>> save_checkpoint("run/step-500", {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 500})

    Args:
        path: a directory that does not exist.
        state: modules, optimizers over their parameters, objects with ``state_dict()`` and ``load_state_dict()``, tensors,
            and plain values (numbers, strings, lists and dicts of such). Of what is not sharded rank 0's is saved.
        process_group: the ranks that have ``state`` together. Default: all.
        overwrite: replace a checkpoint at ``path``: it is removed when the new one is in its place.
        wait: False: copy ``state`` to CPU memory and write it in a thread while training goes on. The checkpoint is the state
            at the call. One at a time: the next call waits for this one.
        timeout: how much later than the first the last rank may come.
        progress: called with a line of text every few seconds of a long save, and at the end.

    Returns:
        When it has ended; without ``wait`` ask ``.result()``, which raises what went wrong.

    Raises:
        MeetingError: on all ranks, if one did not come or could not do its part: the path exists, a disk is full, elements
            are missing. The files of the attempt are removed.
    """
    where = Path(path).absolute()
    _await_saves()
    meeting = Meeting(process_group, f"save_checkpoint({str(where)!r})", timeout)
    collected: list[dict[str, Any]] = []
    meeting.gather(lambda: collected.append(_collect(state) if wait else _staged(_collect(state))))
    meeting.scatter(lambda: None)
    future: Future[None] = Future()
    if wait:
        _write(meeting, where, collected[0], overwrite, progress)
        future.set_result(None)
        return future

    def run() -> None:
        try:
            _write(meeting, where, collected[0], overwrite, progress)
        except BaseException as e:
            future.set_exception(e)
        else:
            future.set_result(None)

    _saving.append(future)
    threading.Thread(target=run, name="flatshard-save").start()
    return future


def _write(
    meeting: Meeting, path: Path, state: dict[str, Any], overwrite: bool, progress: Callable[[str], None] | None
) -> None:
    from flatshard.checkpoint import _files as files

    counted = files.Progress("saving", progress)
    planner, writer = files.SavePlanner(counted), files.Writer(files.hidden(path))

    def plan() -> Any:
        planner.set_up_planner(state, None, meeting.is_first)
        writer.set_up_storage_writer(meeting.is_first)
        return planner.create_local_plan(), list(planner.state_dict)

    def plan_for_all() -> Any:
        files.prepare(path, overwrite)
        files.check_plans([p for p, _ in plans], dict.fromkeys(name for _, names in plans for name in names))
        final, found = planner.create_global_plan([p for p, _ in plans])
        metadata.append(found)
        return writer.prepare_global_plan(final)

    def finish() -> None:
        writer.finish(metadata[0], results)
        files.publish(path)

    metadata: list[Any] = []
    plans = meeting.gather(plan)
    try:
        mine = meeting.scatter(plan_for_all)
        results = meeting.gather(lambda: writer.write_data(planner.finish_plan(cast(Any, mine)), planner).value())
        meeting.scatter(finish)
    except BaseException:
        if meeting.is_first:
            files.discard(path)
        raise
    counted.end(path)


def load_checkpoint(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    process_group: dist.ProcessGroup | None = None,
    strict: bool = True,
    timeout: timedelta = _MINUTE,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Read ``state`` from ``path``: modules and optimizers in place. Every rank must call it, with the same path.

    The checkpoint may come from any number of ranks, strategy, policy or precision, from a plain model, or from
    ``torch.distributed.checkpoint.save`` of any of these or of FSDP2. Each rank reads its own parts, into memory beside, and
    takes them over when all ranks have all of theirs. Nothing in the files is executed.

    >>> step = load_checkpoint("run/step-500", {"model": model, "optimizer": optimizer, "step": 0})["step"]

    Args:
        path: what ``save_checkpoint`` was given.
        state: as for saving. Only what it names is read.
        process_group: as for saving.
        strict: raise if a module, an optimizer or a dict in ``state`` has names that the checkpoint lacks, or the other way
            round. False: what the checkpoint lacks stays as it is.
        timeout, progress: see :func:`save_checkpoint`.

    Returns:
        ``state``, with what was read in the place of tensors and plain values.

    Raises:
        MeetingError: on all ranks, and nothing is changed on any: a rank did not come; names are missing or unexpected,
            shapes differ, files are missing, cut off or damaged, all of them in one message.
    """
    from flatshard.checkpoint import _files as files

    _await_saves()
    given = Path(path).absolute()
    meeting = Meeting(process_group, f"load_checkpoint({str(given)!r})", timeout)
    counted = files.Progress("loading", progress)
    planner = files.LoadPlanner(counted, strict)
    target: dict[str, Any] = {}
    reader = files.Reader(given)

    def plan() -> None:
        reader.reset(files.find(given))
        metadata = reader.read_metadata()
        names = metadata.state_dict_metadata
        target.update(_staged(_collect(state, names, strict), on_cpu=False))
        reader.set_up_storage_reader(metadata, meeting.is_first)
        planner.set_up_planner(target, metadata, meeting.is_first)
        elsewhere = _elsewhere(state)
        planner.check([n for n in names if n.partition(".")[0] in state and not n.startswith(elsewhere)])
        wanted = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
        reader.check_files(wanted)
        made.append(wanted)

    made: list[Any] = []
    meeting.gather(plan)
    meeting.scatter(lambda: None)
    meeting.gather(lambda: reader.read_data(made[0], planner).wait())
    meeting.scatter(lambda: None)
    meeting.gather(lambda: _take_over(state, target, strict))
    meeting.scatter(lambda: None)
    counted.end(given)
    return {key: value if _loads(value) else target[key] for key, value in state.items()}


# -- what is saved -----------------------------------------------------------------------------------------------------


def _loads(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _collect(state: Mapping[str, Any], saved: Mapping[str, Any] | None = None, strict: bool = True) -> dict[str, Any]:
    """The state dicts of ``state``. ``saved``: what is in the checkpoint that they are to be loaded from, by name.

    Not ``strict``: also with what an optimizer has and the checkpoint lacks, which is to stay.
    """
    result = {}
    for key, value in state.items():
        if "." in key:
            raise ValueError(f"state names {key!r}: a name with a dot could not be told from what is inside of {key!r}")
        if isinstance(value, torch.optim.Optimizer):
            module = _owner(state, key, value)
            if units_below(module):
                names = [] if saved is None else [n.removeprefix(f"{key}.") for n in saved if n.startswith(f"{key}.")]
                if not strict:
                    own = optim_state_dict(module, value)["state"]
                    names += [f"state.{n}.{k}" for n, values in own.items() for k in values]
                result[key] = optim_state_dict(module, value, for_load=saved is not None and names)
            else:
                result[key] = _plain_optim_state_dict(key, module, value, saved, strict)
        else:
            result[key] = value.state_dict() if _loads(value) else value
    return result


def _plain_optim_state_dict(
    key: str, module: nn.Module, optim: torch.optim.Optimizer, saved: Mapping[str, Any] | None, strict: bool
) -> dict[str, Any]:
    """The same of a module that is not sharded. ``saved``: with room for what is there of it."""
    names = _stepped_names(module, optim)
    if any(is_dtensor(p) for group in optim.param_groups for p in group["params"]):
        raise NotImplementedError(
            f"{key!r} steps DTensors of a module that flatshard does not shard: save it by torch.distributed.checkpoint, "
            "with get_optimizer_state_dict"
        )
    result = rekey(optim.state_dict(), names)
    result["param_groups"] = [{"params": g["params"], **dict(options_of(g))} for g in result["param_groups"]]
    if saved is not None:
        own = {} if strict else result["state"]
        result["state"] = {
            n: dict(own.get(n, {})) for n in names if n in own or any(k.startswith(f"{key}.state.{n}.") for k in saved)
        }
        for name, state in result["state"].items():
            prefix = f"{key}.state.{name}."
            for full, kind in saved.items():
                if full.startswith(prefix) and "." not in (short := full.removeprefix(prefix)):
                    size = getattr(kind, "size", None)
                    state[short] = None if size is None else torch.empty(size, dtype=kind.properties.dtype)
    return result


def _stepped_names(module: nn.Module, optim: torch.optim.Optimizer) -> list[str]:
    """The FQNs of an optimizer's parameters, in its order."""
    names = parameter_names(module)
    return [names[id(p)][0] for group in optim.param_groups for p in group["params"]]


def _elsewhere(state: Mapping[str, Any]) -> tuple[str, ...]:
    """How the names begin of states that are on other ranks only."""
    optimizers = {k: v for k, v in state.items() if isinstance(v, torch.optim.Optimizer)}
    found = {k: stepped_elsewhere(_owner(state, k, v), v) for k, v in optimizers.items()}
    return tuple(f"{key}.state.{fqn}." for key, fqns in found.items() for fqn in fqns)


def _owner(state: Mapping[str, Any], key: str, optimizer: torch.optim.Optimizer) -> nn.Module:
    """The module in ``state`` whose parameters ``optimizer`` steps."""
    for module in (v for v in state.values() if isinstance(v, nn.Module)):
        if steps_only(module, optimizer):
            return module
    raise ValueError(
        f"optimizer {key!r} steps parameters of no module in the state: add the module, {{'model': model}}"
    )


def _staged(value: Any, on_cpu: bool = True) -> Any:
    """A copy that nobody else changes."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True) if on_cpu else value.detach().clone()
    if isinstance(value, dict):
        return {k: _staged(v, on_cpu) for k, v in value.items()}
    return type(value)(_staged(v, on_cpu) for v in value) if type(value) in (list, tuple) else value


def _take_over(state: Mapping[str, Any], target: dict[str, Any], strict: bool) -> None:
    for key, value in state.items():
        if isinstance(value, nn.Module):
            value.load_state_dict(target[key], strict=strict)
        elif isinstance(value, torch.optim.Optimizer):
            module = _owner(state, key, value)
            if units_below(module):
                load_optim_state_dict(module, value, target[key], strict=strict)
            else:
                value.load_state_dict(rekey(target[key], _stepped_names(module, value), to="ids"))
        elif _loads(value):
            value.load_state_dict(target[key])


def _await_saves() -> None:
    """One save at a time: their messages go over one process group."""
    while _saving:
        _saving.pop().exception()  # whoever started it has it too
