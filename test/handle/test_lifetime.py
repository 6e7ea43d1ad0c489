"""Every transition in the state machines' tables works; any other raises and changes nothing."""

import itertools
from pathlib import Path

import pytest

import flatshard
from flatshard import InternalError
from flatshard._comm.progress import Label
from flatshard._composable.unit_backward import COMPLETION_TRANSITIONS, CompletionState
from flatshard._handle.lifetime import GRAD_TRANSITIONS, PARAM_TRANSITIONS, GradState, Lifetime, ParamState

# The attribute of Lifetime, its states, and its table.
MACHINES = {"params": (ParamState, PARAM_TRANSITIONS), "grads": (GradState, GRAD_TRANSITIONS)}
TABLES = {**MACHINES, "completion": (CompletionState, COMPLETION_TRANSITIONS)}


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_in_the_table_moves_and_all_else_raises(machine):
    states, table = MACHINES[machine]
    for state, verb in itertools.product(states, [*{verb for _, verb in table}, "explode", ""]):
        lifetime = Lifetime(Label("layers.3"))
        setattr(lifetime, machine, state)
        if (state, verb) in table:
            getattr(lifetime, f"move_{machine}")(verb)
        else:
            text = f"^cannot {verb} the .* of unit 'layers.3' while {state.name}.*This is a bug in flatshard"
            with pytest.raises(InternalError, match=text):
                getattr(lifetime, f"move_{machine}")(verb)
        assert getattr(lifetime, machine) is table.get((state, verb), state)


@pytest.mark.parametrize("machine", TABLES)
def test_the_packages_readme_shows_the_table(machine):
    states, table = TABLES[machine]
    events = list(dict.fromkeys(event for _, event in table))
    rows = [["", *events], ["---"] * (len(events) + 1)]
    for state in states:
        rows.append([f"**{state.name}**", *(to.name if (to := table.get((state, event))) else "" for event in events)])
    text = "\n".join(f"| {' | '.join(row)} |".replace("  ", " ") for row in rows)
    assert text in (Path(flatshard.__file__).parent / "README.md").read_text(), text
