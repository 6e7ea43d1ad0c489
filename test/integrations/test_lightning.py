"""Lightning's ``Trainer`` and ``Fabric`` with sharded models, compared with plain training in one process."""

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Block
from on_ranks import ranks
from tiny import check_equal
from torch import nn

import flatshard
from flatshard.checkpoint import full_state_dict

pytestmark = [pytest.mark.clients("lightning"), pytest.mark.slow, pytest.mark.time_limit(600)]

WIDTH = 8


def data() -> torch.utils.data.TensorDataset:
    g = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(*(torch.randn(48, n, generator=g, dtype=torch.float64) for n in (WIDTH, 1)))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(WIDTH) for _ in range(3)]).double()


def task(seed: int = 0, shards: bool = False) -> Any:
    """Make a LightningModule with parameters of its own, which its steps use outside of ``forward``.

    If ``shards``, ``configure_model`` shards the blocks.
    """
    import lightning

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()
            torch.manual_seed(seed)
            self.head = nn.Linear(WIDTH, 1).double()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def configure_model(self) -> None:
            # Lightning calls this in each fit and validate.
            for block in self.net if shards and type(self.net[0].linear.weight) is nn.Parameter else ():
                flatshard.fully_shard(block)

        def loss(self, batch: Any) -> torch.Tensor:
            x, y = batch
            return F.mse_loss(self.head(self.net(x)) * self.scale, y)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.loss(batch)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", self.loss(batch), sync_dist=True)

        def configure_optimizers(self) -> Any:
            built = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [built], [torch.optim.lr_scheduler.StepLR(built, 1, gamma=0.5)]

    return Task()


QUIET = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
CLIPPED = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}


def trainer(ctx: Any, strategy: Any = None, epochs: int = 2, **options: Any) -> Any:
    """Make a Trainer. By default, ``strategy`` is flatshard's with a policy."""
    import lightning

    from flatshard.integrations.lightning import FlatshardStrategy

    os.environ |= {"LOCAL_RANK": str(ctx.rank), "NODE_RANK": "0"}  # like a launcher
    where = {"accelerator": "cpu", "devices": 2, "strategy": strategy or FlatshardStrategy(policy={Block})}
    return lightning.Trainer(**{**QUIET, **where, "max_epochs": epochs, **options})


def loader(batch: int, rank: int | None = None) -> torch.utils.data.DataLoader:
    """Load this rank's half of the data in order; Lightning's own sampler for training would shuffle."""
    parts = torch.utils.data.DistributedSampler
    sampler = None if rank is None else parts(data(), num_replicas=2, rank=rank, shuffle=False)
    return torch.utils.data.DataLoader(data(), batch_size=batch, sampler=sampler)


def step_every_other(model: nn.Module, optimizer: torch.optim.Optimizer, losses: Any) -> None:
    """Accumulate over two batches, clip and step, as in one process."""
    for index, loss in enumerate(losses):
        (loss / 2).backward()
        if index % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()


def plain(epochs: int = 2) -> tuple[dict[str, Any], float]:
    """Train one process on the batches of both ranks; return its state and the loss of its last validation."""
    model = task()
    optimizer, scheduler = (found[0] for found in model.configure_optimizers())
    for _ in range(epochs):
        step_every_other(model, optimizer, map(model.loss, loader(8)))
        scheduler.step()
    with torch.no_grad():
        return model.state_dict(), model.loss(next(iter(loader(48)))).item()


@ranks(2, pool="pair")
def test_fit_by_name(ctx):
    """``configure_model`` makes units. Rank 1 begins with other values, and the strategy sends rank 0's."""
    model = task(seed=ctx.rank, shards=True)
    run = trainer(ctx, "flatshard", **CLIPPED, num_sanity_val_steps=1)
    run.fit(model, loader(4, ctx.rank), loader(4))
    assert len(flatshard.describe(model).units) == 4
    expected, validated = plain()
    check_equal(full_state_dict(model), expected)
    assert run.callback_metrics["val_loss"].item() == pytest.approx(validated, rel=1e-9)
    [again] = run.validate(model, loader(4), verbose=False)
    assert again["val_loss"] == pytest.approx(validated, rel=1e-9)


@ranks(2, pool="pair")
def test_what_is_refused(ctx):
    from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging

    from flatshard.integrations.lightning import FlatshardStrategy

    for callback in StochasticWeightAveraging(swa_lrs=1e-2), EMAWeightAveraging(decay=0.9):
        with pytest.raises(TypeError, match=f"{type(callback).__name__} copies the model .*in a callback of your own"):
            trainer(ctx, callbacks=[callback]).fit(task(), loader(4, ctx.rank))
    with pytest.raises(ValueError, match="'full' or 'sharded', got 'local'"):
        FlatshardStrategy(state_dict_type="local")
    with pytest.raises(TypeError, match="find_unused_parameters; arguments of fully_shard go into shard_options="):
        FlatshardStrategy(find_unused_parameters=True)


