"""The order of a step, as the hooks will see it: which units run, what backward brings, and what is computed in between.

[Note: The order without running the model]
From the module tree alone: modules run one after the other, each once, in the order in which they are registered; a module
uses the parameters registered in itself before its children run; backward is the mirror image; every parameter gets a
gradient. What runs before the first trainable parameter has no backward. So it is for sequences of layers. For anything else
give ``example_inputs``: then the order is recorded from a forward and a backward on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from torch import nn

from flatshard._composable.partition import PlannedUnit


class What(Enum):
    """What happens to a unit."""

    ENTER = auto()
    """Its forward begins; within backward: for a recomputation."""
    EXIT = auto()
    """Its forward ends. ``flag``: backward will come back to it."""
    BEGIN = auto()
    """Backward comes to it, by the forward number ``step`` of those that it will come back to."""
    GRADIENT = auto()
    """Backward has the gradient of parameter ``index`` of its flat parameter ``flat``."""
    LEAVE = auto()
    """Backward leaves it through its inputs."""
    COMPUTE = auto()
    """It computes, or what is around it does: ``flops``; autograd saves ``saved`` bytes, or frees them where negative."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happens."""

    what: What
    unit: int
    flag: bool = False
    step: int = -1
    flat: int = -1
    index: int = -1
    flops: int = 0
    saved: int = 0


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward and its backward."""

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    recorded: bool  # from a run on the meta device, not from the module tree

    @property
    def flops(self) -> int:
        return sum(e.flops for e in (*self.forward, *self.backward))


Place = tuple[int, int, int]
"""Where a parameter is: number of the unit, of the flat parameter, and in that."""


def order_of_modules(
    root: nn.Module,
    planned: Sequence[PlannedUnit],
    ignored: set[nn.Module],
    places: dict[nn.Parameter, Place],
    flops_of: Callable[[nn.Module, nn.Parameter], int],
    saved_of: Callable[[int], int],
) -> Pass:
    """[Note: The order without running the model].

    Args:
        places: where each parameter is that is sharded.
        flops_of: of a forward, for one parameter of one module; backward takes twice as many.
        saved_of: bytes that autograd saves in the forward of a unit, given by its number.
    """
    units = {unit.module: number for number, unit in enumerate(planned)}
    forward: list[Event] = []
    backward: list[Event] = []  # reversed
    steps = 0
    live = False  # something before needs a gradient
    brought: set[nn.Parameter] = set()

    def visit(module: nn.Module, unit: int, seen: tuple[nn.Module, ...]) -> None:
        nonlocal live, steps
        here = units.get(module, unit)
        inputs_live, starts = live, module in units
        if starts:
            forward.append(Event(What.ENTER, here))
            at = len(backward)
        for param in module._parameters.values():
            if param is None:
                continue
            if param in places and param.requires_grad:
                live = True
                if param not in brought:
                    brought.add(param)
                    number, flat, index = places[param]
                    backward.append(Event(What.GRADIENT, number, flat=flat, index=index))
            if flops := flops_of(module, param):
                forward.append(Event(What.COMPUTE, here, flops=flops))
                backward.append(Event(What.COMPUTE, here, flops=2 * flops))
        for child in module._modules.values():
            if child is not None and child not in ignored and child not in seen and child not in done:
                done.add(child)
                visit(child, here, (*seen, child))
        if starts:
            saved = saved_of(here) if live else 0
            if saved:
                forward.append(Event(What.COMPUTE, here, saved=saved))
            forward.append(Event(What.EXIT, here, flag=live))
            entering = []
            if saved:
                entering.append(Event(What.COMPUTE, here, saved=-saved))
            if inputs_live:
                entering.append(Event(What.LEAVE, here))
            backward[at:at] = reversed(entering)
            if live:
                backward.append(Event(What.BEGIN, here, step=steps))
                steps += 1

    done = {root}
    visit(root, 0, (root,))
    return Pass(tuple(forward), tuple(reversed(backward)), recorded=False)
