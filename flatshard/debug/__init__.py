"""For debugging: describes the units of a module, and checks that replicas have the same values."""

from flatshard.debug._describe import Description, FlatDescription, UnitDescription, describe
from flatshard.debug._replicas import check_replicas

__all__ = ["Description", "FlatDescription", "UnitDescription", "check_replicas", "describe"]
