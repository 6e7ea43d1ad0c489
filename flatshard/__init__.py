"""flatshard: sharded data parallelism for PyTorch in one line.

>>> flatshard.fully_shard(model, policy={Block})

Same object, same class, same names; each parameter a slice of a flat shard. See README.md.
"""

from flatshard._ablation import NoCommunication
from flatshard._backends import DefaultCollectives, GlooCollectives, builtin_collectives
from flatshard._checkpoint import load_checkpoint, save_checkpoint
from flatshard._checks import check_replicas
from flatshard._collectives import Collectives, Pending
from flatshard._comm_hooks import (
    CommHookHandle,
    CommHookState,
    bf16_compress_hook,
    fp16_compress_hook,
    register_comm_hook,
)
from flatshard._composable.fully_shard import fully_shard
from flatshard._composable.optimizer_hooks import check_whole_parameters
from flatshard._composable.policy import (
    CustomPolicy,
    ModuleWrapPolicy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from flatshard._config import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from flatshard._controls import (
    keep_unsharded,
    register_forward_method,
    register_gradients_reduced_hook,
    set_modules_to_backward_prefetch,
    set_modules_to_forward_prefetch,
    set_reshard_after_forward,
)
from flatshard._errors import CollectiveError, InternalError, OutOfStepError
from flatshard._full_params import UnshardHandle, recover, reshard, summon_full_params, unshard
from flatshard._grad_norm import clip_grad_norm_, get_total_norm
from flatshard._grad_statistics import GradientStatistics, gradient_statistics
from flatshard._grad_sync import (
    no_sync,
    reduce_gradients,
    set_gradient_divide_factor,
    set_requires_all_reduce,
    set_requires_gradient_sync,
)
from flatshard._handle.sharded_gradient import ShardedGradient
from flatshard._handle.sharded_parameter import ShardedParameter, ShardInfo, full_shape, shard_info
from flatshard._handle.sharded_value import ShardedValue
from flatshard._inspect import Description, FlatDescription, UnitDescription, describe, flat_parameters
from flatshard._layouts import Blocks, Elements, Layout, Rows, Whole
from flatshard._meeting import MeetingError
from flatshard._optim_names import rekey
from flatshard._optim_state_dict import optim_state_dict
from flatshard._optim_state_load import load_optim_state_dict, optim_state_dict_to_load
from flatshard._plan import Plan, plan
from flatshard._plan_actions import Collective
from flatshard._plan_data import StrategyPlan, UnitPlan
from flatshard._plan_ledger import Memory, Peak
from flatshard._plan_time import Bandwidths, Timeline
from flatshard._quantized import QuantizedCollectives
from flatshard._segments import segment_reduce
from flatshard._skip import skip
from flatshard._state_dict import full_state_dict, iter_full_params, load_local_state_dict, local_state_dict
from flatshard._whole_optimizer import WholeParameterOptimizer

__all__ = [
    "BackwardPrefetch",
    "Bandwidths",
    "Blocks",
    "CPUOffload",
    "Collective",
    "CollectiveError",
    "Collectives",
    "CommHookHandle",
    "CommHookState",
    "CustomPolicy",
    "DefaultCollectives",
    "Description",
    "Elements",
    "FlatDescription",
    "GlooCollectives",
    "GradientStatistics",
    "InternalError",
    "Layout",
    "MeetingError",
    "Memory",
    "MixedPrecision",
    "ModuleWrapPolicy",
    "NoCommunication",
    "OutOfStepError",
    "Peak",
    "Pending",
    "Plan",
    "QuantizedCollectives",
    "Rows",
    "ShardInfo",
    "ShardedGradient",
    "ShardedParameter",
    "ShardedValue",
    "ShardingStrategy",
    "StrategyPlan",
    "Timeline",
    "UnitDescription",
    "UnitPlan",
    "UnshardHandle",
    "Whole",
    "WholeParameterOptimizer",
    "bf16_compress_hook",
    "builtin_collectives",
    "check_replicas",
    "check_whole_parameters",
    "clip_grad_norm_",
    "describe",
    "flat_parameters",
    "fp16_compress_hook",
    "full_shape",
    "full_state_dict",
    "fully_shard",
    "get_total_norm",
    "gradient_statistics",
    "iter_full_params",
    "keep_unsharded",
    "lambda_auto_wrap_policy",
    "load_checkpoint",
    "load_local_state_dict",
    "load_optim_state_dict",
    "local_state_dict",
    "no_sync",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "plan",
    "recover",
    "reduce_gradients",
    "register_comm_hook",
    "register_forward_method",
    "register_gradients_reduced_hook",
    "rekey",
    "reshard",
    "save_checkpoint",
    "segment_reduce",
    "set_gradient_divide_factor",
    "set_modules_to_backward_prefetch",
    "set_modules_to_forward_prefetch",
    "set_requires_all_reduce",
    "set_requires_gradient_sync",
    "set_reshard_after_forward",
    "shard_info",
    "size_based_auto_wrap_policy",
    "skip",
    "summon_full_params",
    "transformer_auto_wrap_policy",
    "unshard",
]
