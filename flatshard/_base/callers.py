"""Who calls flatshard: for error messages, and for code of torch's that says to nobody what it wants.

[Note: Who calls]
No behaviour of a training step depends on its caller. Three kinds of questions are left, and this file answers all of them:

- An error names the code that made the mistake: the method that runs a forward outside of its unit, FSDP, an initialiser.
  Without the question such code computes with a shard, or loses values, on some ranks without any error.
- ``module.to()``, ``to_empty()`` and ``named_parameters(recurse=False)`` read the same dict of parameters as an optimizer or
  a script does. Before a module on meta has values, and while it shows parameters of another dtype, they need other ones.
- ``torch.distributed.checkpoint`` and ``load_state_dict`` keep their options in local variables, and hooks get none of them.

Whether a forward is still running is another question: see ``_base/frames.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.utils._named_member_accessor import swap_tensor  # private: to recognise writes by functional_call
from torch.utils.checkpoint import CheckpointFunction

from flatshard._base import frames
from flatshard._base.errors import cannot_trace
from flatshard._base.names import UNIT_KEY


class Caller:
    """Code that reads or writes parameters. [Note: Who calls]"""

    __slots__ = ("_frame",)

    def __init__(self, further: int = 0) -> None:
        """Find the caller of the function that asks, or ``further`` callers further out."""
        self._frame = frames.of_caller(2 + further)

    @property
    def initialiser(self) -> str | None:
        """The name of the function of ``torch.nn.init`` that calls, or None."""
        is_one = frames.module_name(self._frame) == nn.init.__name__
        return frames.function_name(self._frame) if is_one else None

    @property
    def is_private_torch(self) -> bool:
        """Whether torch's private code calls, such as dynamo's."""
        return frames.module_name(self._frame).startswith("torch._")

    @property
    def reads_attribute(self) -> bool:
        """Whether code has read ``module.name``."""
        return frames.is_of(self._frame, nn.Module.__getattr__)

    @property
    def lists_own(self) -> bool:
        """Whether ``module.named_parameters(recurse=False)`` calls."""
        caller = frames.caller_of(self._frame)
        if caller is None or not frames.is_inner_of(self._frame, nn.Module.named_parameters):
            return False
        return frames.variables(caller).get("recurse") is False

    @property
    def converts(self) -> bool:
        """Whether ``module.to()``, ``half()`` or the like calls."""
        return frames.is_of(self._frame, nn.Module._apply)

    @property
    def empties(self) -> bool:
        """Whether ``module.to_empty()`` calls."""
        calls = frames.outward(self._frame)
        return frames.is_of(next((f for f in calls if frames.function_name(f) != "_apply"), None), nn.Module.to_empty)

    @property
    def swaps(self) -> bool:
        """Whether ``functional_call`` lends a tensor to a module."""
        return frames.is_of(self._frame, swap_tensor)

    @property
    def assigns_vector(self) -> bool:
        """Whether ``vector_to_parameters`` calls."""
        return frames.is_of(self._frame, nn.utils.vector_to_parameters)

    @property
    def restructures(self) -> str | None:
        """The module of ``torch.nn.utils`` that calls (weight_norm, parametrize, prune, ...), or None."""
        name = frames.module_name(frames.caller_of(self._frame) if self.reads_attribute else self._frame)
        is_one = name.startswith("torch.nn.utils.") and not name.startswith("torch.nn.utils._")  # of functional_call
        return name if is_one else None

    def forward_of(self, parameters: object) -> CallingForward | None:
        """Return the forward that reads an attribute of the module with these ``parameters``, or None if none does."""
        if not self.reads_attribute:
            return None
        for frame in frames.outward(frames.caller_of(self._frame)):
            if frames.is_in_module_file(frame):  # nn.Module.__call__, which runs the hooks
                return None
            module = frames.self_of(frame)
            if (
                frames.function_name(frame) == "forward"
                and getattr(module, "__dict__", {}).get("_parameters") is parameters
            ):
                return CallingForward(frame, module)
        return None


class CallingForward:
    """A running forward of ``module``."""

    def __init__(self, frame: Any, module: nn.Module) -> None:
        self._frame, self.module = frame, module

    def explain(self, param: Any) -> str:
        """Return the error for a forward that would compute with the shard ``param``."""
        info, kind = param._flatshard_info, type(self.module).__name__
        if any(frames.module_name(frame).startswith("torch.fx.") for frame in frames.outward(self._frame)):
            return str(cannot_trace("torch.fx", f"parameter {info.fqn!r}"))
        if any(frames.is_of(frame, CheckpointFunction.backward) for frame in frames.outward(self._frame)):
            return (
                f"parameter {info.fqn!r} is sharded, and {kind}.forward is recomputed in backward after its unit was "
                "resharded: another use of it in this backward was skipped (flatshard.skip), and with a reentrant "
                "checkpoint flatshard cannot know that a recomputation is still to come. Use use_reentrant=False, or run a "
                "backward for each forward. Otherwise this forward was not called by its unit's forward: call the module "
                "that is the unit, as module(...)"
            )
        # The cure: register the method that computes, if a unit has one; else call the unit, or make another one.
        called, found = self._method_around(param)
        if found is not None:
            owner, method = found
            what = f"{owner}.{method}"
            cure = (
                f"after flatshard.register_forward_method(module, {method!r}), {what} gathers what it uses. If it steps an "
                f"optimizer itself (manual optimization), do not register it, but make the {called} a unit of its own"
            )
        else:
            cure = (
                "call the module that is the unit, as module(...), or run this inside `with "
                "flatshard.summon_full_params(module):`; for the unit's other methods see register_forward_method. Or make "
                f"the {called} a unit of its own"
            )
        return (
            f"parameter {info.fqn!r} is sharded: this rank has elements {info.start}:{info.stop} of shape {info.shape}. But "
            f"{kind}.forward was called outside of its unit's forward: {cure}, as by policy={{{called}}}"
        )

    def _method_around(self, param: Any) -> tuple[str, tuple[str, str] | None]:
        """Return the class of the outermost module that a unit's method calls, and that method: its class and its name.

        The method is the innermost public one: ``generate``, and not the helper that it calls.
        """
        called, found = type(self.module).__name__, None
        for frame in frames.outward(frames.caller_of(self._frame)):
            caller = frames.self_of(frame)
            if not isinstance(caller, nn.Module) or frames.is_in_module_file(frame):
                continue
            if found is None and frames.function_name(frame) == "forward":
                called = type(caller).__name__
            if _gathers(caller, param):
                method = frames.method_name(type(caller), frame)
                if method not in (None, "forward") and (found is None or not method.startswith("_")):
                    found = type(caller).__name__, method
            if found is not None and not found[1].startswith("_"):
                break
        return called, found


def _gathers(module: nn.Module, param: Any) -> bool:
    """Return whether ``module`` is a unit whose forwards gather ``param``."""
    unit: Any = vars(module).get(UNIT_KEY)
    flats = () if unit is None else [flat for needed in unit.needs for flat in needed.handle.flats]
    return any(flat.index_of(param) is not None for flat in flats)


def cure_of_reading() -> str:
    """Return the cure for code that computes with a shard as if it were the full parameter."""
    for frame in frames.outward(frames.of_caller()):
        module = frames.self_of(frame)
        if frames.function_name(frame) == "forward" and UNIT_KEY in getattr(module, "__dict__", ()):
            return (
                f"But here {type(module).__name__}.forward computes with it, and the policy has made the module that has it "
                "a unit of its own. Leave that one to the unit around it: a head whose weight is read (a fused loss) by "
                "policy={Block} in place of SplitRoot({Block})"
            )
    return "If a method of yours computes with it, register the method by flatshard.register_forward_method"


def refuse_other_sharding(fqn: str) -> None:
    """Raise if torch's FSDP has called, which would shard the shard of the parameter ``fqn`` once more."""
    # nn.Module's __setattr__, and what noticed it, are in between.
    nearest = itertools.islice(frames.outward(frames.of_caller()), 8)
    if any(frames.module_name(frame).startswith(_OTHER_SHARDING) for frame in nearest):
        raise RuntimeError(
            f"parameter {fqn!r} is sharded by flatshard.fully_shard, and torch's FSDP would shard this rank's part of it "
            "once more. Use one of them: leave torch's out (in a tool that calls it unasked, turn its FSDP off), and "
            "build the module again"
        )


_OTHER_SHARDING = ("torch.distributed.fsdp", "torch.distributed._composable")


def variables_of(module: str, function: str | None = None) -> Mapping[str, Any] | None:
    """Return the local variables of the innermost running ``function`` of ``module``, or None if none runs.

    Without a ``function`` it is any one of the module.
    """
    for frame in frames.outward(frames.of_caller()):
        if frames.module_name(frame) == module and function in (None, frames.function_name(frame)):
            return frames.variables(frame)
    return None