def resume(ctx: Any, kind: str, directory: str) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from flatshard.integrations.lightning import FlatshardStrategy

    def run(epochs: int, model: Any, path: str | None = None) -> float:
        strategy = FlatshardStrategy(policy={Block}, state_dict_type=kind)
        fitting = trainer(ctx, strategy, epochs, **CLIPPED, enable_checkpointing=True, callbacks=[keep])
        fitting.fit(model, loader(4, ctx.rank), loader(4), ckpt_path=path)
        return fitting.callback_metrics["val_loss"].item()

    keep = ModelCheckpoint(directory, save_last=True, monitor="val_loss", save_top_k=1)
    run(1, task())
    last = os.path.join(directory, "last.ckpt")
    assert os.path.isdir(last) == (kind == "sharded"), os.listdir(directory)
    model = task(seed=5)
    expected, validated = plain()
    assert run(2, model, last) == pytest.approx(validated, rel=1e-9)
    check_equal(full_state_dict(model), expected)

    other = "sharded" if kind == "full" else "full"  # each strategy loads the other kind's file
    reader = trainer(ctx, FlatshardStrategy(policy={nn.Linear}, state_dict_type=other))
    [found] = reader.validate(task(seed=7), loader(4), ckpt_path=last, verbose=False)
    assert found["val_loss"] == pytest.approx(validated, rel=1e-9)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_resume_is_an_uninterrupted_run(pair, kind, tmp_path):
    """Both agree with one process, and a plain Trainer continues from a full file with its optimizer state."""
    pair.run(resume, kind, str(tmp_path))
    if kind == "full":
        import lightning

        os.environ.pop("LOCAL_RANK", None)
        model = task(seed=5)
        run = lightning.Trainer(max_epochs=3, accelerator="cpu", devices=1, **CLIPPED, **QUIET)
        run.fit(model, loader(8), ckpt_path=str(tmp_path / "last.ckpt"))
        check_equal(model.state_dict(), plain(epochs=3)[0])


@ranks(2, pool="pair")
def test_fabric_is_one_process(ctx):
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    from flatshard.integrations.lightning import parallelize_fn

    def distance(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x).mean(1, keepdim=True), y)

    os.environ |= {"LOCAL_RANK": str(ctx.rank), "NODE_RANK": "0"}
    strategy = ModelParallelStrategy(parallelize_fn({Block}), data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = fabric.setup(network())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    for index, (x, y) in enumerate(loader(8)):
        with fabric.no_backward_sync(model, enabled=index % 2 == 0):
            fabric.backward(distance(model, x[ctx.rank :: 2], y[ctx.rank :: 2]) / 2)
        if index % 2:
            fabric.clip_gradients(model, optimizer, max_norm=0.3)
            optimizer.step()
            optimizer.zero_grad()
    alone = network()
    steps = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    step_every_other(alone, steps, (distance(alone, x, y) for x, y in loader(8)))
    check_equal(full_state_dict(model.module), alone.state_dict())


@ranks(2, pool="pair")
def test_manual_optimization(ctx):
    """An error names a network that is no unit by its class. Made a unit, it trains as in one process, with two
    optimizers."""
    import lightning

    class Network(nn.Sequential):
        pass

    class Manual(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            torch.manual_seed(0)
            self.first, self.second = (Network(nn.Linear(WIDTH, WIDTH), Block(WIDTH)).double() for _ in range(2))

        def training_step(self, batch: Any, index: int) -> None:
            x, y = batch
            for net, optimizer in zip((self.first, self.second), self.optimizers(), strict=True):
                optimizer.zero_grad()
                self.manual_backward(F.mse_loss(net(x).mean(1, keepdim=True), y))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.first, self.second)]

    from flatshard.integrations.lightning import FlatshardStrategy

    with pytest.raises(RuntimeError, match=r"'first\.0\.weight' .*manual optimization.*make the Network a unit"):
        trainer(ctx, epochs=1).fit(Manual(), loader(4, ctx.rank))
    model, alone = Manual(), Manual()
    trainer(ctx, FlatshardStrategy(policy={Network}), epochs=1).fit(model, loader(4, ctx.rank))
    for net, steps in zip((alone.first, alone.second), alone.configure_optimizers(), strict=True):
        for x, y in loader(8):
            steps.zero_grad()
            sum(F.mse_loss(net(x[r::2]).mean(1, keepdim=True), y[r::2]) for r in range(2)).div(2).backward()
            steps.step()
    check_equal(full_state_dict(model), alone.state_dict())
