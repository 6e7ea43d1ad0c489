"""``fit`` on models of transformers and timm: no step takes more than its budget, and what is predicted is what is counted.

``python -m pytest -m clients --thorough -rP test/integrations/test_fitted_models.py`` prints a row for each model and budget.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from live_steps import measured
from pairs import some
from torch import nn

from flatshard import fit, plan
from flatshard.planning import _fit

pytestmark = [pytest.mark.clients("transformers", "timm"), pytest.mark.slow, pytest.mark.time_limit(600)]

VOCABULARY = 61
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4, "vocab_size": VOCABULARY}
T5 |= {"decoder_start_token_id": 0}
IMAGES = {"image_size": 32, "patch_size": 8, "num_labels": 7}
STAGES = {"hidden_sizes": [8, 16, 16, 24], "depths": [1, 2, 2, 1], "embedding_size": 8, "num_labels": 7}

LANGUAGE = ["llama", "mistral", "qwen2", "phi", "phi3", "olmo", "cohere", "granite", "persimmon", "opt", "bloom"]
MASKED = ["distilbert", "camembert"]
VISION = ["vit"]
TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 4},
    "resnet10t": {},
    "convnext_atto": {},
    "regnetx_002": {},
}


def cases() -> dict[str, tuple[str, str, dict[str, Any]]]:
    """By name: which class makes it, its kind, and its sizes."""
    found: dict[str, tuple[str, str, dict[str, Any]]] = {}
    found |= {name: ("AutoModelForCausalLM", name, SIZES) for name in LANGUAGE}
    found |= {name: ("AutoModelForMaskedLM", name, SIZES) for name in MASKED}
    found |= {name: ("AutoModelForSeq2SeqLM", name, T5) for name in ("t5", "mt5")}
    found |= {name: ("AutoModelForImageClassification", name, SIZES | IMAGES) for name in VISION}
    found |= {name: ("AutoModelForImageClassification", name, STAGES) for name in ("resnet", "convnext")}
    return found | {f"timm {name}": ("timm", name, sizes) for name, sizes in TIMM.items()}


CASES = cases()


def make(name: str) -> nn.Module:
    """A tiny model, without dropout."""
    kind, model, sizes = CASES[name]
    torch.manual_seed(0)
    if kind == "timm":
        import timm

        return timm.create_model(model, num_classes=7, **sizes)
    import transformers

    config = transformers.AutoConfig.for_model(model, **sizes)
    for key, value in vars(config).items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    config.use_cache = False
    return getattr(transformers, kind).from_config(config)


def batch_of(name: str, step: int = 0) -> dict[str, Any] | tuple[Any, ...]:
    """One microbatch."""
    generator = torch.Generator().manual_seed(step)
    kind = CASES[name][0]
    if kind == "timm":
        return (torch.randn(2, 3, 64, 64, generator=generator),)
    if kind == "AutoModelForImageClassification":
        labels = torch.tensor([1, 2])
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator), "labels": labels}
    ids = torch.randint(3, VOCABULARY, (2, 16), generator=generator)
    return {"input_ids": ids, "labels": ids}


def loss_of(output: Any) -> torch.Tensor:
    return output.square().mean() if isinstance(output, torch.Tensor) else output.loss


def arguments(name: str, ranks: int) -> dict[str, Any]:
    given = {"world_size": ranks, "optimizer": torch.optim.AdamW, "loss": loss_of, "device": "cpu"}
    return given | {"example_inputs": batch_of(name)}


def budgets(model: nn.Module, given: dict[str, Any]) -> tuple[int, int, int]:
    """From nearly the least to all that is needed."""
    free = fit(model, bytes_per_rank="1 TiB", **given)
    most = free.peak.nbytes
    if not free.units:  # there is nothing to give up
        return most, most + 5_000, most + 10_000
    least = min(most, plan(model, policy="auto", recompute=True, compare=False, **given).total_peak.nbytes)
    return least + (most - least) // 10, (least + most) // 2, most + 10_000


def apart(predicted: int, counted: int) -> str:
    """The difference in words; raises if it is too large."""
    assert abs(predicted - counted) <= max(0.01 * predicted, 2**16), (predicted, counted)
    return f"{predicted:>10,} {counted:>10,} {predicted - counted:>8,}"


@pytest.mark.parametrize("name", some(CASES, 4))
def test_what_is_predicted_is_counted(world: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Over the fake group, which receives nothing."""
    options = _fit.StepOptions
    monkeypatch.setattr(_fit, "StepOptions", lambda **given: options(**given | {"receives": False}))
    model, given, batch = make(name), arguments(name, 4), batch_of(name)
    for budget in budgets(model, given):
        fitted = fit(model, bytes_per_rank=budget, **given)
        world(4)
        sharded = fitted.apply(copy.deepcopy(model))
        counted = max(measured(sharded, torch.optim.AdamW(sharded.parameters()), batch, loss_of).values())
        row = apart(fitted.peak.nbytes, counted)
        print(f"{name:24} {len(fitted.units):3} units {budget:>10,} {row} {len(fitted.given_up):3} given up")
        assert counted <= budget
