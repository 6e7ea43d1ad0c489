"""A unit's unsharded parameters when a forward ends: the decision alone, without a process group."""

from dataclasses import replace

import pytest

from flatshard import ShardingStrategy
from flatshard._composable.hooks import KEPT_FOR_NEXT, RELEASED, STAYS, USED_NEXT, Fate, choose_fate
from flatshard._composable.unit_config import unit_config

FULL = unit_config(
    strategy=ShardingStrategy.FULL_SHARD,
    backward_prefetch=None,
    forward_prefetch=True,
    mixed_precision=None,
    cpu_offload=None,
)
KEEPING, FREEING = replace(FULL, reshard_after_forward=False), replace(FULL, reshard_after_forward=True)
ZERO2 = replace(FULL, strategy=ShardingStrategy.SHARD_GRAD_OP)
FACTS = dict.fromkeys(["in_backward", "used_next", "may_come", "outermost", "runs_again"], False)
ROWS = [
    ("", FULL, RELEASED),
    ("outermost", FULL, RELEASED),
    ("may_come", FULL, RELEASED),
    ("may_come outermost", FULL, STAYS),
    ("may_come outermost", FREEING, RELEASED),
    ("may_come", replace(FULL, reshard_after_forward=2), RELEASED),
    ("may_come", KEEPING, STAYS),
    ("", KEEPING, RELEASED),
    ("may_come", ZERO2, STAYS),
    ("may_come", replace(ZERO2, reshard_after_forward=True), RELEASED),
    ("runs_again", KEEPING, KEPT_FOR_NEXT),
    ("may_come runs_again", FULL, KEPT_FOR_NEXT),
    ("may_come runs_again", KEEPING, STAYS),
    ("in_backward", FREEING, STAYS),
    ("in_backward used_next", FREEING, USED_NEXT),
    ("in_backward used_next may_come outermost runs_again", KEEPING, USED_NEXT),
    ("in_backward runs_again", FULL, STAYS),
]


@pytest.mark.parametrize(("true", "config", "fate"), ROWS)
def test_the_fate_of_parameters_after_a_forward(true, config, fate):
    facts = FACTS | dict.fromkeys(true.split(), True)
    assert facts.keys() == FACTS.keys()
    assert choose_fate(**facts, config=config) is fate


def test_each_fate_has_a_row():
    assert {fate for _, _, fate in ROWS} == {*Fate}
