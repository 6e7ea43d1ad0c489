"""The last line of ``describe``: one of a thing is not several."""

from __future__ import annotations

from torch import nn

import flatshard


def test_one_unit_on_one_rank(world):
    world(1)
    model = flatshard.fully_shard(nn.Linear(4, 4))
    last = str(flatshard.describe(model)).splitlines()[-1]
    assert last == "1 unit, 1 flat parameter, 20 elements over 1 rank on cpu; 80 bytes of parameters here between steps"
