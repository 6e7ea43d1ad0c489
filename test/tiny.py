"""Tiny models of transformers from configs, their data, and the environment of a rank that the library reads."""

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

VOCABULARY = 61


def tiny_llama(tied: bool = False, **changes: Any) -> nn.Module:
    """Make a model of two layers, with sizes that two ranks don't divide. Every call gives the same values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=36,
        intermediate_size=50,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        tie_word_embeddings=tied,
        pad_token_id=0,
        **changes,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def tiny_gpt2() -> nn.Module:
    """Make a model with tied embeddings and no dropout. Every call gives the same values."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=36,
        n_layer=2,
        n_head=6,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    return GPT2LMHeadModel(config)


def tiny_t5() -> nn.Module:
    """Make a model with two layers in encoder and decoder, which share the embedding. Every call gives the same values."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 4, "d_ff": 20, "num_layers": 2, "num_heads": 2}
    torch.manual_seed(0)
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0))


def tiny_whisper() -> nn.Module:
    """Make a model with two layers in encoder and decoder. Every call gives the same values."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "num_mel_bins": 8, "max_source_positions": 30}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 2, f"{part}_attention_heads": 2, f"{part}_ffn_dim": 20}
    torch.manual_seed(0)
    return WhisperForConditionalGeneration(
        WhisperConfig(**sizes, **ends, begin_suppress_tokens=None, suppress_tokens=None)
    )


def tiny_vit() -> nn.Module:
    """Make timm's model for images of 8 x 8 in 4 classes. Every call gives the same values."""
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 4}
    # The gradient of keys' biases would be rounding errors only, by which Adafactor would step.
    return VisionTransformer(**sizes, qkv_bias=False)


class Tokens(Dataset):
    """Random tokens; each sample has itself as labels."""

    def __init__(self, count: int, length: int = 7) -> None:
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(3, VOCABULARY, (count, length), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


def be_a_rank(ctx: Any) -> None:
    """Set ``torchrun``'s environment, and reset accelerate's state."""
    be_alone()
    rank, size = str(ctx.rank), str(ctx.world_size)
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "ACCELERATE_USE_CPU": "true"}


def be_alone() -> None:
    """Unset a rank's environment, and reset accelerate's singletons, which outlive a body."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)


def check_equal(state: dict[str, Tensor], expected: dict[str, Tensor], near: float = 1e-9) -> None:
    """Compare the state of a run on ranks with one process's."""
    torch.testing.assert_close(dict(state), dict(expected), rtol=near, atol=near)


def copied(model: nn.Module) -> dict[str, Tensor]:
    """Copy a plain model's parameters."""
    return {n: p.detach().clone() for n, p in model.named_parameters()}
