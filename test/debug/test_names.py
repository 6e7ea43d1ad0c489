"""Names equal those of state dicts, without ``checkpoint_wrapper``'s prefix, whether it wraps before or after sharding."""

from typing import Any

import pytest
import torch
from on_ranks import ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import flatshard


@pytest.mark.parametrize("wraps", ["inside", "all", "later"])
@ranks(2)
def test_names_have_nothing_of_checkpoint_wrappers(ctx: Any, wraps: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.LayerNorm(4))
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    seen = []

    def layout(fqn: str, param: nn.Parameter) -> Any:
        seen.append(fqn)
        return flatshard.layouts.Rows()

    if wraps == "inside":
        model[1], model[2] = checkpoint_wrapper(model[1]), checkpoint_wrapper(model[2])
    elif wraps == "all":
        model[1][0] = checkpoint_wrapper(model[1][0])
        model = checkpoint_wrapper(model)
    flatshard.fully_shard(model, policy={nn.Linear}, process_group=ctx.group, layout=layout)
    assert set(seen) == set(plain)
    if wraps == "later":
        model = checkpoint_wrapper(model)
    model(torch.ones(2, 4)).square().mean().backward()
    assert set(model.state_dict()) == set(plain)
    torch.testing.assert_close(dict(flatshard.checkpoint.iter_full_params(model)), plain)
    assert set(dict(flatshard.checkpoint.iter_full_params(model, names=["1.0.weight"]))) == {"1.0.weight"}
    assert set(flatshard.optim.gradient_statistics(model)) == set(plain)
    units = flatshard.describe(model).units
    assert {fqn for unit in units for flat in unit.flats for fqn in flat.fqns} == set(plain)
    assert {unit.fqn for unit in units} == {"", "0", "1.0", "1.1"}
    infos = [flatshard.tensors.shard_info(p) for p in model.parameters()]
    assert [info.fqn for info in infos if info is not None] == list(plain)
    assert "_checkpoint_wrapped_module" not in f"{list(model.parameters())}{flatshard.describe(model)}"
