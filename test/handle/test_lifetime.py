"""The state machines, walked through their tables: what is in them works, what is not raises and changes nothing."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import flatshard
from flatshard import InternalError
from flatshard._comm.progress import Label
from flatshard._composable.completion import COMPLETION_TRANSITIONS, Completion, CompletionState
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
        move = getattr(lifetime, f"move_{machine}")
        if (before[machine], verb) in table:
            move(verb)
            before[machine] = table[before[machine], verb]
        else:
            what = {"params": "parameters", "grads": "gradients"}[machine]
            text = f"^cannot {verb} the {what} of unit 'layers.3' while {before[machine].name}"
            with pytest.raises(InternalError, match=text):
                move(verb)
        assert {"params": lifetime.params, "grads": lifetime.grads} == before


def test_an_internal_error_says_that_it_is_not_the_users_fault():
    with pytest.raises(InternalError, match=r"This is a bug in flatshard, not in your code: please report it"):
        Lifetime(Label("")).move_params("wait")


@pytest.mark.parametrize("machine", TABLES)
def test_every_state_can_be_reached_and_left_for_the_start(machine):
    """So whatever happens in a step, the next one can begin."""
    states, table = TABLES[machine]
    start = next(iter(states))

    def reachable(state):
        seen, todo = {state}, [state]
        while todo:
            here = todo.pop()
            new = {to for (at_state, _), to in table.items() if at_state is here} - seen
            seen |= new
            todo += new
        return seen

    assert reachable(start) == set(states)
    assert all(start in reachable(state) for state in states)


@pytest.mark.parametrize("machine", TABLES)
def test_the_packages_readme_shows_the_table(machine):
    states, table = TABLES[machine]
    events = list(dict.fromkeys(event for _, event in table))
    rows = [["", *events], ["---"] * (len(events) + 1)]
    for state in states:
        rows.append([f"**{state.name}**", *(to.name if (to := table.get((state, event))) else "" for event in events)])
    text = "\n".join(f"| {' | '.join(row)} |".replace("  ", " ") for row in rows)
    assert text in (Path(flatshard.__file__).parent / "README.md").read_text(), text


@pytest.mark.parametrize("event", ["complete", "end"])
def test_a_unit_that_no_backward_has_reached_is_not_completed(event):
    completion = Completion(Label("layers.3"))
    with pytest.raises(InternalError, match=f"^cannot {event} unit 'layers.3' in a backward while it is UNTOUCHED"):
        getattr(completion, event)()
    assert completion.state is CompletionState.UNTOUCHED
