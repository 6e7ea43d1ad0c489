"""Why a unit is unsharded, and what its modules show meanwhile.

[Note: Claims]
A claim is one reason: a forward under way, ``summon_full_params``, ``keep_unsharded``. A unit lists its claims, the outermost
first. The last one that shows anything decides what is registered in the modules, and the storage stays while any claim
pins it. Who made a claim releases that very one, and the rest follows from those that are left. After an exception that
skipped hooks, the claims of forwards that are gone are dropped and no others: a ``summon_full_params`` around them keeps
what it shows.

What has no claim is free to go: parameters that stay unsharded from a forward to its backward, that the user unsharded, or
that were gathered ahead. Who leaves them decides that, and the next forward looks whether they are outdated.
"""

from __future__ import annotations

from flatshard._handle.slots import Shown


class Claim:
    """That of one forward, or of what a subclass says."""

    __slots__ = ("pins", "shows")

    uses = True  # whether it relies on the values; False: it only wants the storage to stay, outdated or not
    by_user = False  # the user looks at what it shows

    def __init__(self) -> None:
        self.shows: Shown | None = None  # None: what the claims before it show
        self.pins = True  # whether the unsharded storage must stay

    def check_forward(self, grad: bool) -> None:
        """Raise if the unit must not run a forward inside. ``grad``: with gradients."""

    def check_backward(self) -> None:
        """Raise if backward must not come to the unit inside."""
