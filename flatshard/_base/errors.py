"""Errors: a user's mistake, or a bug of ours.

A user's mistake is a ``ValueError``, ``TypeError`` or ``RuntimeError``. Its message says *who* (the FQN), *what*
(actual against expected) and the *cure* (the call that fixes it). A bug of ours is an :class:`InternalError`.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flatshard._base import frames

_PACKAGE = f"{Path(__file__).parents[1]}/"


class InternalError(AssertionError):
    """A bug in flatshard: it reached a state that it regards as impossible. The call that raised it has changed nothing.

    Example::

        try:
            model(batch).sum().backward()
        except flatshard.InternalError as e:
            print(e)  # please report it, with the output of `python -m flatshard.env`
            raise
    """

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}. This is a bug in flatshard, not in your code: please report it with this message.")


class CollectiveError(RuntimeError):
    """A collective of a unit failed. Another rank died or left the step, the process group's timeout passed, or custom
    ``collectives=`` or a communication hook raised. The original error is its ``__cause__``.

    No collective of the unit is left under way, and its gradients of this backward are dropped. After a dead rank or a
    timeout a gloo group cannot be used: end the process, or make new groups and build the model again.

    Example::

        try:
            model(batch).sum().backward()
        except flatshard.CollectiveError as e:
            print(f"rank {e.rank} of {e.world_size}: the {e.phase} of unit {e.unit or '<root>'}")
            raise

    Attributes:
        phase: ``"all-gather"``, ``"reduce-scatter"``, ``"all-reduce"`` or ``"broadcast"``; for norms and other numbers
            ``"all-reduce for"`` and the name of the number.
        unit: the unit's FQN; ``""`` for the root, and for numbers.
        rank: this process's rank in the unit's process group.
        world_size: the number of ranks of that group.
    """

    def __init__(self, phase: str, unit: str, rank: int, world_size: int, cause: str) -> None:
        super().__init__(phase, unit, rank, world_size, cause)
        self.phase, self.unit, self.rank, self.world_size = phase, unit, rank, world_size

    def __str__(self) -> str:
        # The cause comes last: it may be a long text of gloo's about a connection, which does not say why it failed.
        of = "" if " for " in self.phase else f" of unit {self.unit or '<root>'!r}"
        return (
            f"the {self.phase}{of} failed on rank {self.rank} of {self.world_size}: if it "
            "waited in vain or lost a connection, look for the first error on the other ranks: one of them died, or did not "
            f"reach {'it' if not of else 'this unit'}. The error on this rank: {self.args[-1]}"
        )


class OutOfStepError(CollectiveError):
    """Ranks run different units, or the same units in different orders. They wait for collectives that others do not issue.

    All ranks raise it. No data of different units were mixed, unless the message says so. The process group cannot be used
    again. The attributes describe the collective of this rank.

    Example::

        try:
            model(batch).sum().backward()
        except flatshard.OutOfStepError as e:  # a CollectiveError, too: so it comes first
            print(e)  # what each rank did last
            raise
    """

    def __str__(self) -> str:
        return str(self.args[-1])


class ReconfiguredError(CollectiveError):
    """The process group got other ranks after a module was sharded over it. Nothing was sent.

    The message says how the remaining ranks continue. The attributes describe the collective of this rank.

    Example::

        try:
            model(batch).sum().backward()
        except flatshard.ReconfiguredError as e:  # a CollectiveError, too: so it comes first
            print(e)
            raise
    """

    def __str__(self) -> str:
        return str(self.args[-1])


def name_list(names: Iterable[str], limit: int = 8) -> str:
    """Return ``'a', 'b', ... (3 more)``: the first ``limit`` of ``names`` for an error message."""
    names = list(names)
    shown = ", ".join(repr(name) if name else "the root module" for name in names[:limit])
    return shown if len(names) <= limit else f"{shown}, ... ({len(names) - limit} more)"


def why_not_called(function: Any, *args: Any, **kwargs: Any) -> str | None:
    """Return why ``function`` cannot be called with these arguments, or None if it can, or has no signature."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as e:
        return str(e)
    except ValueError:  # written in C
        pass
    return None


def cannot_trace(what: str, who: str) -> RuntimeError:
    """Return the error for a tracer that reaches ``who``, a sharded parameter or a unit."""
    return RuntimeError(
        f"{what} cannot trace a sharded module: {who} is gathered for each forward, which a trace cannot contain. Trace "
        "a new model that is not sharded, with the values of flatshard.checkpoint.full_state_dict(module)"
    )


RESTRUCTURE_BEFORE = (
    "parametrize, prune, normalise or delete parameters before fully_shard. A model that is sharded already: build it again, "
    "load flatshard.checkpoint.full_state_dict(module) into it, change it, and then call fully_shard"
)


def warn_user(text: str) -> None:
    """Warn at the line that called into flatshard, whatever the number of our functions in between."""
    warnings.warn(text, stacklevel=1 + frames.callers_in(_PACKAGE))  # from Python 3.12 on: `skip_file_prefixes`
