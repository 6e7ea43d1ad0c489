"""torchtitan's decoder, optimizer container, clipping and checkpoints on sharded ranks, against one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = [pytest.mark.clients("torchtitan"), pytest.mark.slow, pytest.mark.time_limit(600)]

STEPS, LENGTH = 3, 12


def llama() -> Any:
    """The configuration of a small Llama whose attention runs on CPU too."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    spec = model_registry("debugmodel")
    del spec.model.layers[2:]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        layer.attention.rope.max_seq_len = 64
    return spec


def filled(model: nn.Module, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model


def shard(model: nn.Module, size: int, compiled: bool = False, **options: Any) -> nn.Module:
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims

    from flatshard.integrations.torchtitan import parallelize

    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    return parallelize(
        model,
        parallel_dims=ParallelDims.from_config(parallelism, size),
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=compiled, components=["model"], backend="aot_eager"),
        ac_config=None,
        dump_folder="",
        **options,
    )


def optimizers(model: nn.Module) -> Any:
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    groups = [
        ParamGroupConfig(pattern="norm", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2, "weight_decay": 0.0}),
        ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3, "weight_decay": 0.1}),
    ]
    return OptimizersContainer.Config(param_groups=groups, implementation="foreach").build(model_parts=[model])


def train(model: nn.Module, steps: Any, rank: int | None, count: int = STEPS, seed: int = 1) -> list[float]:
    """As torchtitan's Trainer: the sum over tokens, divided by the number of tokens on all ranks. The gradients' norms."""
    from torchtitan.distributed.utils import clip_grad_norm_

    g = torch.Generator().manual_seed(seed)
    norms = []
    for _ in range(count):
        tokens = torch.randint(2048, (4, LENGTH + 1), generator=g)
        part = tokens if rank is None else tokens[2 * rank : 2 * rank + 2]
        steps.zero_grad()
        for rows in part.split(1):  # accumulation
            logits = model(rows[:, :-1]).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, rows[:, 1:].flatten(), reduction="sum")
            (loss / (4 * LENGTH)).backward()
        norms.append(clip_grad_norm_(model.parameters(), 1.0, foreach=True).item())
        steps.step()
    return norms


def check_equal(state: dict[str, Any], expected: dict[str, Any]) -> None:
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def plain(count: int = STEPS) -> tuple[nn.Module, list[float]]:
    model = filled(llama().model.build())
    return model, train(model, optimizers(model), None, count)


def whole_state(model: nn.Module) -> dict[str, Any]:
    import flatshard
    from flatshard.integrations.torchtitan import _fused

    state = flatshard.checkpoint.full_state_dict(model)
    for prefix, module in _fused(model):
        module._split_qkv_on_save(module, state, prefix, {})
    return state


def fit(ctx: Any) -> None:
    import flatshard

    alone, expected = plain()
    for compiled in (False, True):
        ctx.note(f"compiled={compiled}")
        model = shard(filled(llama().model.build()), 2, compiled)
        assert len(flatshard.describe(model).units) == 5
        norms = train(model, optimizers(model), ctx.rank)
        assert norms == pytest.approx(expected, rel=1e-4)
        check_equal(whole_state(model), alone.state_dict())


def test_steps_are_one_process(pair):
    pair.run(fit, timeout=400)


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


def resume(ctx: Any, folder: str) -> None:
    spec = llama()
    model = shard(filled(spec.model.build()), 2)
    steps = optimizers(model)
    train(model, steps, ctx.rank, 2)
    saver = manager(model, steps, f"{folder}/torch", spec)
    saver.save(2)
    straight = train(model, steps, ctx.rank, 1, seed=5)
    after = whole_state(model)

    again = shard(filled(spec.model.build(), seed=9), 2)
    steps = optimizers(again)
    assert manager(again, steps, f"{folder}/torch", spec).load()
    assert train(again, steps, ctx.rank, 1, seed=5) == pytest.approx(straight, rel=1e-6)
    check_equal(whole_state(again), after)

    ctx.note("Hugging Face's format")
    options = {"last_save_in_hf": True, "last_save_model_only": True, "export_dtype": "float32"}
    hf = manager(model, steps, f"{folder}/hf", spec, **options)
    hf.save(3, last_step=True)
    other = shard(filled(spec.model.build(), seed=11), 2)
    load = {"initial_load_path": f"{folder}/hf/step-3", "initial_load_in_hf": True, "initial_load_model_only": True}
    assert manager(other, optimizers(other), f"{folder}/none", spec, **load).load()
    check_equal(whole_state(other), after)


def test_checkpoints(pair, tmp_path):
    pair.run(resume, str(tmp_path), timeout=400)


def in_the_trainers_order(ctx: Any) -> None:
    """On meta, sharded, given memory, filled: as ``torchtitan.trainer.Trainer`` does it."""
    alone, expected = plain()
    with torch.device("meta"):
        model = llama().model.build()
    shard(model, 2)
    model.to_empty(device="cpu")
    filled(model)
    norms = train(model, optimizers(model), ctx.rank)
    assert norms == pytest.approx(expected, rel=1e-4)
    check_equal(whole_state(model), alone.state_dict())


def test_shard_on_meta(pair):
    pair.run(in_the_trainers_order, timeout=400)
