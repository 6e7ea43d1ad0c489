"""Changes that a sharded model refuses: every rank raises the same error, its cure works, and nothing changes."""

import copy
import functools
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Block, Net
from on_ranks import ranks
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.nn.utils.parametrize import register_parametrization

import flatshard
from flatshard import fully_shard

X = torch.ones(2, 4)


def both(ctx: Any) -> tuple[nn.Module, nn.Module]:
    """Return a plain model and its sharded twin."""
    torch.manual_seed(0)
    plain = Net()
    return plain, fully_shard(copy.deepcopy(plain), policy={Block}, process_group=ctx.group)


def unsharded(model: nn.Module) -> nn.Module:
    """Return a new model with the values of ``model``, as errors advise."""
    new = Net()
    new.load_state_dict(flatshard.checkpoint.full_state_dict(model))
    return new


def train(model: nn.Module) -> Tensor:
    loss = model(X).square().sum()
    loss.backward()
    return loss.detach()


def by_hand(module: nn.Module, renamed_first: bool) -> None:
    """Reparametrize like libraries unknown to torch."""
    weight = module.weight
    if renamed_first:
        module.original = weight
    del module.weight
    module.original = weight
    module.register_forward_pre_hook(lambda m, _: setattr(m, "weight", 2 * m.original))


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "parametrize": lambda m: register_parametrization(m, "weight", nn.Identity()),
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "hook for weight_norm": weight_norm,
    "hook for spectral_norm": spectral_norm,
    "prune": lambda m: prune.l1_unstructured(m, "weight", amount=0.3),
    "prune all": lambda m: prune.global_unstructured([(m, "weight")], pruning_method=prune.L1Unstructured, amount=0.2),
    "renamed": functools.partial(by_hand, renamed_first=True),
    "taken away": functools.partial(by_hand, renamed_first=False),
    "other memory": torch.no_grad()(lambda m: m.weight.set_(torch.ones(4, 4))),
}


@ranks(1, 3)
def test_what_changes_the_structure_comes_before(ctx):
    plain, model = both(ctx)
    names = [name for name, _ in model.named_parameters()]
    before = type(model.front), list(model.front._forward_pre_hooks.values())
    for name, change in CHANGES.items():
        ctx.note(name)
        with pytest.raises(RuntimeError, match=r"'front.weight' is sharded, and .* before fully_shard\. .*"):
            change(model.front)
        assert [name for name, _ in model.named_parameters()] == names
        assert (type(model.front), list(model.front._forward_pre_hooks.values())) == before
    assert torch.allclose(train(model), train(plain))
    for name, change in CHANGES.items():  # the cure in the message
        ctx.note(f"again: {name}")
        again, changed = unsharded(model), copy.deepcopy(plain)
        for each in (again, changed):
            torch.manual_seed(1)
            change(each.front)
        fully_shard(again, policy={Block}, process_group=ctx.group)
        assert torch.allclose(train(again), train(changed)), name


def fsdp1(module: nn.Module, ctx: Any, use_orig_params: bool) -> None:
    FullyShardedDataParallel(module, ctx.group, device_id=torch.device("cpu"), use_orig_params=use_orig_params)


@ranks(2)
def test_torchs_fsdp(ctx):
    for shard in (
        lambda m: fsdp2(m, mesh=ctx.mesh),
        lambda m: fsdp2(m.blocks[0].linear, mesh=ctx.mesh),
        lambda m: fsdp1(m, ctx, True),
        lambda m: fsdp1(nn.Sequential(m), ctx, False),
    ):
        with pytest.raises(RuntimeError, match=r"'.*' is sharded by flatshard.fully_shard, and torch's FSDP would"):
            shard(both(ctx)[1])


class Lm(nn.Sequential):
    """Has ``resize_token_embeddings`` like transformers' models."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))

    def resize_token_embeddings(self, count: int) -> None:
        self[0] = nn.Embedding(count, 4)


@ranks(2)
def test_resizing(ctx):
    for policy in (None, {nn.Linear}):
        model = nn.Sequential(Lm())  # wrapped, as peft wraps models
        model[0].resize_token_embeddings(8)  # allowed before sharding
        fully_shard(model, policy=policy, process_group=ctx.group)
        for each in (model, copy.deepcopy(model)):
            embeddings = each[0][0]
            with pytest.raises(RuntimeError, match=r"this Lm is sharded.*before fully_shard.*export_safetensors"):
                each[0].resize_token_embeddings(10)
            assert each[0][0] is embeddings
            each(torch.arange(8)).sum().backward()


@ranks(2)
def test_tracers(ctx):
    plain, model = both(ctx)
    of_jit = r"torch\.jit\.trace cannot trace a sharded module: unit .* Trace a new model that is not sharded"
    of_fx = r"torch\.fx cannot trace a sharded module: parameter 'front\.weight' .* Trace a new"
    of_export = r"If torch\.export did it: export a new model that has the values of flatshard\.c"
    for tracer, message in (
        (lambda m: torch.export.export(m, (X,)).module(), of_export),
        (lambda m: torch.jit.trace(m, (X,)), of_jit),
        (torch.fx.symbolic_trace, of_fx),
    ):
        with pytest.raises(RuntimeError, match=message):
            tracer(model)(X)
        assert torch.equal(model(X), plain(X))  # tracing left no state
        train(model)
        assert torch.equal(tracer(unsharded(model))(X), plain(X))
    with flatshard.summon_full_params(model), torch.no_grad():
        with pytest.raises(RuntimeError, match=r"torch\.export cannot trace a sharded module: unit '.*' is gathered"):
            torch.export.export(model, (X,))
        assert torch.equal(torch.fx.symbolic_trace(model)(X), plain(X))
    with pytest.raises(RuntimeError, match=r"gathers a unit around its forward, .*block\.compile\(fullgraph=True"):
        torch.compile(model, fullgraph=True, backend="eager")(X)


def raises_in_a_fork(model: nn.Module, message: str) -> bool:
    """Return whether a forward raises in a forked process, such as a DataLoader's worker."""
    if not (child := os.fork()):
        found = False
        try:
            with torch.no_grad():
                model(X)
        except BaseException as e:
            found = re.search(message, f"{type(e).__name__}: {e}") is not None
        finally:
            os._exit(found)
    return os.waitpid(child, 0)[1] != 0


@ranks(2)
def test_a_forward_in_a_forked_process(ctx):
    plain, model = both(ctx)
    for each, fqn in ((model, "<root>"), (model.blocks[1], "blocks.1")):
        message = f"RuntimeError: unit '{fqn}' runs a forward in process .* forked from rank {ctx.rank} "
        assert raises_in_a_fork(each, message)
    assert not raises_in_a_fork(plain, "")
    train(model)  # the parent continues
