"""A flat parameter with its gradients: what a handle consists of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import nn

from flatshard._handle.flat_shard import FlatShard
from flatshard._handle.gradients import FlatGradients
from flatshard._handle.layout import FlatLayout
from flatshard._handle.planned import FlatOptions, Kind
from flatshard._handle.tensors.grad_dtype import hand_on
from flatshard._handle.unit_ranks import UnitRanks


class FlatParam(FlatShard):
    """One flat parameter."""

    encoded: ClassVar[type[FlatParam] | None] = None
    """The class of those that are gathered in ``FlatOptions.encoded_dtype``. A feature sets it; None: there are none."""

    @classmethod
    def class_for(cls, options: FlatOptions) -> type[FlatParam]:
        """The class of a flat parameter that has these options."""
        return cls if options.encoded_dtype is None or cls.encoded is None else cls.encoded

    def __init__(
        self,
        layout: FlatLayout,
        options: FlatOptions,
        params: Sequence[nn.Parameter],
        kind: Kind,
        ranks: UnitRanks,
        shard: torch.Tensor | None = None,
    ) -> None:
        """See ``FlatShard``."""
        super().__init__(layout, options, params, kind, ranks, shard)
        self.gradients = FlatGradients(self)

    def copy_with(self, params: Sequence[nn.Parameter], ranks: UnitRanks) -> FlatParam:
        """See ``FlatShard``."""
        result = super().copy_with(params, ranks)
        result.gradients.reduce_by(self.gradients.choose_runtime)
        if (shard_param := self.gradients.shard_param) is not None:
            hand_on(shard_param, result.gradients.use_shard_param(shard_param._flatshard_info))
        return result

    def rename(self, fqns: Mapping[int, str]) -> None:
        """See ``FlatShard``."""
        super().rename(fqns)
        self.gradients.follow_names()

    def readopt(self, indices: Sequence[int]) -> None:
        """See ``FlatShard``."""
        super().readopt(indices)
        self.gradients.follow_names()  # `module.to()` has converted gradients in place, also those that are made once

    def move(self, layout: FlatLayout, ranks: UnitRanks, shard: torch.Tensor) -> None:
        """See ``FlatShard``."""
        super().move(layout, ranks, shard)
        self.gradients.follow_ranks()

    def convert(self, dtype: torch.dtype, device: torch.device) -> None:
        """See ``FlatShard``. Gradients that are held follow."""
        super().convert(dtype, device)
        self.gradients.follow_parameters()
