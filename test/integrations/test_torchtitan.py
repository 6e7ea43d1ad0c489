"""torchtitan's decoder, optimizer container, clipping and checkpoints on sharded ranks, compared with one process."""

import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from on_ranks import ranks
from tiny import check_equal
from torch import nn
from torch.distributed.tensor import DTensor

import flatshard

pytestmark = [pytest.mark.clients("torchtitan"), pytest.mark.slow, pytest.mark.time_limit(600)]

STEPS, LENGTH, NEAR = 3, 12, 1e-4


def llama() -> Any:
    """Configure a small Llama whose attention also runs on CPU."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    spec = model_registry("debugmodel")
    del spec.model.layers[2:]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        layer.attention.rope.max_seq_len = 64
    return spec


def compute(self: Any, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Compute the rows of each expert in float32, where torchtitan's forward of ``GroupedExperts`` casts to bfloat16."""
    weights = [w.to_local() if isinstance(w, DTensor) else w for w in (self.w1_EFD, self.w3_EFD, self.w2_EDF)]
    rows = zip(x.split(counts.tolist()), *weights, strict=True)
    return torch.cat([(nn.functional.silu(r @ gate.t()) * (r @ up.t())) @ down.t() for r, gate, up, down in rows])


def mixture() -> Any:
    """Configure a small DeepSeek: a dense block, and one with experts."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.deepseek_v3 import model_registry

    spec = model_registry("debugmodel")
    del spec.model.layers[2:]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return spec


def filled(model: nn.Module, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model


def shard(model: nn.Module, compiled: bool = False) -> nn.Module:
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims

    from flatshard.integrations.torchtitan import parallelize

    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    return parallelize(
        model,
        parallel_dims=ParallelDims.from_config(parallelism, 2),
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=compiled, components=["model"], backend="aot_eager"),
        ac_config=None,
        dump_folder="",
    )


def optimizers_config() -> Any:
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    groups = [
        ParamGroupConfig(pattern="norm", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2, "weight_decay": 0.0}),
        ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3, "weight_decay": 0.1}),
    ]
    return OptimizersContainer.Config(param_groups=groups, implementation="foreach")


def optimizers(model: nn.Module) -> Any:
    return optimizers_config().build(model_parts=[model])


def batches(count: int, seed: int = 1) -> Iterator[torch.Tensor]:
    """Yield the tokens of all ranks."""
    g = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randint(2048, (4, LENGTH + 1), generator=g)


def train(model: nn.Module, steps: Any, rank: int | None, count: int = STEPS, seed: int = 1) -> list[float]:
    """Train like torchtitan's Trainer, whose loss is the sum over tokens divided by all ranks' tokens; return gradient
    norms."""
    from torchtitan.distributed.utils import clip_grad_norm_

    norms = []
    for tokens in batches(count, seed):
        part = tokens if rank is None else tokens[2 * rank : 2 * rank + 2]
        steps.zero_grad()
        for rows in part.split(1):  # gradient accumulation
            logits = model(rows[:, :-1]).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, rows[:, 1:].flatten(), reduction="sum")
            (loss / (4 * LENGTH)).backward()
        norms.append(clip_grad_norm_(model.parameters(), 1.0, foreach=True).item())
        steps.step()
    return norms


def plain(count: int = STEPS) -> tuple[nn.Module, list[float]]:
    model = filled(llama().model.build())
    return model, train(model, optimizers(model), None, count)


def whole_state(model: nn.Module) -> dict[str, Any]:
    from flatshard.integrations.torchtitan import _fused

    state = flatshard.checkpoint.full_state_dict(model)
    for prefix, module in _fused(model):
        module._split_qkv_on_save(module, state, prefix, {})
    return state


def manager(model: nn.Module, steps: Any, folder: str, spec: Any, **options: Any) -> Any:
    from torchtitan.components.optimizer import LRSchedulersContainer

    from flatshard.integrations.torchtitan import FlatshardCheckpointManager

    options = {"interval": 1, "last_save_model_only": False, **options}
    config = FlatshardCheckpointManager.Config(enable=True, folder=folder, **options)
    return config.build(
        dataloader=None,
        model_parts=[model],
        optimizers=steps,
        lr_schedulers=LRSchedulersContainer.Config().build(optimizers=steps, training_steps=10),
        states={"train_state": SimpleNamespace(state_dict=lambda: {"step": 1}, load_state_dict=lambda s: None)},
        sd_adapter=spec.state_dict_adapter(spec.model, None),
        base_folder="",
    )


@ranks(2, pool="pair", timeout=400)
def test_checkpoints(ctx, path: str):
    """A compiled model's checkpoint is loaded into a model that is not compiled."""
    spec = llama()
    models = [shard(filled(spec.model.build(), seed=seed), compiled=seed == 0) for seed in (0, 9, 11)]
    model, again, other = models
    assert len(flatshard.describe(model).units) == 5
    steps, steps_again, others = map(optimizers, models)
    alone, expected = plain(2)
    assert train(model, steps, ctx.rank, 2) == pytest.approx(expected, rel=1e-4)
    check_equal(whole_state(model), alone.state_dict(), NEAR)
    manager(model, steps, f"{path}/torch", spec).save(2)
    straight = train(model, steps, ctx.rank, 1, seed=5)
    after = whole_state(model)
    assert manager(again, steps_again, f"{path}/torch", spec).load()
    assert train(again, steps_again, ctx.rank, 1, seed=5) == pytest.approx(straight, rel=1e-6)
    check_equal(whole_state(again), after, NEAR)

    ctx.note("Hugging Face's format")
    options = {"last_save_in_hf": True, "last_save_model_only": True, "export_dtype": "float32"}
    manager(model, steps, f"{path}/hf", spec, **options).save(3, last_step=True)
    load = {"initial_load_path": f"{path}/hf/step-3", "initial_load_in_hf": True, "initial_load_model_only": True}
    assert manager(other, others, f"{path}/none", spec, **load).load()
    check_equal(whole_state(other), after, NEAR)


