"""``resize_token_embeddings``, as transformers' models have it, of a sharded model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from on_ranks import ranks
from torch import Tensor, nn

import flatshard
from flatshard import fully_shard


class Lm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)

    def resize_token_embeddings(self, count: int) -> nn.Module:
        before, width = self.embed.weight.size()
        old, self.embed = self.embed, nn.Embedding(count, width)
        with torch.no_grad():
            self.embed.weight[:before] = old.weight
        return self.embed

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


class Around(nn.Module):
    """As peft's models."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Lm()

    def forward(self, ids: Tensor) -> Tensor:
        return self.base(ids)


@ranks(2)
def test_resizing(ctx):
    options: list[dict[str, Any]] = [{}, {"layout": flatshard.layouts.Rows()}, {"policy": {nn.Linear}}]
    for given in options:
        model = Around()
        model.base.resize_token_embeddings(8)  # before, it works
        fully_shard(model, process_group=ctx.group, **given)
        for each in (model, copy.deepcopy(model)):
            embeddings = each.base.embed
            with pytest.raises(RuntimeError, match=r"this Lm is sharded.*before fully_shard.*export_safetensors"):
                each.base.resize_token_embeddings(10)
            assert each.base.embed is embeddings
            each(torch.arange(8)).sum().backward()
