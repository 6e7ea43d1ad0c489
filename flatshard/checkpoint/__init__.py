"""State dicts, optimizer state and job checkpoints: by name, exact, for any number of ranks."""

from typing import TYPE_CHECKING

from flatshard._base import old_names
from flatshard.checkpoint._barrier import RankError
from flatshard.checkpoint._job import load_checkpoint, save_checkpoint
from flatshard.checkpoint._optimizer_load import load_optim_state_dict, optim_state_dict_to_load
from flatshard.checkpoint._optimizer_names import rekey_optim_state_dict
from flatshard.checkpoint._optimizer_state import optim_state_dict
from flatshard.checkpoint._safetensors import export_safetensors
from flatshard.checkpoint._sharded_value import ShardedValue
from flatshard.checkpoint._state_dict import full_state_dict, iter_full_params, load_local_state_dict, local_state_dict

if TYPE_CHECKING:
    from flatshard.checkpoint._copy import copy_checkpoint
    from flatshard.checkpoint._reader import FileSystemReader
    from flatshard.checkpoint._safetensors_load import load_safetensors
    from flatshard.checkpoint._writer import FileSystemWriter
else:
    __getattr__ = old_names.attributes(
        __name__,
        old={
            "MeetingError": "RankError",
            "Reader": "FileSystemReader",
            "Writer": "FileSystemWriter",
            "rekey": "rekey_optim_state_dict",
        },
        gone={
            "ChangedParams": ("flatshard.weights._changes", "flatshard.weights.Sender"),
            "SentParams": ("flatshard.weights._sent", "flatshard.weights.Sender"),
            "apply_changed_params": ("flatshard.weights._changes", "flatshard.weights.Receiver"),
            "iter_changed_params": ("flatshard.weights._changes", "flatshard.weights.Sender"),
        },
        on_first_use={
            "FileSystemReader": "_reader",
            "FileSystemWriter": "_writer",
            "copy_checkpoint": "_copy",
            "load_safetensors": "_safetensors_load",
        },  # torch.distributed.checkpoint comes with them
    )

__all__ = [
    "FileSystemReader",
    "FileSystemWriter",
    "RankError",
    "ShardedValue",
    "copy_checkpoint",
    "export_safetensors",
    "full_state_dict",
    "iter_full_params",
    "load_checkpoint",
    "load_local_state_dict",
    "load_optim_state_dict",
    "load_safetensors",
    "local_state_dict",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "rekey_optim_state_dict",
    "save_checkpoint",
]
