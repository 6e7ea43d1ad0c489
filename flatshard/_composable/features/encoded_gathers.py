"""Has all units of a model share the scales of their encoded parameters at once.

See _handle/encoded.py, [Note: Scales of encoded parameters].
"""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from flatshard._composable.extensions import Extension
from flatshard._composable.find import units_below
from flatshard._composable.state import Unit
from flatshard._handle.encoded import EncodedFlatParam, Scales
from flatshard._runtime import Runtime


class EncodedGathers(Extension):
    """Joins the units of one call, and those that earlier calls have made in its module."""

    def finish(self, module: nn.Module, made: Collection[Unit]) -> None:
        joined: dict[Runtime, Scales] = {}
        for unit in units_below(module):
            for flat in unit.handle.flats:
                if isinstance(flat, EncodedFlatParam):
                    runtime = flat.placement.runtime
                    if runtime not in joined:
                        joined[runtime] = Scales(runtime)
                    flat.share(joined[runtime])
