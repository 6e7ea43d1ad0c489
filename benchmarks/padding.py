"""Padding of each layout for the shapes of real models, at 8 to 1,024 ranks, beside FSDP2's. No model, no process group.

    python benchmarks/padding.py --full

Percent over the parameters' own elements, of one layer as a unit, and, in the last row, of 16 layers as a unit. FSDP2 cuts
every parameter along dimension 0 into chunks of ``ceil(rows / ranks)`` rows, one for each rank, and pads each to that. The
floor is 0. Elements are of 2 bytes.
"""

from __future__ import annotations

import argparse
import math

from suite import Benchmark, Figure, Table

from flatshard._handle.layout import Cut, plan_layout

Shapes = list[tuple[int, ...]]


def gpt(width: int) -> Shapes:
    """GPT-2 and GPT-3: biases everywhere."""
    matrices = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    return [s for m in matrices for s in (m, (m[0],))] + [(width,)] * 4


def llama(width: int, kv: int, hidden: int, experts: int = 1) -> Shapes:
    """Grouped-query attention, gated MLP, RMS norms; Mixtral with several experts."""
    attention = [(width, width), (kv, width), (kv, width), (width, width)]
    mlp = [(hidden, width), (hidden, width), (width, hidden)] * experts
    return [*attention, *mlp, (width,), (width,)] + [(experts, width)] * (experts > 1)


MODELS: dict[str, Shapes] = {
    "GPT-2 (768)": gpt(768),
    "GPT-2 XL (1600)": gpt(1600),
    "GPT-3 (12288)": gpt(12288),
    "ViT-H (1280)": gpt(1280),
    "Llama 3 8B": llama(4096, 1024, 14336),
    "Llama 3 70B": llama(8192, 1024, 28672),
    "Mixtral 8x7B": llama(4096, 1024, 14336, experts=8),
    "128 fused experts": [(128, 768, 2048), (128, 768, 2048), (128, 2048, 768)],
}
QUICK = ("GPT-2 XL (1600)", "Llama 3 70B", "Mixtral 8x7B")
RANKS = (8, 32, 64, 256, 1024)


def flat(shapes: Shapes, ranks: int, kind: str) -> float:
    """Of one of our layouts."""
    blocks = {"elements": lambda s: 1, "rows": lambda s: math.prod(s[1:]), "whole": math.prod, "blocks": lambda s: 64}
    strides = [tuple(math.prod(s[d + 1 :]) for d in range(len(s))) for s in shapes]
    params = [(str(i), s, stride) for i, (s, stride) in enumerate(zip(shapes, strides, strict=True))]
    layout = plan_layout(params, 2, ranks, [Cut(blocks[kind](s), kind in ("rows", "whole")) for s in shapes])
    return layout.padded_numel / layout.numel - 1


def fsdp2(shapes: Shapes, ranks: int) -> float:
    """Chunks along dimension 0."""
    padded = sum(-(-s[0] // ranks) * ranks * math.prod(s[1:]) for s in shapes)
    return padded / sum(map(math.prod, shapes)) - 1


def measure(args: argparse.Namespace) -> list[Table]:
    rows: dict[str, dict[str, Figure]] = {}
    for name in MODELS if args.full else QUICK:
        shapes = MODELS[name]
        values = {
            "Elements()": [flat(shapes, n, "elements") for n in RANKS],
            "Blocks(64)": [flat(shapes, n, "blocks") for n in RANKS],
            "Rows()": [flat(shapes, n, "rows") for n in RANKS],
            "FSDP2, dim 0": [fsdp2(shapes, n) for n in RANKS],
            "Whole()": [flat(shapes, n, "whole") for n in RANKS],
            "Whole(), 16 layers": [flat(shapes * 16, n, "whole") for n in RANKS],
        }
        for layout, series in values.items():
            rows[f"{name}, {layout}"] = {f"{n:,} ranks": Figure(100 * v) for n, v in zip(RANKS, series, strict=True)}
    return [Table("padding", "percent of padding of one layer as a unit", "0", rows)]


BENCHMARK = Benchmark(measure, __doc__)

if __name__ == "__main__":
    BENCHMARK.main()
