"""Import this before anything that imports torchvision, such as timm, torchmetrics and transformers.

PyPI's torchvision is built for CUDA. Its C++ library can't be loaded with a torch without CUDA; then the import fails, as it
describes two operators of that library. In this case they are declared here; no test calls them.
"""

import importlib.util
from pathlib import Path

import torch

declared: list[torch.library.Library] = []
"""Keeps the operators alive."""


def declare() -> None:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    try:
        for library in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(library)
    except OSError:
        declared.append(torch.library.Library("torchvision", "FRAGMENT"))
        for name in ("nms", "qnms"):
            declared[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


declare()
