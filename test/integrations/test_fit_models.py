"""``fit_to_memory`` on forty models of transformers, timm and diffusers: steps stay within it, and train as one process.

By default two of them run; ``--thorough`` runs all. Models of libraries that are not installed are skipped.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from live_steps import measured
from on_ranks import ranks
from pairs import some
from parity import check_same_params, step_all
from torch import Tensor, nn

import flatshard
from flatshard.planning import _fit

pytestmark = [pytest.mark.clients("transformers", "timm", "torchvision"), pytest.mark.slow, pytest.mark.time_limit(900)]

VOCABULARY, LENGTH, LAYERS = 61, 12, 3

# Names of sizes in most of transformers' configurations.
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
    attn_pdrop activation_dropout dropout_rate layerdrop classifier_dropout resid_dropout embed_dropout encoder_layerdrop
    decoder_layerdrop seq_classif_dropout hidden_dropout_rate drop_path_rate embedding_dropout output_dropout_prob
    summary_first_dropout
"""
GPT = {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 32, "rotary_dim": 4}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
BART = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "d_model": 32}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 2}
VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 4}
SWIN = {"img_size": 16, "patch_size": 2, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 2), "window_size": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **dict.fromkeys(
        ["llama", "qwen3", "gemma", "phi3", "olmo2", "stablelm", "starcoder2", "granite", "cohere"],
        ("CausalLM", dict[str, Any]()),
    ),
    "mistral": ("CausalLM", {"sliding_window": 8}),
    "phi": ("CausalLM", {"num_key_value_heads": 4}),
    "gpt_neox": ("CausalLM", {"rotary_pct": 0.5}),
    "gptj": ("CausalLM", GPT),
    "opt": ("CausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "qwen2": ("CausalLM", {"tie_word_embeddings": True}),
    "gemma2": ("CausalLM", {"query_pre_attn_scalar": 8}),
    "gpt2": ("CausalLM", GPT),
    "bloom": ("CausalLM", {"n_layer": LAYERS, "n_head": 4}),
    "falcon": ("CausalLM", {"head_dim": None}),
    "mixtral": ("CausalLM", {"num_local_experts": 2, "num_experts_per_tok": 2}),
    "bert": ("MaskedLM", {}),
    "albert": ("MaskedLM", {"embedding_size": 16}),
    "electra": ("MaskedLM", {"embedding_size": 16}),
    "roberta": ("MaskedLM", {"max_position_embeddings": 40, "pad_token_id": 1}),
    "distilbert": ("MaskedLM", {"dim": 32, "n_layers": LAYERS, "n_heads": 4, "hidden_dim": 48}),
    "t5": ("Seq2SeqLM", T5),
    "bart": ("Seq2SeqLM", BART),
    "mbart": ("Seq2SeqLM", BART),
    "pegasus": ("Seq2SeqLM", BART | {"decoder_start_token_id": 0}),
    "VisionTransformer": ("timm.models.vision_transformer", VIT),
    "VisionTransformerDistilled": ("timm.models.deit", VIT),
    "MlpMixer": (
        "timm.models.mlp_mixer",
        {"img_size": 16, "patch_size": 4, "embed_dim": 32, "num_blocks": 3},
    ),
    "Cait": ("timm.models.cait", VIT | {"depth_token_only": 1}),
    "ConvNeXt": ("timm.models.convnext", {"depths": (1, 1, 2, 1), "dims": (8, 8, 16, 16)}),
    "SwinTransformer": ("timm.models.swin_transformer", SWIN | {"drop_path_rate": 0.0}),
}
"""The model's automatic class or module, and its own settings."""

DIFFUSERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "UNet2DModel": (
        {"sample_size": 8, "in_channels": 3, "out_channels": 3, "layers_per_block": 1, "block_out_channels": (8, 16)}
        | {"norm_num_groups": 4, "attention_head_dim": 8, "down_block_types": ("DownBlock2D", "AttnDownBlock2D")}
        | {"up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
        {"sample": (3, 8, 8), "timestep": ()},
    ),
    "FluxTransformer2DModel": (
        {"in_channels": 4, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2}
        | {"joint_attention_dim": 16, "pooled_projection_dim": 16, "axes_dims_rope": (2, 2, 4)},
        {"hidden_states": (6, 4), "timestep": (), "encoder_hidden_states": (4, 16), "pooled_projections": (16,)},
    ),
    "PixArtTransformer2DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 3, "out_channels": 3, "num_layers": 3}
        | {"norm_num_groups": 4, "sample_size": 8, "cross_attention_dim": 16, "caption_channels": 16},
        {"hidden_states": (3, 8, 8), "timestep": (), "encoder_hidden_states": (4, 16)},
    ),
    "SD3Transformer2DModel": (
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 3,
            "out_channels": 3,
            "num_layers": 2,
            "attention_head_dim": 8,
        }
        | {"num_attention_heads": 2, "joint_attention_dim": 16, "caption_projection_dim": 16}
        | {"pooled_projection_dim": 16, "pos_embed_max_size": 8},
        {"hidden_states": (3, 8, 8), "timestep": (), "encoder_hidden_states": (4, 16), "pooled_projections": (16,)},
    ),
    "AutoencoderKL": (
        {"block_out_channels": (8, 16), "latent_channels": 2, "norm_num_groups": 4, "sample_size": 8}
        | {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
        {"sample": (3, 8, 8)},
    ),
}
"""Sizes of models, and shapes of their inputs."""
ALL = [*MODELS, *(DIFFUSERS if importlib.util.find_spec("diffusers") else ())]

