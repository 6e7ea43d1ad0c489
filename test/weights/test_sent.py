"""Weights for another system: a receiver applies changes in each rank's shards."""

from types import SimpleNamespace

import pytest
import torch
from on_ranks import ranks
from parity import everybody
from saving import CommunicationWatch, layers, make, on_four, shard, train
from torch import Tensor, nn

import flatshard
from flatshard import fully_shard
from flatshard.checkpoint import full_state_dict
from flatshard.weights._changes import apply_changed_params, iter_changed_params
from flatshard.weights._gaps import decode_gaps, differ, encode_gaps, measure_gaps
from flatshard.weights._sent import SentParams


def test_gaps():
    """Gaps take one byte, or two if few elements change, and no more bytes than that."""
    for at, nbytes in {
        (0,): 1,
        (254,): 1,
        (255,): 2,
        (0, 1, 2): 3,
        (3, 259, 260, 5000): 8,
        (511, 512): 4,
        (65534, 65535 * 3): 8,
        (70000, 70001): 6,
        tuple(range(1000, 9000, 200)): 43,
    }.items():
        gaps = encode_gaps(torch.tensor(at))
        assert gaps.nbytes == nbytes, at
        assert tuple(decode_gaps(gaps).tolist()) == at
        assert measure_gaps(gaps) == (len(at), at[-1] + 1)
    changed = differ(torch.tensor([0.0, torch.nan, 1.0]), torch.tensor([-0.0, torch.nan, 1.0]))
    assert changed.tolist() == [True, False, False]
    assert differ(torch.tensor([1j, 1, 1j]), torch.tensor([1j, 1, 2j])).tolist() == [False, False, True]
    assert differ(torch.empty(0), torch.empty(0)).tolist() == []


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a receiver's values: parameters only, in the compute dtype."""
    names = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    return {n: v for n, v in model.state_dict().items() if n in names}


def follow(ctx, model: nn.Module, server: nn.Module, dtype: torch.dtype | None, lr: float) -> SentParams:
    """Train twice and update the server. Each rank has one, which receives all ranks' changes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    with CommunicationWatch() as watch:
        since = SentParams(model, dtype=dtype)
        assert list(iter_changed_params(since)) == []
    plans = everybody(ctx, since.layout)
    for _ in range(2):
        train(model, optimizer)
        with watch:
            mine = list(iter_changed_params(since))
            assert list(iter_changed_params(since)) == []
        for plan, changes in zip(plans, everybody(ctx, mine), strict=True):
            for changed in changes:
                apply_changed_params(weights(server), plan, changed)
        expected = full_state_dict(model, dtype=dtype)
        for name, value in weights(server).items():
            assert torch.equal(value, expected[name]), name
            assert value.dtype is expected[name].dtype
    assert watch.seen == []
    return since


@ranks(4)
def test_a_receiver_that_follows(ctx) -> None:
    """A receiver follows every kind of parameter, tensor parallelism, and replicas, one of which sends."""
    follow(ctx, shard(ctx, make(), policy={nn.Linear}), make().to(torch.bfloat16), torch.bfloat16, lr=1e-5)
    for how in ("tp", "replicas"):
        since = follow(ctx, on_four(ctx, how), layers(), None, lr=1e-2)
        assert how == "tp" or bool(since.layout) == (ctx.rank < 2)


def test_what_does_not_fit(world):
    world(1)
    model = fully_shard(nn.Linear(3, 2))
    since = SentParams(model)
    with torch.no_grad():
        model.weight.add_(1)
    for _ in range(2):  # values that were not received may be lost, so they are sent again
        changed = next(iter_changed_params(since))
    assert (changed.flat, changed.values.numel(), changed.nbytes) == (0, 6, 6 * 5)
    for bad in ({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}, {"bias": torch.zeros(2)}):
        with pytest.raises(ValueError, match=r"'weight' is sent as \(2, 3\), the weights have (\(2, 2\)|nothing)$"):
            apply_changed_params(bad, since.layout, changed)
        assert not any(t.any() for t in bad.values())
    with pytest.raises(RuntimeError, match="sharded anew"):
        SentParams.now(SimpleNamespace(_module=model, layout=[*since.layout, []]), "iter_changed_params")
    with flatshard.summon_full_params(model), pytest.raises(RuntimeError, match="Call it outside"):
        list(iter_changed_params(since))
    with pytest.raises(ValueError, match="floating-point"):
        SentParams(model, dtype=torch.int8)
