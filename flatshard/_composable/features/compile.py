"""``torch.compile`` beside us: it must compile what users wrote, and call what we wrote.

Dynamo would trace into our hooks, where there is nothing to compile, and much that it cannot follow: process groups, storages
that come and go, autograd's engine. Told to skip the package, it breaks its graph at a unit's hooks and calls them as they
are. No call of ours is wrapped for that, so nobody pays who compiles nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Collection

from torch import nn

from flatshard._composable.extensions import Extension
from flatshard._composable.state import UnitConfig
from flatshard._runtime import Runtime


class Compile(Extension):
    """Has dynamo skip this package."""

    def prepare(self, module: nn.Module, configs: Collection[UnitConfig], runtime: Runtime) -> None:
        _skip()


@functools.cache
def _skip() -> None:
    # An import of two seconds, which any optimizer does as well.
    from torch._dynamo import trace_rules  # there is no public way to skip a package

    trace_rules.add("flatshard")
