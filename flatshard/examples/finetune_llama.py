"""Fine-tune a Llama of transformers, all of it or LoRA adapters, and write a folder for ``from_pretrained``.

    python finetune_llama.py                    # a tiny model with random values, on two ranks of this machine
    python finetune_llama.py --lora             # the adapters alone are trained and written
    torchrun --standalone --nproc-per-node 8 finetune_llama.py --model FOLDER    # a model of yours

It needs transformers, and for LoRA peft: pip install 'flatshard[clients]'.
"""

import argparse
import os
import sys
import warnings

warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch needs none here

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

import flatshard
from flatshard.integrations.peft import save_adapter
from flatshard.integrations.state import policy_of

TINY = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    bos_token_id=0,
    eos_token_id=0,
)
DEVICE = (
    torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else torch.device("cpu")
)
TEXT = "Between steps each rank holds its shards, and while a layer computes it holds the layer. "


def build(path):
    """Return the model of a folder, on the host of each rank, or a tiny one with random values."""
    if path is not None:
        return AutoModelForCausalLM.from_pretrained(path)
    torch.manual_seed(0)  # the same values on every rank
    return AutoModelForCausalLM.from_config(TINY)


def batch_of(step):
    """Return this rank's rows. Bytes are tokens here: in place of this, use your tokenizer and a DistributedSampler."""
    text = torch.tensor(list((TEXT * 2).encode()))
    starts = torch.arange(4) + 4 * (step * dist.get_world_size() + dist.get_rank())
    return torch.stack([text[start : start + 64] for start in (7 * starts % len(TEXT)).tolist()]).to(DEVICE)


def main(folder="tuned", path=None, lora=False, steps=30):
    model = build(path)
    config = model.config
    if lora:  # before the shards
        import peft

        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    model.to(DEVICE)
    flatshard.fully_shard(model, policy=policy_of(model))  # a unit for each of its layers
    trained = [p for p in model.parameters() if p.requires_grad]
    say(f"{sum(flatshard.full_shape(p).numel() for p in trained):,} parameters are trained")
    optimizer = torch.optim.AdamW(trained, lr=1e-2)

    for step in range(1, steps + 1):
        tokens = batch_of(step)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            say(f"step {step:>3}  loss {mean.item():.3f}")

    if lora:
        save_adapter(model, folder)  # for PeftModel.from_pretrained
    else:
        flatshard.checkpoint.export_safetensors(model, folder)  # into a folder without safetensors
        if dist.get_rank() == 0:
            config.save_pretrained(folder)
    say(f"saved {folder}")


def say(text):
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fine-tune a Llama of transformers.")
    parser.add_argument("--model", help="a folder with a model, or its name (default: a tiny one)")
    parser.add_argument("--lora", action="store_true", help="train adapters alone")
    parser.add_argument("--folder", default="tuned", help="where the result is written")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    if "RANK" in os.environ:  # torchrun has started this process
        if DEVICE.type == "cuda":
            torch.cuda.set_device(DEVICE)
        dist.init_process_group()
        main(options.folder, options.model, options.lora, options.steps)
        dist.destroy_process_group()
    else:
        from torch.distributed.run import main as torchrun

        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torchrun(["--standalone", "--nproc-per-node", "2", *sys.argv])
