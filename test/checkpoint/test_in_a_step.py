"""State requested during a step, possibly by another thread: right values or an error, and the step continues."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from on_ranks import ranks
from pairs import all_pairs, some
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
REFUSED = {
    "forward": r"are in a forward or in summon_full_params.*Call it outside",
    "backward": r"are in a backward\. Call it when loss\.backward\(\)",
}


class Asking(nn.Linear):
    """Calls ``ask`` in its forward or in its backward."""

    when = ""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x).tanh()
        if self.when == "forward":
            self.ask()
        elif self.when == "backward":
            x.register_hook(lambda _: self.ask())
        return x


def ask(verb: Any, refused: str, values: dict[str, Tensor], parts: dict[str, Tensor], model: nn.Module) -> None:
    """Assert that ``verb`` raises ``refused``, if given, or returns the right values."""
    if refused:
        with pytest.raises(RuntimeError, match=refused):
            verb(model)
        return
    found = verb(model)
    assert found.keys() == values.keys()
    for fqn, value in found.items():
        is_part = isinstance(value, ShardedValue)
        assert torch.equal(value.to_local() if is_part else value, (parts if is_part else values)[fqn])


@pytest.mark.parametrize("strategy", some(STRATEGIES, 2))
@ranks(2)
def test_state_in_a_step(ctx, strategy) -> None:
    inputs = torch.randn(2, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for name, when, on_a_thread in all_pairs([*VERBS], ("forward", "between", "backward"), (False, True)):
        ctx.note(f"{name} {when} {on_a_thread}")
        plain, model = twins(ctx, lambda: nn.Sequential(*(Asking(5, 5) for _ in range(3))), {Asking}, strategy=strategy)
        plain(inputs).sum().backward()
        parts = {n: p.detach().clone() for n, p in model.named_parameters()}
        gathers = name == "full_state_dict" or (name.endswith("whole") and strategy is not STRATEGIES[-1])
        look = functools.partial(
            ask, VERBS[name], REFUSED.get(when, "") if gathers else "", plain.state_dict(), parts, model
        )
        with ThreadPoolExecutor(1) as threads:
            ask_here = (lambda: threads.submit(look).result()) if on_a_thread else look  # noqa: B023
            model[1].when, model[1].ask = when, ask_here
            loss = model(inputs).sum()
            if when == "between":
                ask_here()
            loss.backward()
        model[1].when = ""
        check_same_gradients(model, plain)
        model.zero_grad()
        model(inputs).sum().backward()
        check_same_gradients(model, plain)
