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
VERBS = sorted({verb for _, table in MACHINES.values() for _, verb in table})


def states_of(lifetime: Lifetime) -> dict[str, object]:
    return {"params": lifetime.params, "grads": lifetime.grads}


def move(lifetime: Lifetime, machine: str, verb: str) -> None:
    getattr(lifetime, f"move_{machine}")(verb)


def steps(legal: bool):
    """(machine, verb, both states before): every state of either machine, every verb of either, and no verb at all."""
    for params, grads, machine, verb in itertools.product(ParamState, GradState, MACHINES, [*VERBS, "explode", ""]):
        before = {"params": params, "grads": grads}
        if ((before[machine], verb) in MACHINES[machine][1]) == legal:
            yield pytest.param(machine, verb, before, id=f"{params.name}-{grads.name}-{machine}-{verb or 'nothing'}")


def at(states: dict[str, object]) -> Lifetime:
    lifetime = Lifetime(Label("layers.3"))
    for machine, state in states.items():
        setattr(lifetime, machine, state)
    return lifetime


@pytest.mark.parametrize(("machine", "verb", "before"), list(steps(legal=True)))
def test_what_is_in_the_table_moves_that_machine_alone(machine, verb, before):
    lifetime = at(before)
    move(lifetime, machine, verb)
    assert states_of(lifetime) == {**before, machine: MACHINES[machine][1][before[machine], verb]}


@pytest.mark.parametrize(("machine", "verb", "before"), list(steps(legal=False)))
def test_what_is_not_in_the_table_raises_and_changes_nothing(machine, verb, before):
    lifetime = at(before)
    what = {"params": "parameters", "grads": "gradients"}[machine]
    with pytest.raises(
        InternalError, match=f"^cannot {verb} the {what} of unit 'layers.3' while {before[machine].name}"
    ):
        move(lifetime, machine, verb)
    assert states_of(lifetime) == before


def test_an_internal_error_says_that_it_is_not_the_users_fault():
    with pytest.raises(InternalError, match=r"This is a bug in flatshard, not in your code: please report it"):
        Lifetime(Label("")).move_params("wait")


def test_it_starts_with_shards_and_no_gradients():
    assert states_of(Lifetime(Label(""))) == {"params": ParamState.SHARDED, "grads": GradState.NONE}


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
