"""For optimizers and training loops on sharded parameters: norms, clipping, statistics, optimizers of whole matrices."""

from flatshard._composable.features.user_hooks import register_gradients_reduced_hook
from flatshard.optim._flat_parameters import flat_parameters
from flatshard.optim._gradients import GradientStatistics as GradientStatistics
from flatshard.optim._gradients import clip_grad_norm_, get_total_norm, gradient_statistics
from flatshard.optim._hooks import check_whole_parameters, steps_parts
from flatshard.optim._in_backward import BackwardSteps as BackwardSteps
from flatshard.optim._in_backward import step_in_backward
from flatshard.optim._offload import OffloadedOptimizer
from flatshard.optim._segments import segment_reduce
from flatshard.optim._switch import Offloaded as Offloaded
from flatshard.optim._switch import offload
from flatshard.optim._whole import WholeParameterOptimizer

__all__ = [
    "OffloadedOptimizer",
    "WholeParameterOptimizer",
    "check_whole_parameters",
    "clip_grad_norm_",
    "flat_parameters",
    "get_total_norm",
    "gradient_statistics",
    "offload",
    "register_gradients_reduced_hook",
    "segment_reduce",
    "step_in_backward",
    "steps_parts",
]
