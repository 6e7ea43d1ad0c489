"""Claims: the reasons why a unit is unsharded, and what its modules show meanwhile.

[Note: Claims]
A claim is one reason: a running forward, ``summon_full_params``, ``keep_unsharded``, a strategy that replicates parameters. A
unit lists its claims, the outermost first. The last claim that shows anything decides which parameters are registered in the
modules, and the greatest need of all decides whether the buffer may be freed. The code that made a claim removes exactly this
claim; the remaining ones decide what happens then. After an exception that skipped hooks, only the claims of forwards that
have ended are dropped: a ``summon_full_params`` around them keeps its own claim.

Parameters may also be unsharded without a claim: those that stay from a forward to its backward, that the user unsharded, or
that were prefetched. Nothing keeps these from being freed, and the next forward checks whether they are outdated.
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


class Claim:
    """The claim of a forward. Subclasses have other reasons."""

    by_user = False  # the user works with the parameters that it shows

    shows: Shown | None = None  # the parameters to register; None: as the previous claim says
    need = Need.VALUES

    def show(self, shown: Shown, need: Need = Need.VALUES) -> None:
        """Have the modules show ``shown``."""
        self.shows, self.need = shown, need

    @property
    def uses(self) -> bool:
        """Whether it relies on the current values, as a forward does."""
        return self.need is not Need.BUFFER

    def check_forward(self, grad: bool) -> None:
        """Raise if the unit must not run a forward under this claim. ``grad``: it makes a graph, for a backward to come."""

    def check_backward(self) -> None:
        """Raise if backward must not reach the unit under this claim."""


class Kept(Claim):
    """The claim of a strategy that keeps unsharded parameters until they change."""

    need = Need.BUFFER


KEPT = Kept()


class Claims(list[Claim]):
    """The claims on one unit, the outermost first."""

    __slots__ = ()

    @property
    def need(self) -> Need:
        """The greatest need that one of them has of the buffer."""
        return max([claim.need for claim in self], default=Need.NOTHING)

    @property
    def in_use(self) -> bool:
        """Whether one relies on the current values, as a forward does."""
        return bool(self) and any([claim.need is not Need.BUFFER for claim in self])

    @property
    def keep_buffer(self) -> bool:
        """Whether one only wants the buffer to stay, with any values."""
        return bool(self) and any([claim.need is Need.BUFFER for claim in self])

    @property
    def show_copies(self) -> bool:
        """Whether the user sees copies of the parameters. Forwards inside use these copies."""
        return bool(self) and any([claim.by_user and isinstance(claim.shows, dict) for claim in self])

    def is_only_use(self, claim: Claim) -> bool:
        """Return whether no claim but ``claim`` relies on the current values."""
        return len(self) == 1 or all([each.need is Need.BUFFER for each in self if each is not claim])

    def is_only_reader(self, claim: Claim) -> bool:
        """Return whether no claim but ``claim`` reads the values in the buffer."""
        return len(self) == 1 or all([each.need is not Need.VALUES for each in self if each is not claim])
