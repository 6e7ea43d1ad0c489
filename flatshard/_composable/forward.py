"""The record of a running forward."""

from __future__ import annotations

from types import FrameType

from torch import nn

from flatshard._composable.claims import Claim
from flatshard._composable.state import Step, Unit


class Forward:
    """One running forward of a unit."""

    __slots__ = ("claims", "frame", "gathers", "in_backward", "is_hooked", "module", "step", "unit")

    def __init__(self, unit: Unit, module: nn.Module, frame: FrameType, in_backward: bool) -> None:
        self.unit = unit
        self.module = module  # the unit's, or the one of its group that runs
        self.frame = frame  # alive as long as the forward is
        self.in_backward = in_backward  # recomputed by activation checkpointing
        self.is_hooked = True  # False: a feature asked the hooks to do nothing
        self.gathers = True  # False: a feature shows other parameters, so nothing is gathered
        self.step: Step | None = None  # set at its end, if backward may reach it
        self.claims: list[tuple[Unit, Claim]] = []
        for needed in unit.needs:
            claim = Claim()
            needed.claims.append(claim)
            self.claims.append((needed, claim))

    @property
    def claim(self) -> Claim:
        """The claim on ``unit`` itself."""
        return self.claims[0][1]