Batch = dict[str, Tensor]


def of_transformers(name: str) -> tuple[Callable[[], nn.Module], Callable[[int], Batch]]:
    import transformers

    kind, changes = MODELS[name]
    given = SIZES | dict.fromkeys(DROPOUT.split(), 0.0) | changes
    config = transformers.AutoConfig.for_model(name, **{key: v for key, v in given.items() if v is not None})
    ids = ("input_ids", "labels", *(("decoder_input_ids",) if kind == "Seq2SeqLM" else ()))

    def batch(rows: int) -> Batch:
        made = {key: torch.randint(3, VOCABULARY, (rows, LENGTH)) for key in ids}
        if name == "gpt2":  # otherwise it searches the ids for padding, whose values meta does not have
            made["attention_mask"] = torch.ones(rows, LENGTH, dtype=torch.int64)
        return made

    return lambda: getattr(transformers, f"AutoModelFor{kind}").from_config(config), batch


def of_timm(name: str) -> tuple[Callable[[], nn.Module], Callable[[int], Batch]]:
    where, sizes = MODELS[name]
    size = sizes.get("img_size", 32)
    make = getattr(importlib.import_module(where), name)
    return lambda: make(**sizes, num_classes=5), lambda rows: {"x": torch.randn(rows, 3, size, size)}


def of_diffusers(name: str) -> tuple[Callable[[], nn.Module], Callable[[int], Batch]]:
    import diffusers

    sizes, inputs = DIFFUSERS[name]

    def batch(rows: int) -> Batch:
        whole = ("timestep", "class_labels")
        return {
            key: torch.randint(1, 9, (rows,)) if key in whole else torch.randn(rows, *shape)
            for key, shape in inputs.items()
        } | ({"img_ids": torch.zeros(6, 3), "txt_ids": torch.zeros(4, 3)} if "Flux" in name else {})

    return lambda: getattr(diffusers, name)(**sizes), batch


def loss_of(output: Any) -> Tensor:
    """Return the model's own loss, or a loss of its first output tensor."""
    if getattr(output, "loss", None) is not None:
        return output.loss  # type: ignore[no-any-return]
    return (output if isinstance(output, Tensor) else output[0]).square().mean()


def made(name: str, device: str = "cpu") -> tuple[nn.Module, Callable[[int], Batch]]:
    """Make the model with the same values at every call."""
    torch.manual_seed(0)
    is_timm = name in MODELS and MODELS[name][0].startswith("timm")
    make, batch = (of_diffusers if name in DIFFUSERS else of_timm if is_timm else of_transformers)(name)
    with torch.device(device):
        return make().train(), batch


def fits(name: str, example: Batch, world_size: int, shares: tuple[float, ...]) -> list[flatshard.planning.MemoryFit]:
    """Fit the model for budgets from nearly the minimum to everything."""
    model = made(name, "meta")[0]
    given = {"world_size": world_size, "optimizer": torch.optim.AdamW, "loss": loss_of, "example_inputs": example}
    given |= {"device": "cpu"}
    free = flatshard.fit_to_memory(model, bytes_per_rank="1 TiB", **given)
    least = flatshard.plan_step(model, policy="auto", recompute=True, compare=False, **given).total_peak.nbytes
    budgets = [least + int(share * (free.peak.nbytes - least)) for share in shares]
    return [flatshard.fit_to_memory(model, bytes_per_rank=budget, **given) for budget in budgets]


def check(fitted: flatshard.planning.MemoryFit, model: nn.Module, batch: Batch) -> None:
    peaks = measured(model, torch.optim.AdamW(model.parameters()), batch, loss_of)
    assert max(peaks.values()) <= fitted.budget, (peaks, str(fitted))
    off = abs(max(peaks.values()) - fitted.peak.nbytes)
    assert off <= max(0.01 * fitted.peak.nbytes, 2**16), (peaks, str(fitted))


@pytest.mark.parametrize("name", some(ALL, 2))
def test_what_is_predicted_is_measured(world, monkeypatch, name: str):
    """Ranks are simulated by a fake group, which receives nothing."""
    options = _fit.StepOptions
    monkeypatch.setattr(_fit, "StepOptions", lambda **given: options(**given | {"receives": False}))
    batch = made(name)[1](2)
    found = fits(name, batch, 4, (0.05, 0.5, 1.0))
    world(4)
    for fitted in found:
        check(fitted, fitted.apply(made(name)[0]), batch)


def as_double(batch: Batch) -> Batch:
    return {key: t.double() if t.is_floating_point() else t for key, t in batch.items()}


@pytest.mark.parametrize("name", some(ALL, 1, turn=9))
@ranks(2, pool="pair", timeout=400)
def test_training_is_that_of_one_process(ctx, name: str):
    """Each rank trains on a batch of its own within the budget, and one process on both batches."""
    alone, batch = made(name)
    batches = [batch(2) for _ in range(2)]
    fitted = fits(name, batches[0], 2, (0.3,))[0]
    model = fitted.apply(made(name)[0], process_group=ctx.group)
    models = alone.double(), model.double()
    if name == "mixtral":  # grouped matrix products have no float64
        for each in models:
            each.set_experts_implementation("eager")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
    for _ in range(2):
        for given in batches:
            (loss_of(alone(**as_double(given))) / 2).backward()
        loss_of(model(**as_double(batches[ctx.rank]))).backward()
        step_all(optimizers)
    check_same_params(model, alone)
    check(fitted, fitted.apply(made(name)[0], process_group=ctx.group), batches[ctx.rank])
