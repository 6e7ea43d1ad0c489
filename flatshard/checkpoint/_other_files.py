"""Files and folders that are no checkpoints, by their kinds: which call reads them. It is for errors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from flatshard._base.errors import name_list

_OF_TORCH = ".pt", ".pth", ".bin", ".ckpt", ".pkl"
_LOAD = (
    "module.load_state_dict(torch.load(file, map_location='cpu', mmap=True)), where each rank takes its shards; for an "
    "optimizer's state, flatshard.checkpoint.load_optim_state_dict(module, optimizer, state)"
)


def explain_path(path: Path, near: Collection[Path]) -> str:
    """Return what ``path`` on a disk is, which has no checkpoint: the end of a sentence.

    ``near``: checkpoints among the folder around it and those inside.
    """
    if path.is_file():
        if path.parent in near:
            return f"is a file of a checkpoint: give its folder, {str(path.parent)!r}"
        with path.open("rb") as file:
            return _explain_file(path, file.read(9))
    if not path.is_dir():
        return "not found"
    return explain_folder([each.name for each in path.iterdir()], sorted(each.name for each in near))


def _explain_file(path: Path, start: bytes) -> str:
    """Return what the file ``path`` is, by its first bytes, or else by its name."""
    if path.suffix == ".safetensors" or start[8:] == b"{":
        read = f"flatshard.checkpoint.load_safetensors(module, {str(path.parent)!r}, name={path.stem!r})"
        return f"is a file of safetensors, and no checkpoint: read it by {read}"
    if start.startswith(b"GGUF"):
        return "is a GGUF file, which is not read: convert it to safetensors, for load_safetensors"
    if start.startswith((b"PK\3\4", b"\x80\2")) or path.suffix in _OF_TORCH:
        is_zip = start.startswith(b"PK")  # torch maps no other files into memory
        read = _LOAD if is_zip else _LOAD.replace(", mmap=True", "")
        return f"is a file of torch.save, and no checkpoint: read it by {read}"
    return "is a file, and a checkpoint is a folder"


def explain_folder(names: Iterable[str], checkpoints: Sequence[str] = ()) -> str:
    """Return what a folder without metadata is, by the ``names`` in it, of which some are ``checkpoints``."""
    names = sorted(names)
    if checkpoints:
        return f"is no checkpoint, but has some in it: give the path of one, {name_list(checkpoints)}"
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return (
            "is a folder of safetensors, and no checkpoint: read it by "
            "flatshard.checkpoint.load_safetensors(module, folder), "
            "a model of transformers by flatshard.integrations.pretrained.load_pretrained(module, folder)"
        )
    if files := [name for name in names if name.endswith(_OF_TORCH)]:
        several = ". Of several files make one dict first" if len(files) > 1 else ""
        return f"has {name_list(files, 3)}, of torch.save, and no checkpoint: read by {_LOAD}{several}"
    return "is no checkpoint: it has no .metadata, so a save that did not end wrote it"
