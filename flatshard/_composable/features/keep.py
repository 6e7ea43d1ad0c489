"""``keep_unsharded``: units are gathered once, and stay unsharded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from flatshard._composable.claims import Claim
from flatshard._composable.features.unrecorded import Threads
from flatshard._composable.find import settle, units_of
from flatshard._composable.state import Unit
from flatshard._handle.slots import SHARDED


@contextlib.contextmanager
def keep_unsharded(module: nn.Module, recurse: bool = True, threads: bool = False) -> Iterator[None]:
    """Inside, each unit is gathered at its first use and stays unsharded: for generation and evaluation.

    Further forwards inside do not communicate. If parameters change (by an optimizer's step or ``p.data = ...``), the next
    forward gathers them again. ``module.parameters()`` still returns the sharded parameters. The memory is that of the
    whole parameters in the compute dtype. On exit the units are freed; a unit that is in a forward then is freed at its end.
    All ranks must enter together. The context can be nested.

    A forward raises while one runs on another thread, unless ``threads`` is True. A server with many threads, or with
    ``asyncio``, either passes it, or gives the model to one thread, ``ThreadPoolExecutor(max_workers=1)``.

    With ``threads=True`` nothing is communicated between entry and exit, so ranks may answer different requests, in any
    order. The units are gathered at entry, and ``module.parameters()`` are whole, in the compute dtype. All forwards run
    without gradients: each thread enters ``torch.no_grad()`` for itself. If parameters change, the next forward raises: leave
    the context, and enter it again. On exit, forwards on other threads are waited for.

    Example::

        with torch.no_grad(), flatshard.keep_unsharded(model):
            for x in batch:  # from here on ranks may differ in how often they call the model
                y = model(x)

    Example::

        from concurrent.futures import ThreadPoolExecutor

        @torch.no_grad()
        def answer(request):
            return model(request)

        with flatshard.keep_unsharded(model, threads=True), ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(answer, batch))

    Args:
        module: a unit, or another module with sharded parameters: the units that own them are kept.
        recurse: also the units below ``module``.
        threads: any number of threads may run forwards at the same time.

    Raises:
        ValueError: nothing in ``module`` is sharded; or ``threads`` with an option of ``fully_shard`` that rules it out.
        RuntimeError: ``threads`` inside a forward or ``summon_full_params``.
    """
    units = units_of(module, "keep_unsharded", recurse)
    settle(units)
    if threads:
        together = Threads(units)
        try:
            yield
        finally:
            together.leave()
        return
    kept = [(unit, Keep(unit)) for unit in units]
    try:
        yield
    finally:
        for unit, claim in kept:
            unit.claims.remove(claim)
            if not unit.claims.keep:
                unit.free_if_unused()


class Keep(Claim):
    """One unit in one ``keep_unsharded``. Its storage stays allocated, but the values in it may be outdated."""

    uses = False
    pins = False

    def __init__(self, unit: Unit) -> None:
        # Copies that forwards in full precision use (`full_precision_in_eval`), with the `handle.version()` they are of.
        self.full_precision: tuple[int, dict[int, nn.Parameter]] | None = None
        gathered, context = unit.handle.gathered, unit.context
        if gathered is not None and not unit.claims:
            in_this_pass = gathered.by == context.pass_id and context.is_running
            if not (in_this_pass or unit.is_unsharded_by_user):  # left by an earlier forward, and perhaps outdated
                unit.handle.slots.show(SHARDED)
                unit.handle.reshard()
        unit.claims.insert(0, self)
