"""``fit`` on models of transformers and timm: no step takes more than its budget.

Two of them run, all with ``--thorough``.
"""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from live_steps import measured
from pairs import some
from torch import Tensor, nn

import flatshard
from flatshard.planning import _fit

pytestmark = [pytest.mark.clients("transformers", "timm", "torchvision"), pytest.mark.slow, pytest.mark.time_limit(900)]

VOCABULARY, LENGTH, LAYERS = 61, 12, 3

# What most of transformers' configurations call their sizes.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
DROPOUT = """
    hidden_dropout_prob attention_probs_dropout_prob hidden_dropout attention_dropout dropout resid_pdrop embd_pdrop
    attn_pdrop activation_dropout dropout_rate encoder_layerdrop decoder_layerdrop summary_first_dropout
"""
GPT = {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 32}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
BART = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "d_model": 32}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 2}
VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 4}
SWIN = {"img_size": 16, "patch_size": 2, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2), "window_size": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("CausalLM", {}),
    "qwen2": ("CausalLM", {"tie_word_embeddings": True}),
    "gemma2": ("CausalLM", {"query_pre_attn_scalar": 8}),
    "gpt2": ("CausalLM", GPT),
    "bloom": ("CausalLM", {"n_layer": LAYERS, "n_head": 4}),
    "falcon": ("CausalLM", {"head_dim": None}),
    "mixtral": ("CausalLM", {"num_local_experts": 2, "num_experts_per_tok": 2}),
    "bert": ("MaskedLM", {}),
    "albert": ("MaskedLM", {"embedding_size": 16}),
    "t5": ("Seq2SeqLM", T5),
    "bart": ("Seq2SeqLM", BART),
    "VisionTransformer": ("timm.models.vision_transformer", VIT),
    "Cait": ("timm.models.cait", VIT | {"depth_token_only": 1}),
    "ConvNeXt": ("timm.models.convnext", {"depths": (1, 1, 2, 1), "dims": (8, 8, 16, 16)}),
    "SwinTransformer": ("timm.models.swin_transformer", SWIN | {"drop_path_rate": 0.0}),
}
"""The automatic model or the module, and what is its own."""

Batch = dict[str, Tensor]


def of_transformers(name: str) -> tuple[Callable[[], nn.Module], Callable[[int], Batch]]:
    import transformers

    kind, changes = MODELS[name]
    given = SIZES | dict.fromkeys(DROPOUT.split(), 0.0) | changes
    config = transformers.AutoConfig.for_model(name, **{key: v for key, v in given.items() if v is not None})
    ids = ("input_ids", "labels", *(("decoder_input_ids",) if kind == "Seq2SeqLM" else ()))

    def batch(rows: int) -> Batch:
        made = {key: torch.randint(3, VOCABULARY, (rows, LENGTH)) for key in ids}
        if name == "gpt2":  # else it looks for padding in the ids, by an index that has no values on meta
            made["attention_mask"] = torch.ones(rows, LENGTH, dtype=torch.int64)
        return made

    return lambda: getattr(transformers, f"AutoModelFor{kind}").from_config(config), batch


def of_timm(name: str) -> tuple[Callable[[], nn.Module], Callable[[int], Batch]]:
    where, sizes = MODELS[name]
    size = sizes.get("img_size", 32)
    make = getattr(importlib.import_module(where), name)
    return lambda: make(**sizes, num_classes=5), lambda rows: {"x": torch.randn(rows, 3, size, size)}


def loss_of(output: Any) -> Tensor:
    """A model's own loss, or one of its output."""
    return output.square().mean() if isinstance(output, Tensor) else output.loss


def made(name: str, device: str = "cpu") -> tuple[nn.Module, Callable[[int], Batch]]:
    """The same values whenever it is called."""
    torch.manual_seed(0)
    make, batch = (of_timm if MODELS[name][0].startswith("timm") else of_transformers)(name)
    with torch.device(device):
        return make().train(), batch


@pytest.mark.parametrize("name", some(MODELS, 2))
def test_what_is_predicted_is_measured(world, monkeypatch, name: str):
    """By budgets from nearly the least possible to all that is needed, over the fake group, which receives nothing."""
    options = _fit.StepOptions
    monkeypatch.setattr(_fit, "StepOptions", lambda **given: options(**given | {"receives": False}))
    batch, model = made(name)[1](2), made(name, "meta")[0]
    given = {"world_size": 4, "optimizer": torch.optim.AdamW, "loss": loss_of, "example_inputs": batch, "device": "cpu"}
    most = flatshard.fit(model, bytes_per_rank="1 TiB", **given).peak.nbytes
    least = flatshard.plan(model, policy="auto", recompute=True, compare=False, **given).total_peak.nbytes
    budgets = [least + int(share * (most - least)) for share in (0.05, 0.5, 1.0)]
    found = [flatshard.fit(model, bytes_per_rank=budget, **given) for budget in budgets]
    world(4)
    for fitted in found:
        trained = fitted.apply(made(name)[0])
        peak = max(measured(trained, torch.optim.AdamW(trained.parameters()), batch, loss_of).values())
        assert peak <= fitted.budget, str(fitted)
        assert abs(peak - fitted.peak.nbytes) <= max(0.01 * fitted.peak.nbytes, 2**16), str(fitted)
