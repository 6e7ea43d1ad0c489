"""Makes ``torch.compile`` compile the user's modules, but not flatshard.

Dynamo would trace into flatshard's hooks. There is nothing to compile in them, and much that it cannot trace: process groups,
storages that are resized, autograd's engine. So it is told to skip the package. It then breaks its graph at a unit's hooks
and calls them. It must not compile what they call either, such as collectives that the user implements, so it is told not to
look below the hooks. This needs no wrapper around the hooks, so it costs nothing without ``torch.compile``.
"""

from __future__ import annotations

import functools
from collections.abc import Collection

from torch import nn

from flatshard._composable.extensions import Extension
from flatshard._composable.hooks import UnitHooks
from flatshard._composable.unit_config import UnitConfig
from flatshard._runtime import Runtime

_REASON = (
    "flatshard gathers a unit around its forward, which no graph can contain. With fullgraph=True compile units one by "
    "one: `for block in model.blocks: block.compile(fullgraph=True)`. Or omit fullgraph: graphs then end at units"
)


class Compile(Extension):
    """Makes dynamo skip this package."""

    def prepare(self, module: nn.Module, configs: Collection[UnitConfig], runtime: Runtime) -> None:
        _skip()


@functools.cache
def _skip() -> None:
    # This import takes two seconds, but any optimizer does it as well.
    from torch._dynamo import trace_rules  # there is no public way to skip a package

    trace_rules.add("flatshard")

    # Private too: the public torch.compiler.disable wraps the function, which costs time in every call.
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    for hook in (UnitHooks.pre_forward, UnitHooks.post_forward):
        # As torch.compiler.disable(reason=...) has them: what dynamo says with fullgraph=True.
        vars(hook)["_torchdynamo_disable"] = True
        vars(hook)["_torchdynamo_disable_msg"] = _REASON
        set_code_exec_strategy(hook.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
