"""transformers: its folders of pretrained values, read into the shards of a model that was sharded on the meta device.

transformers renames tensors when it loads, stacks the matrices of experts, and joins or cuts others. Its conversion mappings
say how, and are followed here: where a stack or a joint is a place in the parameter, each rank still reads its own bytes.
Conversions that compute something else (transposed, interleaved or permuted values) are refused.

This sets ``_is_hf_initialized`` on loaded parameters and buffers, as ``from_pretrained`` does, so that ``initialize_weights``
fills only those that the files lack: buffers that are not saved, such as rotary frequencies.
"""

from __future__ import annotations

import os
import re
from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

import flatshard

Place = str | tuple[str, tuple[int, ...]] | list[str] | None
"""See ``flatshard.checkpoint.load_safetensors``, ``rename=``."""


def load_pretrained(
    model: PreTrainedModel, directory: str | os.PathLike[str], *, strict: bool = True, **options: Any
) -> list[str]:
    """Read a folder that ``save_pretrained`` wrote, as ``from_pretrained`` does, into the shards of ``model``.

    All ranks must call it, after ``fully_shard`` on the meta device and ``to_empty``. Then transformers initialises what the
    files lack: buffers that are not saved, and with ``strict=False`` parameters.

    Example::

        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        flatshard.fully_shard(model, policy=policy_of(model))
        model.to_empty(device="cpu")
        load_pretrained(model, folder)

    Args:
        strict: raise if the files lack parameters, or have others that the model does not ignore.
        options: of ``flatshard.checkpoint.load_safetensors``.

    Returns:
        Names of the model that the files lack.

    Raises:
        RankError: as ``load_safetensors``; or the values of some tensors would have to be computed from the files.
    """
    names = ConvertedNames(model)
    missing = flatshard.checkpoint.load_safetensors(model, directory, strict=strict, rename=names.place, **options)
    left = set(missing)
    for name, value in model.state_dict(keep_vars=True).items():
        value._is_hf_initialized = name not in left
    for module in model.modules():  # some initialise modules inside them, by their shapes
        tensors = (*module.parameters(), *module.buffers())
        module._is_hf_initialized = all(getattr(each, "_is_hf_initialized", False) for each in tensors)
    model.initialize_weights()
    return missing


_ONCE_SAVED = r"rotary_emb\.inv_freq$|(^|\.)position_ids$"
"""Buffers that old folders have, and models compute."""


class ConvertedNames:
    """Places in a model of the tensors in files, by transformers' conversion mappings."""

    def __init__(self, model: PreTrainedModel) -> None:
        mapping = get_model_conversion_mapping(model)
        self._renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        self._converters = [each for each in mapping if isinstance(each, WeightConverter)]
        self._prefix, self._state = model.base_model_prefix, model.state_dict()
        self._ignored = [re.compile(each) for each in (*(model._keys_to_ignore_on_load_unexpected or ()), _ONCE_SAVED)]

    def place(self, name: str) -> Place:
        """Return the place of tensor ``name`` of the files, as ``load_safetensors`` takes it.

        Raises:
            NotImplementedError: its values are computed when transformers loads it.
        """
        found, pattern = self._rename(name, self._renamings, self._converters)
        if found not in self._state and name in self._state:
            found, pattern = name, None
        if found not in self._state and any(each.search(found) for each in self._ignored):
            return None
        return found if pattern is None else self._converted(name, found, pattern)

    def _rename(self, name: str, renamings: Any, converters: Any) -> tuple[str, str | None]:
        renamed: tuple[str, str | None] = rename_source_key(name, renamings, converters, self._prefix, self._state)
        return renamed

    def _converted(self, name: str, found: str, pattern: str) -> Place:
        converter = next(each for each in self._converters if pattern in each.source_patterns)
        kinds = [type(each) for each in converter.operations]
        if kinds == [Chunk] and converter.operations[0].dim == 0:
            first, *others = converter.target_patterns
            return [found, *(found.replace(first, other) for other in others)]
        if found not in self._state:
            return found
        if kinds not in ([MergeModulelist], [Concatenate], [MergeModulelist, Concatenate]):
            raise NotImplementedError(
                f"{name!r}: transformers computes {found!r} from it by {converter.operations}. Load it in one process by "
                "from_pretrained, and shard it by fully_shard(model, sync_module_states=True)"
            )
        shape = self._state[found].shape
        offsets = [0] * len(shape)
        for operation in converter.operations:
            if isinstance(operation, MergeModulelist):
                offsets[operation.dim] = int(re.findall(r"\.(\d+)(?=\.)", name)[-1])
            else:
                sources = converter.source_patterns
                offsets[operation.dim] += sources.index(pattern) * (shape[operation.dim] // len(sources))
        return found, tuple(offsets)
