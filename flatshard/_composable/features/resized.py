"""Refuses ``resize_token_embeddings`` of a model whose embeddings are sharded.

This method of transformers' models, and of models written like them, takes the number of tokens from the first dimension of a
weight, and puts new layers in the place of old ones. Of a part it would take a wrong number, or fail with torch's error about
unpacking; and the new layers would be on no unit.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any, NoReturn

from torch import nn

from flatshard._composable.extensions import Extension
from flatshard._composable.state import Unit

_METHOD = "resize_token_embeddings"


class Resized(Extension):
    """Puts a function that raises before the method of each module that has it, on the instance."""

    def finish(self, module: nn.Module, made: Collection[Unit]) -> None:
        for each in module.modules():
            if callable(getattr(type(each), _METHOD, None)):
                each.__dict__[_METHOD] = functools.partial(_refuse, type(each).__name__)


def _refuse(model: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        f"{_METHOD}: this {model} is sharded, and its embeddings cannot be resized any more. Resize them before fully_shard. "
        "To resize those of a trained model, save it (flatshard.checkpoint.export_safetensors), and load it anew"
    )
