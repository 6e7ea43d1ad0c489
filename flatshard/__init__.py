"""flatshard: sharded data parallelism for PyTorch in one line.

>>> flatshard.fully_shard(model, policy={Block})

Same object, same class, same names; each parameter a slice of a flat shard.

Here is what a training script calls. More is in ``checkpoint``, ``comm``, ``debug``, ``layouts``, ``optim``, ``planning``,
``policies``, ``tensors`` and ``weights``.
"""

from flatshard import (
    _extensions,
    checkpoint,
    comm,
    debug,
    elastic,
    layouts,
    optim,
    planning,
    policies,
    tensors,
    weights,
)
from flatshard._composable.construct.policy import CustomPolicy
from flatshard._composable.features.buffers import sync_buffers
from flatshard._composable.features.configure import configure
from flatshard._composable.features.forward_method import register_forward_method
from flatshard._composable.features.grad_sync import no_sync, reduce_gradients
from flatshard._composable.features.keep import keep_unsharded
from flatshard._composable.features.skip import skip
from flatshard._composable.features.summon import recover, reshard, summon_full_params, unshard
from flatshard._composable.fully_shard import fully_shard
from flatshard._config import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from flatshard._errors import CollectiveError, InternalError, OutOfStepError
from flatshard._handle.tensors.sharded_parameter import full_shape
from flatshard.checkpoint import MeetingError, load_checkpoint, save_checkpoint
from flatshard.debug import describe
from flatshard.optim import clip_grad_norm_, flat_parameters
from flatshard.planning import fit, plan

_extensions.plug_in()

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CollectiveError",
    "CustomPolicy",
    "InternalError",
    "MeetingError",
    "MixedPrecision",
    "OutOfStepError",
    "ShardingStrategy",
    "checkpoint",
    "clip_grad_norm_",
    "comm",
    "configure",
    "debug",
    "describe",
    "elastic",
    "fit",
    "flat_parameters",
    "full_shape",
    "fully_shard",
    "keep_unsharded",
    "layouts",
    "load_checkpoint",
    "no_sync",
    "optim",
    "plan",
    "planning",
    "policies",
    "recover",
    "reduce_gradients",
    "register_forward_method",
    "reshard",
    "save_checkpoint",
    "skip",
    "summon_full_params",
    "sync_buffers",
    "tensors",
    "unshard",
    "weights",
]

for _value in [globals()[_name] for _name in __all__]:
    if isinstance(_value, type(fully_shard)):  # a function: its help() names this package, and no file of it
        _value.__module__ = __name__
