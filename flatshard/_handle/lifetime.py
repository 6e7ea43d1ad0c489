"""The states of a unit's parameters and gradients. All transitions are in this file.

Parameters, in terms of memory:

- SHARDED      only the local shard exists; the unsharded buffer has no storage.
- UNSHARDING   the unsharded buffer has storage and an all-gather is writing into it: nobody may read it.
- UNSHARDED    the unsharded buffer holds every parameter.

Gradients between a unit's first gradient and the end of its reduction:

- NONE         no reduction input exists. (The reduced gradients, if any, are the parameters' ``.grad``.)
- FILLING      gradients come: where autograd puts them, or in the reduction input. gradients.py says which.
- HELD         the reduction input keeps them between two backwards: the last one was told not to reduce (``no_sync``).
- REDUCING     the collective reads the reduction input: nobody may write to it.

What the user can change behind our back (``.grad``, ``requires_grad``, ``p.data``) is read when needed, never mirrored
here. What the tables don't hold is a bug of ours, raises, and changes nothing.
"""

from __future__ import annotations

import enum

from flatshard._comm.progress import Label
from flatshard._errors import InternalError


class ParamState(enum.IntEnum):  # int: looked up many times a step, and hashing a plain Enum is Python code
    SHARDED = enum.auto()
    UNSHARDING = enum.auto()
    UNSHARDED = enum.auto()


class GradState(enum.IntEnum):
    NONE = enum.auto()
    FILLING = enum.auto()
    HELD = enum.auto()
    REDUCING = enum.auto()


PARAM_TRANSITIONS: dict[tuple[ParamState, str], ParamState] = {
    (ParamState.SHARDED, "unshard"): ParamState.UNSHARDING,
    (ParamState.UNSHARDING, "wait"): ParamState.UNSHARDED,
    (ParamState.UNSHARDED, "reshard"): ParamState.SHARDED,
    (ParamState.UNSHARDING, "reshard"): ParamState.SHARDED,  # a mistargeted prefetch: waited for, then freed
}

GRAD_TRANSITIONS: dict[tuple[GradState, str], GradState] = {
    (GradState.NONE, "receive"): GradState.FILLING,
    (GradState.FILLING, "receive"): GradState.FILLING,
    (GradState.FILLING, "hold"): GradState.HELD,
    (GradState.HELD, "receive"): GradState.FILLING,
    (GradState.HELD, "reduce"): GradState.REDUCING,  # nothing new came in the last backward
    (GradState.FILLING, "reduce"): GradState.REDUCING,
    (GradState.NONE, "reduce"): GradState.REDUCING,  # nothing came on this rank; the others may have something
    (GradState.REDUCING, "finish"): GradState.NONE,
    (GradState.FILLING, "discard"): GradState.NONE,  # an exception in backward
    (GradState.HELD, "discard"): GradState.NONE,
}


class Lifetime:
    """The two machines of one handle: each ``move_*`` looks the transition up, and raises where there is none."""

    __slots__ = ("_label", "grads", "params")

    def __init__(self, label: Label) -> None:
        self._label = label
        self.params = ParamState.SHARDED
        self.grads = GradState.NONE

    def move_params(self, verb: str) -> None:
        state = PARAM_TRANSITIONS.get((self.params, verb))
        if state is None:
            raise InternalError(f"cannot {verb} the parameters of unit {self._label.unit!r} while {self.params.name}")
        self.params = state

    def move_grads(self, verb: str) -> None:
        state = GRAD_TRANSITIONS.get((self.grads, verb))
        if state is None:
            raise InternalError(f"cannot {verb} the gradients of unit {self._label.unit!r} while {self.grads.name}")
        self.grads = state
