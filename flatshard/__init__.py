"""Sharded data parallelism for PyTorch in one call: ZeRO-3, as FSDP has it, without a wrapper or a new class.

>>> flatshard.fully_shard(model, policy={Block})

``Block`` is the layer that repeats. Each becomes a unit, whose parameters are gathered while it computes. Between steps each
rank has its shards. The loop, the names and the optimizer stay as they are. Ten names do most of the work:

    fully_shard             shard a model, in place
    MixedPrecision          the dtypes to compute and to reduce in
    describe                print a model's units, sizes and dtypes
    full_shape              the shape of a parameter, of which ``p`` is a shard
    summon_full_params      show the full parameters, and write changes back
    keep_unsharded          gather once, to evaluate or to generate
    no_sync                 reduce the gradients of several backwards once
    save_checkpoint         write a model and its optimizer
    load_checkpoint         read them, on any number of ranks
    plan_step               predict the memory and collectives of a step, without a GPU

More is in ``checkpoint``, ``comm``, ``debug``, ``elastic``, ``fsdp2``, ``layouts``, ``optim``, ``planning``, ``policies``,
``tensors`` and ``weights``. Scripts to start from are in ``flatshard/examples``.
"""

import types
from typing import TYPE_CHECKING

from flatshard import _extensions, checkpoint, comm, layouts, optim, policies, tensors
from flatshard._base import old_names as _old_names
from flatshard._base.config import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from flatshard._base.errors import CollectiveError, InternalError, OutOfStepError, ReconfiguredError
from flatshard._composable.construct.policy import CustomPolicy
from flatshard._composable.features.buffers import sync_buffers
from flatshard._composable.features.configure import configure
from flatshard._composable.features.forward_method import register_forward_method
from flatshard._composable.features.grad_sync import ReductionHandle as ReductionHandle
from flatshard._composable.features.grad_sync import no_sync, reduce_gradients
from flatshard._composable.features.keep import keep_unsharded
from flatshard._composable.features.skip import skip
from flatshard._composable.features.summon import UnshardHandle as UnshardHandle
from flatshard._composable.features.summon import recover, reshard, summon_full_params, unshard
from flatshard._composable.fully_shard import fully_shard
from flatshard._handle.tensors.sharded_parameter import full_shape
from flatshard.checkpoint import RankError, load_checkpoint, save_checkpoint
from flatshard.optim import clip_grad_norm_, flat_parameters

_extensions.plug_in()

if TYPE_CHECKING:
    from flatshard import debug, elastic, env, fsdp2, planning, weights
    from flatshard.debug import describe
    from flatshard.planning import fit_to_memory, plan_step

    __version__: str
    integrations: types.ModuleType
else:
    __getattr__ = _old_names.attributes(
        __name__,
        old={"MeetingError": "RankError", "fit": "fit_to_memory", "plan": "plan_step"},
        on_first_use={
            "__version__": "_base.version",
            "debug": "debug",
            "describe": "debug",
            "elastic": "elastic",
            "env": "env",
            "fit_to_memory": "planning",
            "fsdp2": "fsdp2",
            "integrations": "integrations",
            "plan_step": "planning",
            "planning": "planning",
            "weights": "weights",
        },
    )

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CollectiveError",
    "CustomPolicy",
    "InternalError",
    "MixedPrecision",
    "OutOfStepError",
    "RankError",
    "ReconfiguredError",
    "ShardingStrategy",
    "checkpoint",
    "clip_grad_norm_",
    "comm",
    "configure",
    "debug",
    "describe",
    "elastic",
    "env",
    "fit_to_memory",
    "flat_parameters",
    "fsdp2",
    "full_shape",
    "fully_shard",
    "keep_unsharded",
    "layouts",
    "load_checkpoint",
    "no_sync",
    "optim",
    "plan_step",
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


def __dir__() -> list[str]:
    """Return the names that users type, for completion and ``help``."""
    return [*__all__, "__version__"]


def _show_here(value: object) -> None:
    """Make the help of a function name this package, and no file of it."""
    if isinstance(value, types.FunctionType):
        value.__module__ = __name__


for _name in __all__:
    if _name in globals():
        _show_here(globals()[_name])
