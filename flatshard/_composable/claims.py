"""Why a unit is unsharded (claims), what its modules show meanwhile, and why it is freed (reasons).

[Note: Claims]
A claim is one reason: a running forward, ``summon_full_params``, ``keep_unsharded``, a strategy that replicates parameters. A
unit lists its claims, the outermost first. The last claim that shows anything decides which parameters are registered in the
modules, and the greatest need of all decides whether the buffer may be freed. The code that made a claim removes exactly this
claim; the remaining ones decide what happens then. After an exception that skipped hooks, only the claims of forwards that
have ended are dropped: a ``summon_full_params`` around them keeps its own claim.

Parameters may also be unsharded without a claim: those that stay from a forward to its backward, that the user unsharded, or
that were prefetched. Nothing keeps these from being freed, and the next forward checks whether they are outdated.

[Note: Freeing]
``Unit.release`` frees unsharded parameters. The caller gives a reason, and the table ``Reason`` tells which needs
refuse it. The handle itself drops values that are no longer the parameters': after the user has replaced or moved them, or
if a gather failed. It knows no claims: who calls ``check_parameters`` makes sure that none is in use.

When all gradients of a unit have come, its parameters have been used for the last time, if all of them are trainable and in
the graph. But the value of a frozen parameter is also needed for the gradient of the input, and a parameter that is not in
the graph may be inside a reentrant checkpoint. With such a parameter a unit is freed when backward leaves it through its
inputs (``_Leave`` in autograd_hooks.py), or at the end of backward. Backward may then come to an earlier forward of the unit
in the same pass (a module called twice, or another module of a group).

All ranks must gather equally often, and whether all gradients have come depends on a rank's data. If all parameters of a unit
are trainable, a rank whose graph lacks some of them lends the memory where others free it. If some are, the unit is freed
once a pass, when backward leaves its first forward. If none are, it is freed and gathered again for each forward.
"""

from __future__ import annotations

import enum

from flatshard._handle.registrations import Shown


class Need(enum.IntEnum):
    """The need that a claim has of the unsharded buffer. A greater need forbids more to free it."""

    NOTHING = 0  # of a unit without claims
    COPIES = 1  # shows copies or the shards: whoever uses it can do without the buffer
    BUFFER = 2  # a later forward is to find it, and checks whether its values are current
    VALUES = 3  # reads the values in the buffer


class Reason(enum.Enum):
    """A reason to free a unit. Each member says when it applies, and which need refuses it, or None.

    ``in_backward``: a backward refuses it, too, if its graph outlives it (``Backward.keeps_unsharded``).
    ``changes_are_seen``: the end of the last forward has looked for changes of its parameters. Later ones are dropped.
    """

    FORWARD_ENDED = "a forward ends, and the unit is not to stay for its backward", Need.BUFFER, False, True
    GRADIENTS_CAME = "all its gradients have come, and no other gradient needs its values", Need.BUFFER, True
    INPUTS_LEFT = "backward has left it through the inputs of its forwards", Need.BUFFER, True
    BACKWARD_ENDED = "the backward that gathered or reached it ends", Need.BUFFER
    NOT_USED = "it was gathered ahead, and its pass ends", Need.BUFFER
    ROOM_NEEDED = "another unit needs its static buffer, and it has all its gradients", Need.BUFFER
    LET_GO = "`keep_unsharded` ends, or `recover` was called", Need.BUFFER
    ACCESSED = "`summon_full_params` shows copies, or ends: values may have changed", Need.VALUES
    FAILED = "an exception skipped the end of a forward", Need.VALUES
    OUTDATED = "its shards may have changed, and it is gathered again", None
    ASKED = "a verb of the user asks, after a check that it is not in use: `reshard`", None

    def __init__(
        self, when: str, refused_from: Need | None, in_backward: bool = False, changes_are_seen: bool = False
    ) -> None:
        self.when, self.refused_from, self.in_backward = when, refused_from, in_backward
        self.changes_are_seen = changes_are_seen or in_backward


# For code that runs in each step: in Python 3.11 `Need.BUFFER` is a call of a function.
NOTHING, BUFFER, VALUES = Need.NOTHING, Need.BUFFER, Need.VALUES
FORWARD_ENDED, GRADIENTS_CAME, INPUTS_LEFT = Reason.FORWARD_ENDED, Reason.GRADIENTS_CAME, Reason.INPUTS_LEFT


class Claim:
    """The claim of a forward. Subclasses have other reasons."""

    shown_to_user = False  # the user works with the parameters that it shows

    shows: Shown | None = None  # the parameters to register; None: as the previous claim says
    need = VALUES

    def show(self, shown: Shown, need: Need = VALUES) -> None:
        """Have the modules show ``shown``."""
        self.shows, self.need = shown, need

    @property
    def uses(self) -> bool:
        """Whether it relies on the current values, as a forward does."""
        return self.need is not BUFFER

    def check_forward(self, grad: bool) -> None:
        """Raise if the unit must not run a forward under this claim. ``grad``: it makes a graph, for a backward to come."""

    def check_backward(self) -> None:
        """Raise if backward must not reach the unit under this claim."""


class Kept(Claim):
    """The claim of a strategy that keeps unsharded parameters until they change."""

    need = BUFFER


KEPT = Kept()


class Claims(list[Claim]):
    """The claims on one unit, the outermost first."""

    __slots__ = ()

    @property
    def need(self) -> Need:
        """The greatest need that one of them has of the buffer."""
        return max([claim.need for claim in self], default=NOTHING)

    @property
    def in_use(self) -> bool:
        """Whether one relies on the current values, as a forward does."""
        return bool(self) and any([claim.need is not BUFFER for claim in self])

    @property
    def keep_buffer(self) -> bool:
        """Whether one only wants the buffer to stay, with any values."""
        return bool(self) and any([claim.need is BUFFER for claim in self])

    @property
    def show_copies(self) -> bool:
        """Whether the user sees copies of the parameters. Forwards inside use these copies."""
        return bool(self) and any([claim.shown_to_user and isinstance(claim.shows, dict) for claim in self])

    def is_only_use(self, claim: Claim) -> bool:
        """Return whether no claim but ``claim`` relies on the current values."""
        return len(self) == 1 or all([each.need is BUFFER for each in self if each is not claim])

    def is_only_reader(self, claim: Claim) -> bool:
        """Return whether no claim but ``claim`` reads the values in the buffer."""
        return len(self) == 1 or all([each.need is not VALUES for each in self if each is not claim])
