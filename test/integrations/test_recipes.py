"""Every recipe of flatshard/docs/integrations runs on two ranks."""

import importlib
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Block
from tiny import Tokens, be_a_rank, tiny_llama, tiny_vit

import flatshard

FOLDER = Path(flatshard.__file__).parent / "docs" / "integrations"
PAGES = "\n".join(path.read_text() for path in sorted(FOLDER.glob("*.md")))
FOUND = re.findall(r"<!-- recipe: ([^,\n]*), ([^\n]*) -->\n```python\n(.*?)```", PAGES, re.DOTALL)
RECIPES = {name: code for name, _, code in FOUND}

pytestmark = pytest.mark.time_limit(600)


def test_every_python_block_is_a_recipe():
    # Other blocks need several launchers or an environment of their own.
    elsewhere = re.findall(r"<!-- (?:like|run by): ([^\n]*) -->\n```python", PAGES)
    assert all((Path(__file__).parents[2] / path).exists() for path in elsewhere)
    assert len(re.findall("```python", PAGES)) == len(RECIPES) + len(elsewhere)


class Engine:
    def __init__(self) -> None:
        self.loaded: set[str] = set()

    def load_weights(self, weights: Any) -> None:
        self.loaded |= {name for name, value in weights if value.dtype is torch.bfloat16}


WRITES = {"accelerate": "model/model.safetensors", "trainer": "model/config.json", "peft": "adapter_model.safetensors"}
WRITES |= {"lightning": "last.ckpt", "fabric": "step-1"}
"""A file that each recipe writes."""


class Network(torch.nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(*[Block(8) for _ in range(3)])


def lightning_names(ctx: Any, name: str) -> dict[str, Any]:
    os.environ |= {"LOCAL_RANK": str(ctx.rank), "NODE_RANK": "0"}
    import lightning

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = Network()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.network(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    options: dict[str, Any] = {"accelerator": "cpu", "devices": 2}
    if name == "lightning":
        options |= dict.fromkeys(
            ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
        )
    names = {"lightning": lightning, "Block": Block, "options": options, "network": Network(), "x": torch.randn(2, 8)}
    return names | {"model": Task(), "loader": torch.utils.data.DataLoader(torch.randn(8, 8), batch_size=2)}


def timm_names(ctx: Any, name: str) -> dict[str, Any]:
    import timm

    return {"timm": timm, "model": tiny_vit(), "images": torch.randn(2, 3, 8, 8)}


def pipelining_names(ctx: Any, name: str) -> dict[str, Any]:
    mesh = ctx.device_mesh((2, 1), ("pp", "dp"))
    parts = {index: Network() for index in (ctx.rank, ctx.rank + 2)}
    x = torch.randn(8, 8)
    return {
        "mesh": mesh,
        "parts": parts,
        "model": torch.nn.ModuleList(parts.values()),
        "Block": Block,
        "device": torch.device("cpu"),
        "like": torch.empty(2, 8, requires_grad=True),
        "loss": torch.nn.functional.mse_loss,
        "inputs": (x.requires_grad_(),) if ctx.rank == 0 else (),
        "targets": {} if ctx.rank == 0 else {"target": x},
    }


def transformers_names(ctx: Any, name: str, folder: str) -> dict[str, Any]:
    from transformers import TrainingArguments
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    be_a_rank(ctx)
    data = Tokens(8)
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    names = {"LlamaDecoderLayer": LlamaDecoderLayer, "model": tiny_llama(), "dataset": data, "loader": loader}
    if name == "trainer":
        quiet = {"report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False, "use_cpu": True}
        names["args"] = TrainingArguments(output_dir=folder, max_steps=2, per_device_train_batch_size=2, **quiet)
    if name == "peft":
        names |= {"peft": importlib.import_module("peft"), "batch": {n: v[None] for n, v in data[0].items()}}
    return names | {"engine": Engine(), "send": lambda *each: None, "post": lambda *each: None}


OTHERS = {"lightning": lightning_names, "fabric": lightning_names, "timm": timm_names, "pipelining": pipelining_names}
"""Names used by recipes with models other than transformers'."""


def run_recipe(ctx, name: str, folder: str) -> None:
    own = OTHERS[name](ctx, name) if name in OTHERS else transformers_names(ctx, name, folder)
    names: dict[str, Any] = {"torch": torch, "flatshard": flatshard, "folder": folder, **own}
    exec(compile(RECIPES[name], "recipe", "exec"), names)
    assert flatshard.describe(names["model"]).units
    if name == "changed weights":  # weights/test_weights.py delivers messages itself
        assert names["sender"].version == 1
    if name == "weight sync":
        assert names["engine"].loaded == {n for n, _ in names["model"].named_parameters()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.clients(*needs.split()), id=name) for name, needs, _ in FOUND]
)
def test_recipe(pair, tmp_path: Path, name: str):
    pair.run(run_recipe, name, str(tmp_path), world_size=2)
    if name in WRITES:
        assert (tmp_path / WRITES[name]).exists()
