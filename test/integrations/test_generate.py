"""``generate()`` of transformers' encoder-decoder models: the error's cure works, and so do the ways that need none."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import flatshard
from flatshard import fully_shard

pytestmark = [pytest.mark.clients("transformers"), pytest.mark.slow, pytest.mark.time_limit(300)]


def make() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    tokens = {"vocab_size": 50, "d_model": 16, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 2}
    config = transformers.T5Config(**tokens, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    return transformers.T5ForConditionalGeneration(config).eval()


def generate(ctx) -> None:
    plain = make()
    ids = torch.tensor([[5, 6, 7, 8]])
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    expected = plain.generate(ids, **options)
    for policy in (None, {type(plain.encoder.block[0])}):
        model = fully_shard(copy.deepcopy(plain), policy=policy, process_group=ctx.group)
        with pytest.raises(RuntimeError, match=r"after flatshard\.register_forward_method\(module, 'generate'\)"):
            model.generate(ids, **options)
        for around in (
            nullcontext(),
            flatshard.keep_unsharded(model),
            flatshard.keep_unsharded(model, threads=True),
            flatshard.summon_full_params(model),
        ):
            if isinstance(around, nullcontext):
                flatshard.register_forward_method(model, "generate")
            with torch.no_grad(), around:
                assert torch.equal(model.generate(ids, **options), expected)


def test_generate(pool):
    pool.run(generate, world_size=2, timeout=200)
