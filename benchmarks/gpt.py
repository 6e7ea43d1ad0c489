"""A small GPT in plain PyTorch, without a line for sharding."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a model."""

    vocabulary: int
    context: int  # maximum length of a sequence
    layers: int
    width: int
    heads: int
    tied: bool = True  # the head's weight is the embedding's

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width ({self.width}) must be divisible by heads ({self.heads})")


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query_key_value = nn.Linear(config.width, 3 * config.width, bias=False)
        self.project = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> (batch, length, width)."""
        # Each of the three: (batch, heads, length, width / heads)
        query, key, value = self.query_key_value(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.project(mixed.transpose(1, 2).flatten(2))
        return output


class MLP(nn.Module):
    """Two linear layers with a GELU between them, and four times the width inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.width, 4 * config.width)
        self.project = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> (batch, length, width)."""
        output: Tensor = self.project(F.gelu(self.expand(x)))
        return output


class Block(nn.Module):
    """A pre-norm transformer layer, the natural unit of sharding: ``policy={Block}``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> (batch, length, width)."""
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class GPT(nn.Module):
    """A decoder-only transformer with learned positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Parameter(torch.empty(config.context, config.width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        self._initialize()

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores of every possible next token at every position.

        Args:
            tokens: int64 tensor of shape (batch, length), length at most ``config.context``.

        Returns:
            Logits of shape (batch, length, vocabulary).
        """
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    @torch.no_grad()
    def _initialize(self) -> None:
        """Initialise with small weights: the output is nearly uniform, so the loss is close to log(vocabulary)."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim >= 2:
                # Each block adds two branches to the residual stream, whose sum keeps the scale of one.
                branches = 2 * self.config.layers if name.endswith("project.weight") else 1
                nn.init.normal_(parameter, std=0.02 / math.sqrt(branches))
