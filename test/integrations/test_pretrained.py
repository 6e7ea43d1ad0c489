"""Models of transformers are read from their folders into shards, bit for bit as ``from_pretrained`` reads them."""

import importlib
import types
from pathlib import Path
from typing import Any

import pairs
import pytest
import torch
import torch.distributed as dist
from on_ranks import ranks

import flatshard

pytestmark = [pytest.mark.clients("transformers", "safetensors"), pytest.mark.time_limit(600)]

SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
T5 = {"d_model": 16, "d_kv": 4, "d_ff": 20, "num_layers": 2, "num_heads": 2}
WHISPER: dict[str, Any] = {"d_model": 16, "num_mel_bins": 8, "max_source_positions": 30, "begin_suppress_tokens": None}
for _part in ("encoder", "decoder"):
    WHISPER |= {f"{_part}_layers": 2, f"{_part}_attention_heads": 2, f"{_part}_ffn_dim": 20}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("CausalLM", {}),
    "qwen2": ("CausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("CausalLM", {}),
    "gemma2": ("CausalLM", {"query_pre_attn_scalar": 8}),
    "phi3": ("CausalLM", {}),
    "gpt2": ("CausalLM", GPT),
    "gpt_neox": ("CausalLM", {}),
    "mixtral": ("CausalLM", {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "qwen3_moe": ("CausalLM", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "bert": ("MaskedLM", {}),
    "t5": ("Seq2SeqLM", T5),
    "bart": ("Seq2SeqLM", {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2}),
    "whisper": ("SpeechSeq2Seq", WHISPER),
}
"""The model's automatic class, and its own settings. The experts of two are apart in files, and stacked in the model."""


def load(ctx: Any, kind: Any, config: Any, folder: Path, **options: Any) -> tuple[Any, list[str]]:
    """Make the model on meta, shard it, and read its values."""
    from flatshard.integrations.pretrained import load_pretrained
    from flatshard.integrations.state import policy_of

    with torch.device("meta"):
        model = kind.from_config(config)
    flatshard.fully_shard(model, policy=policy_of(model), process_group=ctx.group)
    model.to_empty(device="cpu")
    return model, load_pretrained(model, folder, process_group=ctx.group, **options)


@ranks(2)
def test_from_pretrained(ctx, path: str) -> None:
    """Sharding after ``from_pretrained`` gives the same values and buffers, those that are not saved included."""
    import transformers

    for name, (auto, own) in MODELS.items():
        ctx.note(name)
        config = transformers.AutoConfig.for_model(name, **{**SIZES, **own})
        kind, folder = getattr(transformers, f"AutoModelFor{auto}"), Path(path) / name
        if ctx.rank == 0:
            torch.manual_seed(1)
            kind.from_config(config).save_pretrained(folder, max_shard_size="20KB")
            assert len(list(folder.glob("*.safetensors"))) > 1
        dist.barrier(ctx.group)
        for dtype in (torch.float32, torch.bfloat16):
            config.dtype = dtype
            expected = kind.from_pretrained(folder, dtype=dtype)
            model, missing = load(ctx, kind, config, folder)
            assert missing == []
            buffers = dict(expected.named_buffers())
            assert all(torch.equal(b, buffers[n]) and b.dtype is buffers[n].dtype for n, b in model.named_buffers())
            found = flatshard.checkpoint.full_state_dict(model)
            assert all(torch.equal(found[n], v) and found[n].dtype is v.dtype for n, v in expected.state_dict().items())
            assert found.keys() == expected.state_dict().keys()


@ranks(2)
def test_what_the_files_lack_is_initialised(ctx, path: str) -> None:
    """A base model's folder is loaded into a classifier, whose head is new, and drawn by transformers."""
    import transformers

    config = transformers.AutoConfig.for_model("llama", **SIZES, num_labels=3)
    if ctx.rank == 0:
        torch.manual_seed(1)
        transformers.AutoModel.from_config(config).save_pretrained(path)
    dist.barrier(ctx.group)
    kind = transformers.AutoModelForSequenceClassification
    with pytest.raises(flatshard.RankError, match=r"not in the files: 'score\.weight'"):
        load(ctx, kind, config, Path(path))
    torch.manual_seed(2)
    model, missing = load(ctx, kind, config, Path(path), strict=False)
    assert missing == ["score.weight"]
    found = flatshard.checkpoint.full_state_dict(model)
    expected = transformers.AutoModel.from_pretrained(path).state_dict()
    assert all(torch.equal(found[f"model.{n}"], v) for n, v in expected.items())
    assert 0.005 < found["score.weight"].std() < 0.05


@ranks(2)
def test_conversions_that_compute_are_refused(ctx, path: str) -> None:
    import transformers
    from transformers.core_model_loading import Transpose, WeightConverter

    pretrained = importlib.import_module("flatshard.integrations.pretrained")
    config = transformers.AutoConfig.for_model("llama", **SIZES)
    if ctx.rank == 0:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    dist.barrier(ctx.group)
    turned = WeightConverter("q_proj.weight", "q_proj.weight", [Transpose(0, 1)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrained, "get_model_conversion_mapping", lambda model: [turned])
        with pytest.raises(flatshard.RankError, match=r"q_proj\.weight'.* by \[Transpose.*sync_module_states=True"):
            load(ctx, transformers.AutoModelForCausalLM, config, Path(path))


def train(model: Any, optimizer: Any, batches: torch.Tensor, rank: int = 0, size: int = 1) -> None:
    """Train on this rank's rows of each batch."""
    for batch in batches:
        rows = batch.chunk(size)[rank]
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


LARGE = {"vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 8}
LARGE |= {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128}


TRIPS: dict[str, tuple[tuple[str, ...], dict[str, Any], int]] = {"small": (("qwen2", "mixtral"), {}, 20_000)}
if pairs.thorough:
    TRIPS["2 GB"] = ("qwen2",), LARGE, 500_000_000


@pytest.mark.parametrize(("names", "sizes", "file_bytes"), list(TRIPS.values()), ids=list(TRIPS))
@ranks(3, timeout=500)
def test_from_a_folder_to_a_folder(
    ctx, path: str, names: tuple[str, ...], sizes: dict[str, Any], file_bytes: int
) -> None:
    """Two ranks read and train, three continue from a store and export: transformers loads what one process would have."""
    pytest.importorskip("fsspec")
    import object_store  # noqa: F401
    import transformers

    from flatshard.integrations.state import policy_of

    batches = torch.randint(3, 61, (2, 6, 5), generator=torch.Generator().manual_seed(0))
    for name in names:
        config = transformers.AutoConfig.for_model(name, **{**SIZES, **MODELS[name][1], **sizes})
        kind, folder = transformers.AutoModelForCausalLM, Path(path) / name
        if ctx.rank == 0:
            torch.manual_seed(1)
            kind.from_config(config).save_pretrained(folder, max_shard_size=file_bytes)
        dist.barrier(ctx.group)
        for steps in (0,) if sizes else (0, 1):
            ctx.note(f"{name}, {steps}")
            store, back = f"objects://{path}/{name}-{steps}-store", Path(path) / f"{name}-{steps}"
            if ctx.rank < 2:
                pair = types.SimpleNamespace(group=dist.new_group([0, 1], use_local_synchronization=True))
                model, _ = load(pair, kind, config, folder)
                optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
                train(model, optimizer, batches[:steps], ctx.rank, 2)
                flatshard.save_checkpoint(store, {"m": model, "o": optimizer}, process_group=pair.group)
                del model, optimizer
            dist.barrier(ctx.group)
            with torch.device("meta" if sizes else "cpu"):
                model = kind.from_config(config)
            flatshard.fully_shard(model, policy=policy_of(model), process_group=ctx.group)
            if sizes:  # to_empty leaves buffers that are not saved without values, and nothing is computed here
                model.to_empty(device="cpu")
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            flatshard.load_checkpoint(store, {"m": model, "o": optimizer}, process_group=ctx.group)
            train(model, optimizer, batches[1 : 1 + steps], ctx.rank, 3)
            flatshard.checkpoint.export_safetensors(model, back, max_file_bytes=file_bytes)
            if ctx.rank == 0:
                config.save_pretrained(back)
                expected = kind.from_pretrained(folder)
                plain = torch.optim.SGD(expected.parameters(), 0.1, momentum=0.9)
                train(expected, plain, batches[: 2 * steps])
                found = kind.from_pretrained(back)
                tolerance = {"rtol": 1e-4, "atol": 1e-6} if steps else {"rtol": 0, "atol": 0}
                torch.testing.assert_close(found.state_dict(), expected.state_dict(), **tolerance)
            dist.barrier(ctx.group)
