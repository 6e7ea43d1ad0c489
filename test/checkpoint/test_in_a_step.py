"""State asked for in the middle of a step, also by another thread: right values, or an error; and the step goes on."""

import functools
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from pairs import all_pairs
from parity import check_same_gradients, twins
from saving import STRATEGIES
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from flatshard.checkpoint import ShardedValue, full_state_dict

WHOLE = StateDictOptions(full_state_dict=True)
VERBS: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "state_dict": lambda model: model.state_dict(),
    "full_state_dict": full_state_dict,
    "get_model_state_dict": get_model_state_dict,
    "get_model_state_dict, whole": lambda model: get_model_state_dict(model, options=WHOLE),
}
CALL_LATER = (
    r"are in a forward or in summon_full_params.*Call it outside|are in a backward\. Call it when loss\.backward\(\)"
)


class Asking(nn.Module):
    """Calls ``ask`` in its forward, or in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.when = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).tanh()
        if self.when == "forward":
            self.ask()
        elif self.when == "backward":
            x.register_hook(lambda _: self.ask())
        return x


def network() -> nn.Module:
    return nn.Sequential(Asking(), Asking(), Asking())


def ask_once(model: nn.Module, verb: Any, values: dict[str, Tensor], parts: dict[str, Tensor]) -> bool:
    """Whether the verb is refused; else its values are right."""
    try:
        found = verb(model)
    except RuntimeError as e:
        if not re.search(CALL_LATER, str(e)):
            raise
        return True
    assert found.keys() == values.keys()
    for fqn, value in found.items():
        is_part = isinstance(value, ShardedValue)
        assert value.shape == values[fqn].shape
        assert torch.equal(value.to_local() if is_part else value, (parts if is_part else values)[fqn])
    return False


def in_a_step(ctx, strategy: Any) -> dict[str, set[str]]:
    """By moment: the verbs that raise."""
    inputs = torch.randn(2, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    refused: dict[str, set[str]] = {}
    for name, when, on_a_thread in all_pairs([*VERBS], ("forward", "between", "backward"), (False, True)):
        ctx.note(f"{name} {when} {on_a_thread}")
        plain, model = twins(ctx, network, {Asking}, strategy=strategy)
        plain(inputs).sum().backward()
        parts = {n: p.detach().clone() for n, p in model.named_parameters()}
        asked: list[bool] = []
        look = functools.partial(ask_once, model, VERBS[name], plain.state_dict(), parts)

        def ask(look=look, on_a_thread=on_a_thread, asked=asked) -> None:
            if on_a_thread:
                with ThreadPoolExecutor(1) as threads:
                    asked.append(threads.submit(look).result())
            else:
                asked.append(look())

        model[1].when, model[1].ask = when, ask
        loss = model(inputs).sum()
        if when == "between":
            ask()
        loss.backward()
        if asked == [True]:
            refused.setdefault(when, set()).add(name)
        assert len(asked) == 1
        model[1].when = ""
        check_same_gradients(model, plain)
        model.zero_grad()
        model(inputs).sum().backward()
        check_same_gradients(model, plain)
    return refused


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_state_in_a_step(pool, strategy):
    for refused in pool.run(in_a_step, strategy, world_size=2):
        gathered = {"full_state_dict"} | ({"get_model_state_dict, whole"} if strategy is not STRATEGIES[-1] else set())
        assert refused == {"forward": gathered, "backward": gathered}
