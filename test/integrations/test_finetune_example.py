"""The example that fine-tunes a Llama: its result is what transformers and peft load."""

from pathlib import Path

import pytest
import torch
from scripts import EXAMPLES, run_main

pytestmark = [pytest.mark.clients("peft", "transformers"), pytest.mark.time_limit(600)]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
def test_its_folder_is_loaded(pair, tmp_path: Path, lora: bool):
    import peft
    import transformers

    lines, _ = pair.run(run_main, "finetune_llama", str(tmp_path), lora=lora, steps=20)
    before, after = (float(line.split()[-1]) for line in lines if line.startswith("step"))
    assert after < before
    assert lines[-1] == f"saved {tmp_path}"
    if lora:
        torch.manual_seed(0)
        base = transformers.AutoModelForCausalLM.from_config(_tiny())
        model = peft.PeftModel.from_pretrained(base, tmp_path)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.tensor([list(b"Between steps each rank holds its shards, and while a layer computes")])
    with torch.no_grad():
        assert model(input_ids=tokens, labels=tokens).loss < before


def _tiny():
    import runpy

    return runpy.run_path(str(EXAMPLES["finetune_llama"]))["TINY"]
