"""accelerate with a sharded model: two ranks compared with one process."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from on_ranks import ranks
from tiny import Tokens, be_a_rank, be_alone, copied, tiny_gpt2, tiny_llama
from torch import Tensor, nn
from torch.utils.data import DataLoader

import flatshard

pytestmark = [pytest.mark.clients("accelerate", "transformers", "safetensors"), pytest.mark.time_limit(600)]

BATCH, ACCUMULATE = 2, 2
Seen = list[tuple[float, float]]
"""(loss, norm) of each step."""


def start(model: nn.Module, mixed: str, batch: int = BATCH, **sharding: Any) -> tuple[Any, ...]:
    """Return ``accelerator, model, optimizer, loader, scheduler`` as in a script; unsharded without a process group."""
    from accelerate import Accelerator

    from flatshard.integrations.accelerate import prepare

    accelerator = Accelerator(
        cpu=True,
        mixed_precision=mixed,
        gradient_accumulation_steps=ACCUMULATE,
        step_scheduler_with_optimizer=False,  # otherwise it steps once for each process
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    objects = (model, optimizer, DataLoader(Tokens(24), batch_size=batch), scheduler)
    if accelerator.num_processes == 1:
        return accelerator, *accelerator.prepare(*objects)
    return accelerator, *prepare(accelerator, *objects, **sharding)


def train(accelerator: Any, model: nn.Module, optimizer: Any, loader: Any, scheduler: Any) -> Seen:
    """Train as in accelerate's examples."""
    seen, losses = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                seen.append((sum(losses) / len(losses), float(norm)))
                losses.clear()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return seen


def check_ranks(ctx, kind: str, mixed: str, folder: str, expected: Seen, weights: dict[str, Tensor]) -> Any:
    """Train two epochs, repeat the second in a new model from ``save_state``, and once from the state of one process."""
    be_a_rank(ctx)
    parts = start(MODELS[kind](), mixed)
    accelerator, model = parts[:2]
    assert accelerator.num_processes == 2
    assert accelerator.unwrap_model(model) is model
    assert flatshard.describe(model).units
    seen = train(*parts)
    accelerator.save_state(f"{folder}/two")
    seen += train(*parts)
    whole, state, again = flatshard.checkpoint.full_state_dict(model), accelerator.get_state_dict(model), []
    assert set(state) == (set(whole) if ctx.rank == 0 else set())
    accelerator.save_model(model, f"{folder}/model")
    how = {"is_main_process": accelerator.is_main_process, "save_function": accelerator.save}
    model.save_pretrained(f"{folder}/pretrained", state_dict=state, **how)
    for saved in ("two", "one"):
        be_a_rank(ctx)
        fresh = start(MODELS[kind](), mixed)
        fresh[0].load_state(f"{folder}/{saved}")
        again.append((train(*fresh), flatshard.checkpoint.full_state_dict(fresh[1])))
    assert again[0][0] == seen[len(seen) // 2 :]
    torch.testing.assert_close(again[0][1], whole, rtol=0, atol=0)
    # Layers compute under accelerate's autocast, and the model returns float32.
    layers, made = next(m for m in model.modules() if isinstance(m, nn.ModuleList)), []
    layers[0].mlp.register_forward_hook(lambda module, args, out: made.append(out.dtype))
    made.append(model(**{n: v[None] for n, v in Tokens(1)[0].items()}).logits.dtype)
    assert made == [torch.bfloat16 if mixed == "bf16" else torch.float32, torch.float32]
    for found, values, losses in ((seen, whole, expected), (*again[1], expected[len(expected) // 2 :])):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), **CLOSE[mixed])
        torch.testing.assert_close({n: values[n] for n in weights}, weights, **CLOSE[mixed])
    return whole


MODELS = {"llama": tiny_llama, "gpt2": tiny_gpt2}
CLOSE = {"no": {"rtol": 1e-4, "atol": 1e-5}, "bf16": {"rtol": 2e-2, "atol": 2e-2}}


@pytest.mark.parametrize(("kind", "mixed"), [("gpt2", "no"), ("llama", "bf16")])
def test_as_one_process(pair, tmp_path: Path, kind: str, mixed: str):
    """Losses, norms and weights agree. Either loads the other's state, and plain libraries open the saved model."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    be_alone()
    parts = start(MODELS[kind](), mixed, batch=2 * BATCH)
    first = train(*parts)
    parts[0].save_state(f"{tmp_path}/one")
    second = train(*parts)
    weights = copied(parts[1])
    whole, _ = pair.run(check_ranks, kind, mixed, str(tmp_path), first + second, weights, world_size=2)
    be_alone()
    parts = start(MODELS[kind](), mixed, batch=2 * BATCH)
    parts[0].load_state(f"{tmp_path}/two")
    torch.testing.assert_close(torch.tensor(train(*parts)), torch.tensor(second), **CLOSE[mixed])
    torch.testing.assert_close(copied(parts[1]), weights, **CLOSE[mixed])
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained").state_dict()
    for state in (load_file(tmp_path / "model" / "model.safetensors"), opened):
        assert len(whole.keys() - state.keys()) <= (kind == "gpt2")  # one name of tied weights is enough
        torch.testing.assert_close(state, {n: whole[n] for n in state}, rtol=0, atol=0)


@ranks(2, pool="pair")
def test_what_is_refused(ctx):
    from accelerate import Accelerator

    from flatshard.integrations.accelerate import prepare

    be_a_rank(ctx)
    accelerator = Accelerator(cpu=True)
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"Linear does not name its layers .* pass policy={Block}$"):
        prepare(accelerator, nn.Linear(2, 2))
    with pytest.raises(ValueError, match="SGD steps parameters of none of the prepared models"):
        prepare(accelerator, a, torch.optim.SGD([*a.parameters(), *b.parameters()]), policy=None)
    be_a_rank(ctx)
    del os.environ["ACCELERATE_USE_CPU"]
    if not torch.cuda.is_available():  # otherwise accelerate treats each rank as a single process
        with pytest.raises(ValueError, match=r"accelerate counts 1 processes, and torch.distributed 2: .*cpu=True"):
            prepare(Accelerator(), tiny_llama())
