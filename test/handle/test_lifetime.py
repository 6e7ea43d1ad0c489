"""The tables of a unit's states: an event without a cell raises and changes nothing, and the package's README shows them."""

import itertools
from pathlib import Path

import pytest
from torch import nn

import flatshard
from flatshard import InternalError, fully_shard
from flatshard._composable.backward import COMPLETION_TRANSITIONS
from flatshard._composable.claims import Reason
from flatshard._composable.find import units_below
from flatshard._composable.state import CompletionState
from flatshard._handle.lifetime import GRAD_TRANSITIONS, PARAM_TRANSITIONS, GradState, ParamState

README = (Path(flatshard.__file__).parent / "README.md").read_text()
TABLES = {
    "params": (ParamState, PARAM_TRANSITIONS),
    "grads": (GradState, GRAD_TRANSITIONS),
    "completion": (CompletionState, COMPLETION_TRANSITIONS),
}


def test_an_event_without_a_cell_raises_and_changes_nothing(fake_group):
    _, unit = units_below(fully_shard(nn.Sequential(nn.Linear(2, 2)), policy={nn.Linear}))
    gradients = unit.handle.gradients
    for state, event in itertools.product(GradState, [*{event for _, event in GRAD_TRANSITIONS}, "explode", ""]):
        gradients.state = state
        if (state, event) in GRAD_TRANSITIONS:
            gradients._transition(event)
        else:
            text = f"^cannot {event} the gradients of unit '0' while {state.name}.*This is a bug in flatshard"
            with pytest.raises(InternalError, match=text):
                gradients._transition(event)
        assert gradients.state is GRAD_TRANSITIONS.get((state, event), state)
    for state, event in itertools.product(ParamState, ["unshard", "wait", "fail", "lend", "reshard"]):
        if (state, event) not in PARAM_TRANSITIONS:
            with pytest.raises(InternalError, match=f"^cannot {event} the parameters of a unit while {state.name}"):
                PARAM_TRANSITIONS[state, event]


@pytest.mark.parametrize("machine", TABLES)
def test_the_packages_readme_shows_the_table(machine):
    states, table = TABLES[machine]
    events = list(dict.fromkeys(event for _, event in table))
    rows = [["", *events], ["---"] * (len(events) + 1)]
    for state in states:
        rows.append([f"**{state.name}**", *(to.name if (to := table.get((state, event))) else "" for event in events)])
    text = "\n".join(f"| {' | '.join(row)} |".replace("  ", " ") for row in rows)
    assert text in README, text


def test_the_packages_readme_shows_why_a_unit_is_freed():
    for reason in Reason:
        refused = "" if reason.refused_from is None else f"from {reason.refused_from.name}"
        refused += ", or if the graph is kept" if reason.in_backward else ""
        assert f"| **{reason.name}** | {reason.when} | {refused} |" in README
