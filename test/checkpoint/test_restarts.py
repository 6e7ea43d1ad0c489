"""torch's optimizers, stopped midway and continued by another number of ranks, equal an uninterrupted run."""

import itertools
import math
import shutil
from functools import partial
from typing import Any, ClassVar

import pytest
import restarts
import torch
from encoded import Inner
from on_ranks import ranks
from pairs import some
from restarts import Counting, Make, Optimizer
from torch import Tensor, nn, optim

from flatshard import fully_shard
from flatshard.checkpoint import RankError, load_checkpoint, optim_state_dict, save_checkpoint
from flatshard.layouts import Blocks, Whole
from flatshard.optim import OffloadedOptimizer, WholeParameterOptimizer

OPTIMIZERS: dict[str, Make] = {
    "ASGD": partial(optim.ASGD, lr=0.1, t0=1),
    "Adadelta": partial(optim.Adadelta, lr=0.1),
    "Adafactor": partial(optim.Adafactor, lr=0.1),
    "Adagrad": partial(optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),
    "Adam": partial(optim.Adam, lr=0.1, amsgrad=True),
    "AdamW": partial(optim.AdamW, lr=torch.tensor(0.1, dtype=torch.float64)),
    "Adamax": partial(optim.Adamax, lr=0.1),
    "Muon": partial(optim.Muon, lr=0.1),
    "NAdam": partial(optim.NAdam, lr=0.1, decoupled_weight_decay=True),
    "RAdam": partial(optim.RAdam, lr=0.1),
    "RMSprop": partial(optim.RMSprop, lr=0.1, momentum=0.9, centered=True),
    "Rprop": partial(optim.Rprop, lr=0.1),
    "SGD": partial(optim.SGD, lr=0.1, momentum=0.9),
    "Counting": Counting,
}
REFUSED = {"LBFGS", "SparseAdam"}  # with closures; for sparse gradients
WHOLE = {"Adafactor", "Muon"}


def save(ctx, path: str, names: list[str]) -> list[str]:
    return [name for name in names if restarts.save(ctx, name, OPTIMIZERS[name], path)]


def restart(ctx, path: str, names: list[str]) -> None:
    for name in names:
        restarts.restart(ctx, name, OPTIMIZERS[name], path, name in WHOLE)


def test_torchs_optimizers(pool, tmp_path):
    kinds = {n for n, v in vars(optim).items() if isinstance(v, type) and issubclass(v, Optimizer)} - {"Optimizer"}
    assert kinds - REFUSED == OPTIMIZERS.keys() - {"Counting"}
    names, path = sorted({*some(OPTIMIZERS, 2, turn=4), *WHOLE, "Counting"}), str(tmp_path / "x")
    assert pool.run(save, path, names, world_size=2) == [sorted(WHOLE)] * 2
    pool.run(restart, path, names, world_size=3)


# -- Quantised state ---------------------------------------------------------------------------------------------------


