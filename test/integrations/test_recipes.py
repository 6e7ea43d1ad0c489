"""Every recipe of flatshard/integrations/README.md runs, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Tokens, be_a_rank, tiny_llama

import flatshard

README = (Path(flatshard.__file__).parent / "integrations" / "README.md").read_text()
FOUND = re.findall(r"<!-- recipe: ([^,\n]*), ([^\n]*) -->\n```python\n(.*?)```", README, re.DOTALL)
RECIPES = {name: code for name, _, code in FOUND}

pytestmark = pytest.mark.time_limit(600)


def test_every_python_block_is_a_recipe():
    assert len(re.findall("```python", README)) == len(RECIPES)


def trainer_names(folder: str) -> dict[str, Any]:
    from transformers import TrainingArguments

    quiet = {"report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False, "use_cpu": True}
    return {"args": TrainingArguments(output_dir=folder, max_steps=2, per_device_train_batch_size=2, **quiet)}


def peft_names(folder: str) -> dict[str, Any]:
    import peft

    return {"peft": peft, "batch": {n: v[None] for n, v in Tokens(1)[0].items()}}


class Engine:
    def __init__(self) -> None:
        self.loaded: set[str] = set()

    def load_weights(self, weights: Any) -> None:
        self.loaded |= {name for name, value in weights if value.dtype is torch.bfloat16}


NAMES = {"trainer": trainer_names, "peft": peft_names, "weight sync": lambda folder: {"engine": Engine()}}
WRITES = {"accelerate": "model/model.safetensors", "trainer": "model/config.json", "peft": "adapter_model.safetensors"}
"""What is there after a recipe."""


def run_recipe(ctx, name: str, folder: str) -> None:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    be_a_rank(ctx)
    data = Tokens(8)
    names: dict[str, Any] = {
        "torch": torch,
        "flatshard": flatshard,
        "LlamaDecoderLayer": LlamaDecoderLayer,
        "model": tiny_llama(),
        "dataset": data,
        "loader": torch.utils.data.DataLoader(data, batch_size=2),
        "folder": folder,
        **NAMES.get(name, lambda folder: {})(folder),
    }
    exec(compile(RECIPES[name], "README.md", "exec"), names)
    assert flatshard.describe(names["model"]).units
    if name == "weight sync":
        assert names["engine"].loaded == {n for n, _ in names["model"].named_parameters()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.clients(*needs.split()), id=name) for name, needs, _ in FOUND]
)
def test_recipe(pair, tmp_path: Path, name: str):
    pair.run(run_recipe, name, str(tmp_path), world_size=2)
    if name in WRITES:
        assert (tmp_path / WRITES[name]).exists()
