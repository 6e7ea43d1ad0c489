"""For optimizers and training loops on sharded parameters: norms, clipping, statistics, optimizers of whole matrices."""

from typing import TYPE_CHECKING

from flatshard._base import old_names
from flatshard._composable.features.user_hooks import register_gradients_reduced_hook
from flatshard.optim._flat_parameters import flat_parameters
from flatshard.optim._gradients import GradientStatistics as GradientStatistics
from flatshard.optim._gradients import clip_grad_norm_, get_total_norm, gradient_statistics
from flatshard.optim._in_backward import StepInBackwardHandle as StepInBackwardHandle
from flatshard.optim._in_backward import step_in_backward
from flatshard.optim._offload import OffloadedOptimizer
from flatshard.optim._segments import segment_reduce
from flatshard.optim._suitability import check_whole_parameters, works_on_shards
from flatshard.optim._switch import OffloadHandle as OffloadHandle
from flatshard.optim._switch import offload_training_state
from flatshard.optim._whole import WholeParameterOptimizer

if not TYPE_CHECKING:
    __getattr__ = old_names.attributes(
        __name__,
        old={
            "BackwardSteps": "StepInBackwardHandle",
            "Offloaded": "OffloadHandle",
            "offload": "offload_training_state",
            "steps_parts": "works_on_shards",
        },
    )

__all__ = [
    "OffloadedOptimizer",
    "WholeParameterOptimizer",
    "check_whole_parameters",
    "clip_grad_norm_",
    "flat_parameters",
    "get_total_norm",
    "gradient_statistics",
    "offload_training_state",
    "register_gradients_reduced_hook",
    "segment_reduce",
    "step_in_backward",
    "works_on_shards",
]
