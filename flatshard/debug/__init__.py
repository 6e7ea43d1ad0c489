"""Tools for debugging: ``describe`` shows the units of a module, ``check_replicas`` compares the values of replicas."""

from flatshard.debug._describe import Description as Description
from flatshard.debug._describe import FlatDescription as FlatDescription
from flatshard.debug._describe import UnitDescription as UnitDescription
from flatshard.debug._describe import describe
from flatshard.debug._replicas import check_replicas

__all__ = ["check_replicas", "describe"]
