"""transformers' Trainer with a sharded model: two ranks agree with one process, and each resumes the other's checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from on_ranks import ranks
from tiny import Tokens, be_a_rank, be_alone, copied, tiny_gpt2, tiny_llama, tiny_t5, tiny_whisper
from torch import Tensor

import flatshard
from flatshard import ShardingStrategy

pytestmark = [pytest.mark.clients("accelerate", "transformers", "safetensors"), pytest.mark.time_limit(600)]

BATCH, STEPS, HALF = 2, 4, 2
NEAR = {"rtol": 1e-4, "atol": 1e-5}
MODELS = {"llama": tiny_llama, "gpt2": tiny_gpt2, "adafactor": tiny_llama}
Log = list[tuple[float, float]]


def trainer(kind: str, folder: str, batch: int, checkpointing: bool = False, **sharding: Any) -> Any:
    """Make a Trainer for one of ``MODELS``; ``"adafactor"`` has an optimizer of full matrices."""
    from transformers import Trainer, TrainingArguments

    from flatshard.integrations.trainer import ShardedTrainer

    args = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        learning_rate=1e-2,
        optim="adafactor" if kind == "adafactor" else "adamw_torch",
        weight_decay=0.1,
        max_steps=STEPS,
        save_steps=HALF,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        gradient_checkpointing=checkpointing,
    )
    made, sizes = MODELS[kind](), {"train_dataset": Tokens(32), "eval_dataset": Tokens(8)}
    return ShardedTrainer(made, args, **sizes, **sharding) if sharding else Trainer(made, args, **sizes)


def log_of(trained: Any) -> Log:
    return [(entry["loss"], float(entry["grad_norm"])) for entry in trained.state.log_history if "loss" in entry]


def check_ranks(ctx, kind: str, folder: str, log: Log, weights: dict[str, Tensor], loss: float, flops: float) -> None:
    """Compare two ranks with one process's results, resume from either's checkpoints, and open the ranks' own."""
    be_a_rank(ctx)
    first = trainer(kind, f"{folder}/two", BATCH, sharding={})
    first.train()
    assert flatshard.describe(first.model).units
    assert ("WholeParameterOptimizer of Adafactor" in repr(first.optimizer.optimizer)) == (kind == "adafactor")
    unsharded = MODELS[kind]()
    assert first.model.num_parameters() == unsharded.num_parameters()
    assert first.get_num_trainable_parameters() == unsharded.num_parameters(only_trainable=True)
    assert first.state.total_flos == flops
    torch.testing.assert_close(torch.tensor(log_of(first)), torch.tensor(log), rtol=1e-3, atol=1e-4)  # four digits
    assert first.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-4)
    whole = flatshard.checkpoint.full_state_dict(first.model)
    first.save_model(f"{folder}/saved")
    asked = {"input_ids": Tokens(2).tokens, "max_new_tokens": 4, "do_sample": False}
    generated = first.model.generate(**asked)
    opened = type(unsharded).from_pretrained(f"{folder}/saved")
    torch.testing.assert_close(copied(opened), {n: whole[n] for n in weights}, rtol=0, atol=0)
    assert torch.equal(opened.generate(**asked), generated)
    asked["max_new_tokens"] += 3 * ctx.rank
    assert torch.equal(opened.generate(**asked), first.model.generate(**asked))
    resumed = {}
    for saved_by in ("two", "one"):
        ctx.note(f"resume what {saved_by} saved")
        be_a_rank(ctx)
        again = trainer(kind, f"{folder}/{saved_by} again", BATCH, sharding={})
        again.train(resume_from_checkpoint=f"{folder}/{saved_by}/checkpoint-{HALF}")
        resumed[saved_by] = flatshard.checkpoint.full_state_dict(again.model)
        assert saved_by == "one" or log_of(again) == log_of(first)
    torch.testing.assert_close(resumed["two"], whole, rtol=0, atol=0)
    for found in (whole, resumed["one"]):
        torch.testing.assert_close({n: found[n] for n in weights}, weights, **NEAR)


