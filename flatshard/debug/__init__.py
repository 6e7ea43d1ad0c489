"""Tools for debugging: ``describe`` shows the units of a module, ``check_replicas`` compares the values of replicas."""

from flatshard.debug._describe import Description, FlatDescription, UnitDescription, describe
from flatshard.debug._replicas import check_replicas

__all__ = ["Description", "FlatDescription", "UnitDescription", "check_replicas", "describe"]
