"""Plan a step of a GPT with a billion parameters on 8 devices, and fit it into less memory: without a device.

    python fit_1b.py                        # on the meta device: no values, no ranks
    python fit_1b.py --budget "6 GiB" --ranks 16

Nothing is estimated: the plan is counted from a step that runs on tensors without values.
"""

import argparse
import warnings

warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch needs none here

import torch
from torch import nn

import flatshard

WIDTH, LAYERS, HEADS, CONTEXT, VOCABULARY = 2560, 12, 20, 2048, 50304


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.expand, self.contract = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        parts = self.query_key_value(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.contract(nn.functional.gelu(self.expand(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks, self.norm = nn.Sequential(*[Block() for _ in range(LAYERS)]), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def main(ranks=8, batch=4, budget="8 GiB"):
    with torch.device("meta"):
        model = GPT()
        tokens = torch.zeros(batch, CONTEXT, dtype=torch.long)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters\n")
    arguments = {
        "world_size": ranks,
        "optimizer": torch.optim.AdamW,
        "example_inputs": (tokens,),
        "mixed_precision": flatshard.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "device": "cuda",
    }
    print(flatshard.plan_step(model, policy={Block}, **arguments))
    fit = flatshard.fit_to_memory(model, bytes_per_rank=budget, policy={Block}, **arguments)
    print(f"\n{fit}\n\nTo shard a model like this: fit.apply(model)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Plan a step of a GPT with a billion parameters.")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4, help="rows of each rank")
    parser.add_argument("--budget", default="8 GiB", help="of each rank")
    options = parser.parse_args()
    main(options.ranks, options.batch, options.budget)
