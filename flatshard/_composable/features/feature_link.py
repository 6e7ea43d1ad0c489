"""How hooks on modules inside a unit refer to a feature of the unit, also where these are copied."""

from __future__ import annotations

import copy
import weakref
from typing import Any, Generic, TypeVar

from flatshard._composable.extensions import ForwardFeature

F = TypeVar("F", bound=ForwardFeature)


class FeatureLink(Generic[F]):
    """A reference to a unit's feature, for hooks on modules inside the unit, which are copied with their modules.

    A copy of the link refers to no feature until the unit has been copied, which must begin with the unit's module. If an
    inner module is copied alone, its link never refers to one.
    """

    def __init__(self, feature: F | None) -> None:
        self._ref = None if feature is None else weakref.ref(feature)

    @property
    def feature(self) -> F | None:
        return None if self._ref is None else self._ref()

    def __deepcopy__(self, memo: dict[int, Any]) -> FeatureLink[F]:
        return FeatureLink(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return FeatureLink, (self.feature,)  # pickling the feature's unit raises an error that says what to do

    def give_to_copy(self, feature: F, memo: dict[int, Any]) -> FeatureLink[F]:
        """Make the copy of this link in ``memo`` refer to ``feature``, and return it."""
        result = copy.deepcopy(self, memo)
        result._ref = weakref.ref(feature)
        return result