@pytest.mark.parametrize("kind", ["gpt2", "adafactor"])
def test_as_one_process(pair, tmp_path: Path, kind: str):
    be_alone()
    plain, again = (trainer(kind, f"{tmp_path}/one", 2 * BATCH) for _ in range(2))
    plain.train()
    weights, loss = copied(plain.model), plain.evaluate()["eval_loss"]
    pair.run(check_ranks, kind, str(tmp_path), log_of(plain), weights, loss, plain.state.total_flos, world_size=2)
    again.train(resume_from_checkpoint=f"{tmp_path}/two/checkpoint-{HALF}")
    torch.testing.assert_close(copied(again.model), weights, **NEAR)
    runs = ("two", "two again", "one")
    states = [torch.load(f"{tmp_path}/{run}/checkpoint-{STEPS}/optimizer.pt", weights_only=False) for run in runs]
    assert states[0].keys() == states[1].keys() == states[2].keys()
    torch.testing.assert_close(states[1]["state"], states[0]["state"], rtol=0, atol=0)


@ranks(2, pool="pair")
def test_evaluation_first(ctx, path: str):
    """Evaluation before training shards the model, which then trains the same with and without checkpointing."""
    logs = []
    for checkpointing in (False, True):
        be_a_rank(ctx)
        first = trainer("llama", path, BATCH, checkpointing, sharding={"strategy": ShardingStrategy.SHARD_GRAD_OP})
        first.evaluate()
        assert [unit.fqn for unit in flatshard.describe(first.model).units] == ["", "model.layers.0", "model.layers.1"]
        first.train()
        logs.append(log_of(first))
    assert logs[0] == logs[1]
    with pytest.raises(ValueError, match=r"Linear does not name its layers \(_no_split_modules\): pass policy="):
        type(first)(torch.nn.Linear(2, 2), first.args)


@ranks(2, pool="pair")
def test_generation_of_encoder_decoders(ctx, path: str):
    """Ranks generate different lengths: by a Seq2SeqTrainer in predict, and by ``keep_unsharded`` without one."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    from flatshard.integrations.state import policy_of
    from flatshard.integrations.trainer import Sharded

    class Mine(Sharded, Seq2SeqTrainer):
        pass

    length = {"max_new_tokens": 2 + 3 * ctx.rank, "do_sample": False}
    for make, given in (
        (tiny_t5, {"input_ids": Tokens(2).tokens}),
        (tiny_whisper, {"input_features": torch.randn(2, 8, 60)}),
    ):
        for options in ({}, {"mixed_precision": flatshard.MixedPrecision(torch.bfloat16)}):
            model, plain = make().eval(), make().eval()
            flatshard.fully_shard(model, policy=policy_of(model), **options)
            with torch.no_grad(), flatshard.keep_unsharded(model):
                assert torch.equal(model.generate(**given, **length), plain.generate(**given, **length))
    be_a_rank(ctx)
    args = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "predict_with_generate": True}
    trainer = Mine(tiny_t5(), Seq2SeqTrainingArguments(path, **args, per_device_eval_batch_size=2))
    found = trainer.predict(Tokens(8), **length).predictions  # padded to the same length
    again = tiny_t5()
    for index, part in enumerate(found):
        theirs = again.generate(Tokens(8).tokens[index : index + 1], max_new_tokens=2 if index % 4 < 2 else 5)[0]
        assert part[: len(theirs)].tolist() == theirs.tolist()


@ranks(2, pool="pair")
def test_other_models_of_a_trainer(ctx, path: str):
    """A reference follows the model by shards, as in TRL. An error names an unsharded model, with its cure."""
    be_a_rank(ctx)
    first = trainer("llama", path, BATCH, sharding={})
    first.ref_model, first.teacher_model, first.loss = tiny_llama(), tiny_gpt2(), torch.nn.CrossEntropyLoss()
    with pytest.warns(UserWarning, match=r"trainer\.teacher_model, a GPT2LMHeadModel, is not sharded.*fully_shard"):
        first.train()
    assert len(flatshard.describe(first.ref_model).units) == 3
    for target, ours in zip(first.ref_model.parameters(), first.model.parameters(), strict=True):
        target.data.mul_(0.25).add_(ours.data, alpha=0.75)
    trained, start = flatshard.checkpoint.full_state_dict(first.model), copied(tiny_llama())
    expected = {name: value * 0.25 + trained[name] * 0.75 for name, value in start.items()}
    found = flatshard.checkpoint.full_state_dict(first.ref_model)
    torch.testing.assert_close({name: found[name] for name in expected}, expected)
    flatshard.fully_shard(first.teacher_model, policy={type(first.teacher_model.transformer.h[0])})
    first.evaluate()
    assert len(flatshard.describe(first.teacher_model).units) == 3
