"""The state machines, walked through their tables: what is in them works, what is not raises and changes nothing."""

import itertools
from pathlib import Path

import pytest

import flatshard
from flatshard import InternalError
from flatshard._comm.progress import Label
from flatshard._composable.completion import COMPLETION_TRANSITIONS, CompletionState
from flatshard._handle.lifetime import GRAD_TRANSITIONS, PARAM_TRANSITIONS, GradState, Lifetime, ParamState

# The attribute of Lifetime, its states (the first is where it starts), its table.
MACHINES = {"params": (ParamState, PARAM_TRANSITIONS), "grads": (GradState, GRAD_TRANSITIONS)}
TABLES = {**MACHINES, "completion": (CompletionState, COMPLETION_TRANSITIONS)}


def test_what_is_in_the_table_moves_that_machine_alone_and_all_else_raises():
    """Every state of either machine, every verb of either, and no verb at all."""
    verbs = sorted({verb for _, table in MACHINES.values() for _, verb in table})
    start = Lifetime(Label(""))
    assert (start.params, start.grads) == (ParamState.SHARDED, GradState.NONE)
    for params, grads, machine, verb in itertools.product(ParamState, GradState, MACHINES, [*verbs, "explode", ""]):
        before, table = {"params": params, "grads": grads}, MACHINES[machine][1]
        lifetime = Lifetime(Label("layers.3"))
        lifetime.params, lifetime.grads = params, grads
        if (before[machine], verb) in table:
            getattr(lifetime, f"move_{machine}")(verb)
            before[machine] = table[before[machine], verb]
        else:
            what = {"params": "parameters", "grads": "gradients"}[machine]
            text = (
                f"^cannot {verb} the {what} of unit 'layers.3' while {before[machine].name}.*This is a bug in flatshard"
            )
            with pytest.raises(InternalError, match=text):
                getattr(lifetime, f"move_{machine}")(verb)
        assert {"params": lifetime.params, "grads": lifetime.grads} == before


@pytest.mark.parametrize("machine", TABLES)
def test_the_packages_readme_shows_the_table(machine):
    states, table = TABLES[machine]
    events = list(dict.fromkeys(event for _, event in table))
    rows = [["", *events], ["---"] * (len(events) + 1)]
    for state in states:
        rows.append([f"**{state.name}**", *(to.name if (to := table.get((state, event))) else "" for event in events)])
    text = "\n".join(f"| {' | '.join(row)} |".replace("  ", " ") for row in rows)
    assert text in (Path(flatshard.__file__).parent / "README.md").read_text(), text