PROCESSOR = mock.MagicMock(
    current_device=lambda: 0,
    get_device_name=lambda device: "CPU",
    get_device_properties=lambda device: SimpleNamespace(total_memory=1),
    memory_stats=lambda device: {},
)
"""Stand-in on CPU for the attributes that torchtitan reads from an accelerator's module."""


def trainers_config(ctx: Any, folder: str) -> Any:
    """Configure torchtitan's Trainer: it builds on meta, shards, allocates and fills, and has two microbatches in a step."""
    from torchtitan.components import metrics
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import LRSchedulersContainer
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.tools import utils
    from torchtitan.trainer import Trainer

    class Data(BaseDataLoader):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Any, dp_rank: int, dp_world_size: int, **options: Any) -> None:
            self.rank, self.size = dp_rank, dp_world_size

        def __iter__(self) -> Any:
            for tokens in batches(STEPS):
                for rows in tokens.chunk(self.size)[self.rank].split(1):
                    yield {"input": rows[:, :-1]}, rows[:, 1:]

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    class Tokenizer(BaseTokenizer):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **options: Any) -> None:
            super().__init__()

        encode = decode = get_vocab_size = lambda *args: None

    class Started(Trainer):
        def init_distributed(self) -> Any:
            return ParallelDims.from_config(self.config.parallelism, ctx.world_size)

    torch.distributed.set_timeout = lambda *_: None  # new in torch 2.14; the Trainer calls it after its first step
    os.environ["LOCAL_RANK"] = str(ctx.rank)
    for module in (utils, metrics, parallel_dims, dist_utils):
        module.device_type, module.device_module = "cpu", PROCESSOR
    utils.get_local_device = lambda: torch.device("cpu")
    return Started.Config(
        model_spec=llama(),
        dump_folder=folder,
        loss=CrossEntropyLoss.Config(),
        tokenizer=Tokenizer.Config(),
        dataloader=Data.Config(),
        optimizer=optimizers_config(),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        training=TrainingConfig(
            local_batch_size=1,
            global_batch_size=4,
            seq_len=LENGTH,
            steps=STEPS,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        metrics=metrics.MetricsProcessor.Config(log_freq=1),
        activation_checkpoint=None,
        debug=DebugConfig(seed=0),
    )


@ranks(2, pool="pair", timeout=400)
def test_the_trainer_by_the_page_s_recipe(ctx, path: str):
    from torchtitan.components.metrics import MetricsProcessor

    marker = rf"<!-- run by: test/integrations/{Path(__file__).name} -->\n```python\n(.*?)```"
    page = Path(flatshard.__file__).parent / "docs" / "integrations" / "torchtitan.md"
    (recipe,) = re.findall(marker, page.read_text(), re.DOTALL)
    alone, expected = plain()
    names, norms = {"config": trainers_config(ctx, path)}, []
    with mock.patch.object(MetricsProcessor, "log", lambda self, step, loss, most, norm, **rest: norms.append(norm)):
        exec(compile(recipe, page.name, "exec"), names)
    assert norms == pytest.approx(expected, rel=1e-4)
    check_equal(whole_state(names["trainer"].model_parts[0]), alone.state_dict(), NEAR)
    assert (Path(path) / "checkpoint" / f"step-{STEPS}").exists()


@ranks(2, pool="pair", timeout=400)
def test_divided_experts(ctx, path: str):
    """The Trainer clips, and balances the load of experts."""
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.config import ParallelismConfig
    from torchtitan.models.common.moe import GroupedExperts

    from flatshard.integrations.torchtitan import parallelize

    spec, norms = mixture(), []
    config = trainers_config(ctx, path)
    config.model_spec = dataclasses.replace(spec, parallelize_fn=parallelize)
    config.parallelism = ParallelismConfig(spmd_backend="partial_dtensor", expert_parallel_degree=2)
    with (
        mock.patch.object(MetricsProcessor, "log", lambda self, step, loss, most, norm, **rest: norms.append(norm)),
        mock.patch.object(GroupedExperts, "forward", compute),
    ):
        trainer = config.build()
        model = trainer.model_parts[0]
        alone = filled(spec.model.build())  # as the Trainer has updated its configuration
        params = dict(alone.named_parameters())
        model.load_state_dict({name: value.detach().clone() for name, value in params.items()}, strict=False)
        steps, dims = optimizers(alone), SimpleNamespace(get_optional_mesh=lambda name: None, ep_enabled=False)
        spec.post_optimizer_build_fn(steps, [alone], dims)
        expected = train(alone, steps, None)
        trainer.train()
    experts = [flat for unit in flatshard.describe(model).units for flat in unit.flats if flat.world_size == 1]
    assert [len(flat.fqns) for flat in experts] == [3]  # each rank has half of them
    assert norms == pytest.approx(expected, rel=1e-4)
    check_equal(whole_state(model), alone.state_dict(), NEAR)


@pytest.mark.parametrize(
    ("enabled", "backend", "message"),
    [
        ("cp", "partial_dtensor", "cp > 1; flatshard's"),
        ("ep", "spmd_types", "but spmd_backend is 'spmd_types'"),
        ("tp", "partial_dtensor", "tp > 1 in a model with experts"),
    ],
)
def test_refused_axes(enabled: str, backend: str, message: str):
    from flatshard.integrations.torchtitan import parallelize

    axes = {f"{axis}_enabled": axis == enabled for axis in ("cp", "pp", "tp", "ep")}
    given = dict.fromkeys(("training", "parallelism", "compile_config", "ac_config", "dump_folder"))
    model = nn.Sequential()
    model.layers = nn.ModuleList([nn.Linear(1, 1)])
    model.layers[0].moe_enabled = True
    with pytest.raises(NotImplementedError, match=message):
        parallelize(model, parallel_dims=SimpleNamespace(spmd_backend=backend, **axes), **given)
