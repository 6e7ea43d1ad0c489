"""The states of a unit's parameters and gradients, and all transitions. ``FlatParamHandle.state`` and ``UnitGradients.state``
make them.

Parameters, in terms of memory:

- SHARDED      only the local shard exists: the unsharded buffer has no storage.
- UNSHARDING   an all-gather is writing to the unsharded buffer, which must not be read. It has storage, at the latest when
               the all-gather is waited for.
- UNSHARDED    the unsharded buffer holds every parameter, with values as its :class:`UnshardedStamp` says.
- LENT         the parameters count as sharded, and are gathered before the next use, as on other ranks. But the buffer keeps
               its memory and values, which outputs or the rest of this rank's graph may read. A gather writes the same
               values again.

Gradients between a unit's first gradient and the end of its reduction:

- NONE         there are none. (The reduced gradients, if any, are the parameters' ``.grad``.)
- FILLING      gradients are arriving: in autograd's own tensors, or in the reduction input. See gradients.py.
- HELD         the reduction input keeps them until the next backward: the last one did not reduce (``no_sync``).
- REDUCING     the collective reads the reduction input: it must not be written to.
- DEFERRED     the same, or it has ended. The result becomes ``.grad`` when the user says so.
- PARTIAL      they are averaged over the shards, and not over the replicas yet: reduction.py, [Note: Accumulating within the
               shard group]. Later gradients go through FILLING, HELD and REDUCING beside them, and are then added.

A transition that is not in the tables is a bug in flatshard: it raises, and changes nothing.
"""

from __future__ import annotations

import enum
from typing import NamedTuple, NoReturn

from flatshard._base.errors import InternalError


class ParamState(enum.IntEnum):  # not Enum, whose hash is Python code: states are looked up in every step
    SHARDED = enum.auto()
    UNSHARDING = enum.auto()
    UNSHARDED = enum.auto()
    LENT = enum.auto()


class GradState(enum.IntEnum):
    NONE = enum.auto()
    FILLING = enum.auto()
    HELD = enum.auto()
    REDUCING = enum.auto()
    DEFERRED = enum.auto()
    PARTIAL = enum.auto()


# For code that runs in each step: in Python 3.11 `GradState.NONE` takes five times as long as a name.
SHARDED, UNSHARDING, UNSHARDED, LENT = ParamState
NONE, FILLING, HELD, REDUCING, DEFERRED, PARTIAL = GradState

WITHHELD = GradState.HELD, GradState.DEFERRED, GradState.PARTIAL
"""States between backwards with gradients that are not in ``.grad``. An optimizer would miss them."""


class ParamTransitions(dict[tuple[ParamState, str], ParamState]):
    """The state of parameters after an event, by the state before it and the event."""

    def __missing__(self, key: tuple[ParamState, str]) -> NoReturn:
        raise InternalError(f"cannot {key[1]} the parameters of a unit while {key[0].name}")


PARAM_TRANSITIONS = ParamTransitions(
    {
        (ParamState.SHARDED, "unshard"): ParamState.UNSHARDING,
        (ParamState.LENT, "unshard"): ParamState.UNSHARDING,
        (ParamState.UNSHARDING, "wait"): ParamState.UNSHARDED,
        (ParamState.SHARDED, "fail"): ParamState.SHARDED,  # an all-gather raised: when it was issued, ...
        (ParamState.UNSHARDING, "fail"): ParamState.SHARDED,  # ... or when it was waited for
        (ParamState.LENT, "fail"): ParamState.SHARDED,
        (ParamState.UNSHARDED, "lend"): ParamState.LENT,
        (ParamState.UNSHARDED, "reshard"): ParamState.SHARDED,
        (ParamState.LENT, "reshard"): ParamState.SHARDED,
    }
)

GRAD_TRANSITIONS: dict[tuple[GradState, str], GradState] = {
    (GradState.NONE, "receive"): GradState.FILLING,
    (GradState.FILLING, "receive"): GradState.FILLING,
    (GradState.HELD, "receive"): GradState.FILLING,
    (GradState.PARTIAL, "receive"): GradState.FILLING,
    (GradState.FILLING, "hold"): GradState.HELD,
    (GradState.NONE, "reduce"): GradState.REDUCING,  # this rank has no gradients, but other ranks may
    (GradState.FILLING, "reduce"): GradState.REDUCING,
    (GradState.HELD, "reduce"): GradState.REDUCING,  # the last backward had no gradients for the unit
    (GradState.PARTIAL, "reduce"): GradState.REDUCING,  # the same
    (GradState.REDUCING, "defer"): GradState.DEFERRED,
    (GradState.REDUCING, "finish"): GradState.NONE,
    (GradState.DEFERRED, "finish"): GradState.NONE,
    (GradState.REDUCING, "finish in part"): GradState.PARTIAL,
    (GradState.DEFERRED, "finish in part"): GradState.PARTIAL,
    (GradState.FILLING, "discard"): GradState.NONE,  # after an exception in backward
    (GradState.HELD, "discard"): GradState.NONE,
    (GradState.PARTIAL, "discard"): GradState.NONE,
}


BY_USER = -1
"""``UnshardedStamp.by`` after the user called ``unshard``, until a forward uses the parameters."""
BY_NONE = 0
"""``UnshardedStamp.by`` of parameters that an ended backward has left unsharded."""


class UnshardedStamp(NamedTuple):
    """The values of unsharded parameters. The handle makes a new stamp with each gather."""

    version: int  # of the shards that they were gathered from: `FlatParamHandle.version`
    by: int  # the last pass that wanted them, BY_USER, or BY_NONE after a backward
    exact: bool  # they are equal to the shards bit for bit, up to the cast
    for_backward: bool  # they were gathered for a backward
