"""The blocks that a model repeats, for ``policy="auto"``.

[Note: Which modules are blocks]
Blocks are modules of one class that stand in a row: in a list, a ``Sequential`` or a ``ModuleDict``, or under numbered names
(``layer1``, ``layer2``). Containers themselves are no blocks. If two members of a class have parameters of the same shapes,
the members are blocks, whatever is repeated inside them (experts in a layer). If no two do, they are stages, and the blocks
are inside them, if these hold most of the stages' parameters. So of rows inside rows the outermost that repeats itself is
used. A module that is small beside the largest block (a head of a few linear layers) stays with the rest of the model.

A large module between or beside the blocks, which no other is like, is a block, too: the middle of a U-Net. Otherwise it
would stay unsharded through the whole step, with the rest of the model. It is called, and none of its layers has more than
two thirds of its elements. An embedding or a head stays with the rest: other modules may use its weight. Tied parameters do
not count.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import torch
from torch import nn

from flatshard._handle.tensors.sharded_parameter import shard_info

SMALL = 16
"""Blocks with fewer elements than the largest one has, divided by this, stay with the rest of the model."""

SINGLE = 4
"""The same for a module that no other is like: one more unit has to be worth its collectives."""

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def repeated_blocks(root: nn.Module, ignored: set[nn.Module]) -> list[nn.Module]:
    """Return the blocks in ``root``, in module order; none if nothing is repeated. [Note: Which modules are blocks]"""
    blocks = _blocks_alike(root, ignored)
    single = _large_beside(root, blocks, ignored)
    return [module for module in root.modules() if module in {*blocks, *single}] if single else blocks


def _blocks_alike(root: nn.Module, ignored: set[nn.Module]) -> list[nn.Module]:
    """Return the blocks that are like others."""
    found = _Blocks(root, ignored).inside(root)
    largest = max(map(_numel, found), default=0)
    found = [block for block in found if SMALL * _numel(block) >= largest]
    deep = [block for block in found if any(True for _ in block.children())]
    if 2 * sum(map(_numel, deep)) > sum(map(_numel, found)):
        return deep  # single layers beside them are no blocks
    return found if len(found) > 1 else []


class _Blocks:
    def __init__(self, root: nn.Module, ignored: set[nn.Module]) -> None:
        self.ignored = ignored
        rows: defaultdict[type[nn.Module], dict[nn.Module, None]] = defaultdict(dict)  # in module order
        for holder in root.modules():
            if holder not in ignored:
                for child in _in_a_row(holder):
                    rows[type(child)][child] = None
        self.members = {kind: list(members) for kind, members in rows.items() if len(members) > 1}
        self.alike = {kind for kind, members in self.members.items() if _has_twins(members)}

    def inside(self, module: nn.Module) -> list[nn.Module]:
        """Return the blocks in ``module``, which is no block itself."""
        found: dict[nn.Module, None] = {}
        for child in module.children():
            if child not in self.ignored:
                found |= dict.fromkeys([child] if self._is_block(child) else self.inside(child))
        return list(found)

    def _is_block(self, module: nn.Module) -> bool:
        kind = type(module)
        if module not in self.members.get(kind, ()) or not _numel(module):
            return False
        return kind in self.alike or 2 * sum(map(_numel, self.inside(module))) <= _numel(module)


def _in_a_row(holder: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of ``holder`` that may be blocks."""
    for name, child in holder.named_children():
        is_numbered = any(map(str.isdigit, name)) and any(True for _ in child.children())
        if (isinstance(holder, _CONTAINERS) or is_numbered) and _is_called(child):
            yield child


def _is_called(module: nn.Module) -> bool:
    return type(module) not in _CONTAINERS and type(module).forward is not nn.Module.forward


def _large_beside(root: nn.Module, blocks: list[nn.Module], ignored: set[nn.Module]) -> list[nn.Module]:
    """Return the large modules beside ``blocks``, in which there are none of them."""
    inside = {module for block in blocks for module in block.modules()}
    users = _users(root)
    least = max(map(_numel, blocks), default=0) / SINGLE
    found: dict[nn.Module, None] = {}

    def visit(holder: nn.Module) -> None:
        for child in holder.children():
            if child in inside or child in ignored or child in found:
                continue
            if not _is_called(child) or not inside.isdisjoint(child.modules()):
                visit(child)
                continue
            own = {p for p, count in _users(child).items() if count == users[p] and shard_info(p) is None}
            sizes = [sum(p.numel() for p in module.parameters(recurse=False) if p in own) for module in child.modules()]
            if sum(sizes) >= max(least, 1.5 * max(sizes)) and not isinstance(child, torch.jit.ScriptModule):
                found[child] = None

    if blocks:
        visit(root)
    return list(found)


def _users(root: nn.Module) -> Counter[nn.Parameter]:
    """Return how many modules in ``root`` have each parameter as their own."""
    return Counter(p for module in root.modules() for p in set(module.parameters(recurse=False)))


def _has_twins(modules: list[nn.Module]) -> bool:
    shapes = Counter(tuple((name, p.shape) for name, p in module.named_parameters()) for module in modules)
    return any(count > 1 for shape, count in shapes.items() if shape)


def _numel(module: nn.Module) -> int:
    """Return the number of elements of parameters that are in no unit yet."""
    return sum(p.numel() for p in module.parameters() if shard_info(p) is None)