class Quantised(Inner):
    """8-bit numbers with a scale for each block of 4, and a table of their values."""

    names: ClassVar[list[str]] = ["codes", "scale", "table"]

    @classmethod
    def zeros(cls, like: Tensor) -> Any:
        table = torch.arange(256, dtype=like.dtype) / 127 - 1
        codes = torch.full_like(like, 127, dtype=torch.uint8)
        return cls.make(like.dtype, codes, torch.ones(like.numel() // 4, dtype=like.dtype), table)

    def read(self) -> Tensor:
        return (self.table[self.codes.long()].view(-1, 4) * self.scale[:, None]).view(self.codes.shape)

    def write(self, values: Tensor) -> None:
        blocks = values.reshape(-1, 4)
        self.scale.copy_(blocks.abs().amax(1) + 1e-9)
        self.codes.copy_((blocks / self.scale[:, None] * 127 + 127).round().view(values.shape))


class Quantising(Optimizer):
    """Momentum, quantised if the blocks fit, like torchao's optimizers."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state, grad = self.state[p], p.grad.as_subclass(Tensor)
                if not state:
                    state["momentum"] = Quantised.zeros(p.detach().as_subclass(Tensor)) if p.numel() else grad
                if p.numel():
                    state["momentum"].write(grad := state["momentum"].read() * 0.9 + grad)
                    p.sub_(grad, alpha=group["lr"])


def quantised(ctx, make: Make, layout: Any, seed: int) -> tuple[nn.Module, Optimizer]:
    model = fully_shard(restarts.network(seed), policy={nn.Linear}, process_group=ctx.group, layout=layout)
    return model, make(model.parameters())


def save_quantised(ctx, path: str) -> None:
    model, optimizer = quantised(ctx, Quantising, Blocks(4, max_padding=9), 0)
    restarts.train(model, optimizer, 0, ctx)
    restarts.save_job(ctx, path, model, optimizer)
    with pytest.raises(NotImplementedError, match=r"is a Quantised, .*flatshard.save_checkpoint saves it"):
        optim_state_dict(model, optimizer)


def go_on_quantised(ctx, path: str) -> None:
    blocks, whole = Blocks(4, max_padding=9), partial(WholeParameterOptimizer, optimizer_class=Quantising)
    away = partial(OffloadedOptimizer, optimizer_class=Quantising)
    for make, layout in ((Quantising, blocks), (away, blocks), (Quantising, Whole(math.inf)), (whole, None)):
        for stepped in (0, 1):  # into new state, and into existing state
            model, optimizer = quantised(ctx, make, layout, 1)
            restarts.train(model, optimizer, 0, ctx, stepped)
            restarts.load_job(ctx, path, model, optimizer)
            restarts.save_job(ctx, f"{path}-again", model, optimizer)
            restarts.train(model, optimizer, restarts.STEPS, ctx)
            restarts.check(model, restarts.in_one_process(Quantising, 2 * restarts.STEPS), f"{make} {layout}")
            restarts.load_job(ctx, f"{path}-again", model, optimizer, strict=not stepped)
            restarts.train(model, optimizer, restarts.STEPS, ctx)
            restarts.check(model, restarts.in_one_process(Quantising, 2 * restarts.STEPS), f"again {make} {layout}")
            shutil.rmtree(f"{path}-again", ignore_errors=True)
            torch.distributed.barrier(ctx.group)


def test_quantised_state(pool, tmp_path):
    """Load between ranks, between layouts that cut at blocks, and between optimizers of shards and of full tensors.

    Some shards are empty.
    """
    path = str(tmp_path / "x")
    pool.run(save_quantised, path, world_size=2)
    for world_size in (1, 3):
        pool.run(go_on_quantised, path, world_size=world_size)


class Refuses:
    """Refuses to load another number than its own."""

    number = 1

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["number"] != self.number:
            raise ValueError("refused")


@ranks(2)
def test_a_load_that_fails_leaves_quantised_state(ctx, path: str) -> None:
    """Inner tensors, like others, are read only after all checks and all objects' loads."""
    model, optimizer = quantised(ctx, Quantising, Blocks(4, max_padding=9), 0)
    restarts.train(model, optimizer, 0, ctx)
    job = {"optim": optimizer, "model": model, "last": (refuses := Refuses())}
    save_checkpoint(path, job, process_group=ctx.group)
    refuses.number = 2
    restarts.train(model, optimizer, restarts.STEPS, ctx)
    momenta = [s["momentum"] for s in optimizer.state.values() if isinstance(s["momentum"], Quantised)]
    before = [(m.codes.clone(), m.scale.clone()) for m in momenta]
    with pytest.raises(RankError, match="refused"):
        load_checkpoint(path, job, process_group=ctx.group)
    for momentum, (codes, scale) in zip(momenta, before, strict=True):
        assert torch.equal(momentum.codes, codes)
        assert torch.equal(momentum.scale, scale)


# -- Options of groups -------------------------------------------------------------------------------------------------

ASKED_FOR = [how for how in restarts.LOADS if how != "dcp" and "helper" not in how]
"""Ways to load that restore a group as saved, whatever options the optimizer has."""

schedule = partial(optim.lr_scheduler.ExponentialLR, gamma=0.5)


@pytest.mark.parametrize("saved_with", [True, False])
@ranks(2)
def test_a_scheduler_may_be_made_before_or_after_loading(ctx, path: str, saved_with: bool) -> None:
    """Groups after loading equal a plain optimizer's, whenever the scheduler is made."""
    make = OPTIMIZERS["AdamW"]
    model, optimizer = restarts.sharded(ctx, make, 0, steps_whole=False)
    if saved_with:
        schedule(optimizer)
    restarts.train(model, optimizer, 0, ctx, 1)
    optimizer.param_groups[0]["lr"] = 0.05
    for kind, write in restarts.SAVES.items():
        write(ctx, f"{path}-{kind}", model, optimizer)
    for how, made_before in itertools.product(ASKED_FOR, (True, False)):
        kind, load = restarts.LOADS[how]
        other, its_optimizer = restarts.sharded(ctx, make, 1, steps_whole=False)
        if made_before:
            schedule(its_optimizer)
        load(ctx, f"{path}-{kind}", other, its_optimizer)
        (group,) = its_optimizer.param_groups
        assert group["lr"] == 0.05, (how, made_before)
        assert ("initial_lr" in group) == (saved_with or made_before), (how, made_before)
        schedule(its_optimizer).step()
        restarts.train(other, its_optimizer, 1, ctx, 1)
