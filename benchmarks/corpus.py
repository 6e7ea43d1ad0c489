"""Real text on every machine: the source code of Python's standard library, as bytes.

Nothing is downloaded. Files are read in sorted order up to a total size, so a Python version always gives the same text. Some
files are held out for validation, so none of their lines is in the training text.
"""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256  # one token per byte value

# Third-party packages, test suites and generated tables.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data"}
_SKIPPED_PREFIX = "_sysconfigdata"  # generated, and different on every machine
_HOLD_OUT_EVERY = 16  # validation has one file of so many


@dataclass(frozen=True)
class Corpus:
    """Two texts that share no file, each a 1-D uint8 tensor."""

    train: Tensor
    validation: Tensor


def load_corpus(max_bytes: int = 4_000_000) -> Corpus:
    """Read at most ``max_bytes`` of the standard library's sources, for training and validation together."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [
        path
        for path in sorted(root.rglob("*.py"))
        if _SKIPPED.isdisjoint(path.relative_to(root).parts) and not path.name.startswith(_SKIPPED_PREFIX)
    ]
    if len(paths) < _HOLD_OUT_EVERY:
        raise FileNotFoundError(f"this Python ships no source files of its standard library under {root}")
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    room = max_bytes
    for index, path in enumerate(paths):
        text = path.read_bytes()[:room]
        room -= len(text)
        parts[index % _HOLD_OUT_EVERY == 0].append(text)
        if not room:
            break
    train, validation = (torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts)
    return Corpus(train, validation)


def random_windows(text: Tensor, count: int, length: int, *, seed: int) -> Tensor:
    """Cut ``count`` windows out of ``text`` at positions that depend on ``seed`` alone.

    Returns:
        int64 tensor of shape (count, length).
    """
    generator = torch.Generator().manual_seed(seed)
    return _windows(text, torch.randint(_last_start(text, length) + 1, (count,), generator=generator), length)


def even_windows(text: Tensor, count: int, length: int) -> Tensor:
    """Cut ``count`` windows out of ``text``, evenly spread from its beginning to its end."""
    return _windows(text, torch.arange(count) * _last_start(text, length) // max(count - 1, 1), length)


def _windows(text: Tensor, starts: Tensor, length: int) -> Tensor:
    return text[starts[:, None] + torch.arange(length)].long()


def _last_start(text: Tensor, length: int) -> int:
    if len(text) < length:
        raise ValueError(f"a window of {length:,} bytes does not fit into a text of {len(text):,}: lower --context")
    return len(text) - length
