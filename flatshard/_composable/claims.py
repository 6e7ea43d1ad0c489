"""Claims: the reasons why a unit is unsharded, and what its modules show meanwhile.

[Note: Claims]
A claim is one reason: a running forward, ``summon_full_params``, ``keep_unsharded``, a strategy that replicates parameters. A
unit lists its claims, the outermost first. The last claim that shows anything decides which parameters are registered in the
modules, and the storage stays while any claim needs it. The code that made a claim removes exactly this claim; the remaining
ones decide what happens then. After an exception that skipped hooks, only the claims of forwards that have ended are dropped:
a ``summon_full_params`` around them keeps its own claim.

Parameters may also be unsharded without a claim: those that stay from a forward to its backward, that the user unsharded, or
that were prefetched. Nothing keeps these from being freed, and the next forward checks whether they are outdated.
"""

from __future__ import annotations

from flatshard._handle.registrations import Shown


class Claim:
    """The claim of a forward. Subclasses have other reasons."""

    uses = True  # relies on the current values; False: only wants the storage to stay, even with outdated values
    by_user = False  # the user works with the parameters that it shows

    shows: Shown | None = None  # the parameters to register; None: as the previous claim says
    needs_storage = True  # the unsharded storage must stay

    def show(self, shown: Shown, needs_storage: bool = True) -> None:
        """Have the modules show ``shown``. ``needs_storage``: whether the unsharded storage must stay."""
        self.shows, self.needs_storage = shown, needs_storage

    def check_forward(self, grad: bool) -> None:
        """Raise if the unit must not run a forward under this claim. ``grad``: it makes a graph, for a backward to come."""

    def check_backward(self) -> None:
        """Raise if backward must not reach the unit under this claim."""


class Kept(Claim):
    """The claim of a strategy that keeps unsharded parameters until they change: the storage stays allocated, but the values
    in it may be outdated.
    """

    uses = False
    needs_storage = False


KEPT = Kept()


class Claims(list[Claim]):
    """The claims on one unit, the outermost first."""

    __slots__ = ()

    @property
    def need_storage(self) -> bool:
        """Whether one requires the unsharded parameters to stay in memory."""
        return bool(self) and any([claim.needs_storage for claim in self])

    @property
    def use(self) -> bool:
        """Whether one relies on the current values, as a forward does."""
        return bool(self) and any([claim.uses for claim in self])

    @property
    def keep(self) -> bool:
        """Whether one only wants the unsharded storage to stay, with any values."""
        return bool(self) and not all([claim.uses for claim in self])

    @property
    def show_copies(self) -> bool:
        """Whether the user sees copies of the parameters. Forwards inside use these copies."""
        return bool(self) and any([claim.by_user and isinstance(claim.shows, dict) for claim in self])

    def only(self, claim: Claim) -> bool:
        """Return whether no claim but ``claim`` relies on the current values."""
        return len(self) == 1 or not any([each.uses for each in self if each is not claim])
