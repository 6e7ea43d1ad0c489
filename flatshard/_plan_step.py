"""One step, walked through as hooks.py, backward.py and context.py do it: memory, collectives, and what waits for what.

[Note: The walk is the rules again]
This is the one thing that says twice what the package does: when a unit is gathered, freed and reduced. The
hooks ask tensors and autograd, of which there are none here, so they cannot run on a plan. That both say the same is
tested: each collective and each byte of a planned step equals those counted in a real one, for all strategies, dtypes,
prefetches and layouts (``test_plan.py``). Whoever changes a rule there is told by that test.

What is walked is a step as all are from the second on: the order of units is known, so forward prefetches; gradients were
dropped before forward; the optimizer has its state.
"""

from __future__ import annotations

from collections.abc import Sequence

from flatshard._config import BackwardPrefetch
from flatshard._handle.arrivals import finish_at
from flatshard._handle.gradients import waits_for_all
from flatshard._plan_actions import Action, Verb, WalkedStep
from flatshard._plan_cost import FlatCost, UnitCost
from flatshard._plan_ledger import Memory
from flatshard._plan_order import Event, Pass, What
from flatshard._plan_state import Books, StepRecord


class Walk(Books):
    """Walks through one step. Use ``walk_step``."""

    def __init__(
        self, units: Sequence[UnitCost], one_pass: Pass, start: Memory, host: Memory, waits_early: bool
    ) -> None:
        super().__init__(units, start, host)
        self.one_pass = one_pass
        self.waits_early = waits_early
        self.order = [e.unit for e in one_pass.forward if e.what is What.ENTER]
        brought = {(e.unit, e.flat, e.index) for e in one_pass.backward if e.what is What.GRADIENT}
        self.partial: set[int] = set()  # units with parameters that get no gradient
        for number, unit in enumerate(units):
            flats = [(f, c) for f, c in enumerate(unit.flats) if c.description.trainable]
            wanted = {(number, f, i) for f, flat in flats for i in range(len(flat.numels))}
            self.states[number].expected = len(wanted & brought)
            if wanted - brought:
                self.partial.add(number)
        self.forwards: list[int] = []
        self.open: dict[int, None] = {}
        self.ready: set[int] = set()
        self.reducing: int | None = None
        self.prefetched: dict[int, None] = {}
        self.steps: list[StepRecord] = []
        self.last_step = -1
        self.at = 0  # in `order`
        self.sync = True

    # -- the passes ----------------------------------------------------------------------------------------------------

    def run_pass(self, sync: bool) -> None:
        """A forward and its backward. ``sync``: not under ``no_sync``."""
        self.sync = sync
        self.steps, self.last_step, self.at = [], -1, 0
        self._issue(Action(Verb.START, 0, "forward"))
        for phase, events in (("forward", self.one_pass.forward), ("backward", self.one_pass.backward)):
            self.phase = phase
            for state in self.states:
                state.finished = state.open_task = False
            for event in events:
                self._happen(event)
            if phase == "backward":
                self._end_backward()

    def _happen(self, event: Event) -> None:
        self._turn_to(event.unit)
        match event.what:
            case What.ENTER:
                self._enter(event.unit)
            case What.EXIT:
                self._exit(event)
            case What.BEGIN:
                self._begin_backward(event)
            case What.GRADIENT:
                self._receive(event.unit, event.flat, event.index)
            case What.LEAVE:
                self._leave(event.unit)
            case What.COMPUTE:
                self._issue(Action(Verb.COMPUTE, event.unit, self.phase, event.flops))
                self.device.add("activations", event.saved)

    # -- forward: UnitHooks.pre_forward, post_forward ------------------------------------------------------------------

    def _enter(self, unit: int) -> None:
        self.forwards.append(unit)
        needs = self.units[unit].needs
        for needed in needs:
            self.states[needed].holds += 1
        for needed in needs:
            self.prefetched.pop(needed, None)
            self._unshard(needed, again=self.phase == "backward")
            self._wait(needed)
            if self.phase == "forward" and self.units[needed].any_trainable:
                self.open.setdefault(needed)
        if self.phase == "forward":
            self.at += 1
            config = self.units[unit].config
            if config.forward_prefetch and self.at < len(self.order):
                self._prefetch(self.order[self.at], config.prefetch_limit_bytes)

    def _exit(self, event: Event) -> None:
        unit, in_backward = event.unit, self.phase == "backward"
        assert self.forwards.pop() == unit
        outermost = not self.forwards
        if event.flag:
            self.steps.append(StepRecord(unit, -1 if in_backward else self.last_step, list(self.forwards)))
            if not in_backward:
                self.last_step = len(self.steps) - 1
        for needed in self.units[unit].needs:
            state = self.states[needed]
            state.holds -= 1
            stays = event.flag and self.units[needed].stays_for_backward(outermost)
            if state.holds == 0 and not (stays or in_backward):
                if event.flag and self.units[needed].inner is not None:
                    self._keep_inner(needed)
                self._reshard(needed)
                if not event.flag:
                    self._forget_cast(needed)
        if outermost and not in_backward:
            prefetched, self.prefetched = self.prefetched, {}
            for ahead in prefetched:
                if self.states[ahead].holds == 0:
                    self._reshard(ahead)
            self.last_step = -1

    # -- gathering: Context.prefetch, FlatParamHandle.unshard, FlatBuffers.gather ---------------------------------------

    def _prefetch(self, unit: int, limit: int | None) -> None:
        needs = self.units[unit].needs
        if limit is not None:
            ahead = {u for u in self.prefetched if not self.states[u].sharded}
            ahead.update(n for n in needs if self.states[n].sharded)
            if sum(self.units[u].unsharded_nbytes for u in ahead) > limit:
                return
        for needed in needs:
            if self.states[needed].sharded:
                self._unshard(needed, again=self.phase == "backward")
                self.prefetched[needed] = None

    def _unshard(self, number: int, again: bool) -> None:
        unit, state = self.units[number], self.states[number]
        if not state.sharded:
            return
        state.sharded = False
        inner = state.inner
        state.inner = False
        from_inner = inner and again
        for flat in unit.flats:
            if not flat.is_gathered:
                continue
            kept = flat.unsharded_nbytes // unit.inner if inner and unit.inner else 0
            if not from_inner:
                self.device.add("unsharded", -kept)
                self._place_shard(flat, keeps=not (state.cast and again))
            self.device.add("unsharded", flat.unsharded_nbytes)
            if from_inner:
                self.device.add("unsharded", -kept)
                self._collect("all-gather", number, flat.unsharded_nbytes, unit.inner or 1, "inner", state.gathers)
                continue
            if flat.offloaded and not flat.cast_nbytes:
                self.device.add("unsharded", -flat.shard_nbytes)
            if flat.shards > 1:
                self._collect("all-gather", number, flat.unsharded_nbytes, flat.shards, "shards", state.gathers)
        if not from_inner:
            state.cast = any(f.cast_nbytes for f in unit.flats)

    def _place_shard(self, flat: FlatCost, keeps: bool) -> None:
        """What there is besides the unsharded buffer when a shard is put into it."""
        travels = flat.shard_nbytes if flat.offloaded else 0
        if flat.cast_nbytes:
            if keeps:
                self.device.add("unsharded", travels)
                self.device.add("unsharded", flat.cast_nbytes)
                self.device.add("unsharded", -travels)
        else:
            self.device.add("unsharded", travels)

    def _wait(self, number: int) -> None:
        gathers, self.states[number].gathers = self.states[number].gathers, []
        for collective in gathers:
            self._issue(Action(Verb.WAIT, number, self.phase, after=collective))

    def _reshard(self, number: int) -> None:
        state = self.states[number]
        if state.sharded:
            return
        self._wait(number)
        state.sharded = True
        if not self.units[number].is_alias:
            self._issue(Action(Verb.FREE, number, self.phase))
            for flat in self.units[number].flats:
                self.device.add("unsharded", -flat.unsharded_nbytes)

    def _keep_inner(self, number: int) -> None:
        state, size = self.states[number], self.units[number].inner or 1
        if state.sharded:
            return
        for flat in self.units[number].flats:
            if not state.inner:
                self.device.add("unsharded", flat.unsharded_nbytes // size)
        state.inner = True

    # -- backward: UnitHooks.pre_backward, Backward --------------------------------------------------------------------

    def _begin_backward(self, event: Event) -> None:
        unit, step = event.unit, self.steps[event.step]
        state = self.states[unit]
        if not state.finished:
            self._begin(unit)
        self._come_to(unit, step)
        state.active_steps += 1
        state.has_left = False
        state.last_step = event.step
        for outer in step.outer:
            if self.states[outer].sharded and not self.states[outer].finished:
                for needed in self.units[outer].needs:
                    self._unshard(needed, again=True)
        for needed in self.units[unit].needs:
            self.prefetched.pop(needed, None)
            if needed != unit and not self.states[needed].finished:
                self._begin(needed)
            self._unshard(needed, again=True)
            self._wait(needed)
        if self.units[unit].config.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
            self._prefetch_before(event.step)

    def _begin(self, number: int) -> None:
        state = self.states[number]
        if not state.open_task:
            state.open_task = True
            state.pending = 0 if state.finished else state.expected
            state.finish_at = finish_at(state.pending, self.waits_early)
            if number not in self.open:
                self.open = {number: None, **self.open}

    def _come_to(self, unit: int, step: StepRecord) -> None:
        for number in [n for n in reversed(self.open) if n != unit and n not in step.outer]:
            state = self.states[number]
            if state.open_task and not state.expected:
                self._complete(number)

    def _prefetch_before(self, step: int) -> None:
        previous = self.steps[step].previous
        if previous >= 0 and not self.states[self.steps[previous].unit].finished:
            limit = self.units[self.steps[step].unit].config.prefetch_limit_bytes
            self._prefetch(self.steps[previous].unit, limit)

    def _receive(self, number: int, flat_index: int, index: int) -> None:
        unit, state = self.units[number], self.states[number]
        self._begin(number)
        flat = unit.flats[flat_index]
        ledger, arriving = self._gradient_ledger(flat), flat.arriving_nbytes(index)
        self.device.add("arriving", arriving)
        if not flat.is_reduced:
            new = (flat_index, index) not in state.local_grads
            nbytes = flat.local_gradient_nbytes(index)
            cast = flat.description.compute_dtype is not flat.description.grad_dtype or flat.offloaded
            if cast:
                ledger.add("gradients", nbytes)
                self.device.add("arriving", -arriving)
                if not new:
                    ledger.add("gradients", -nbytes)
            elif new:
                self.device.move("arriving", "gradients", arriving)
            else:
                self.device.add("arriving", -arriving)
            state.local_grads.add((flat_index, index))
        else:
            if not state.filled[flat_index]:
                state.filled[flat_index] = True
                state.batching[flat_index] = waits_for_all(flat.shards == 1, flat.input_nbytes)
                self.device.add("reductions", 0 if state.batching[flat_index] else flat.input_nbytes)
            if state.batching[flat_index]:
                state.waiting[flat_index] += arriving
            else:
                self.device.add("arriving", -arriving)
        state.pending -= 1
        if 0 < state.pending < state.finish_at:
            state.finish_at = 1
            self._finish_previous()
        elif not state.pending:
            done = self._is_done(number) or state.has_left
            if done:
                self._free_in_backward(number)
            self._complete(number)
            if done:
                self._prefetch_after(number)

    def _place_batch(self, number: int, index: int) -> None:
        """Of one flat parameter: ``FlatGradients._place_batch``."""
        state = self.states[number]
        self.device.add("reductions", self.units[number].flats[index].input_nbytes)
        self.device.add("arriving", -state.waiting[index])
        state.waiting[index], state.batching[index] = 0, False

    def _is_done(self, number: int) -> bool:
        return self.units[number].all_trainable and number not in self.partial

    def _leave(self, number: int) -> None:
        if self._is_done(number) or self.units[number].is_alias:
            return
        state = self.states[number]
        state.active_steps = max(0, state.active_steps - 1)
        state.has_left = state.active_steps == 0
        if state.has_left and not state.pending:
            self._free_in_backward(number)
            self._prefetch_after(number)

    def _free_in_backward(self, number: int) -> None:
        if self.states[number].holds == 0:
            self._reshard(number)

    def _prefetch_after(self, number: int) -> None:
        state, config = self.states[number], self.units[number].config
        if config.backward_prefetch is BackwardPrefetch.BACKWARD_POST and state.last_step >= 0:
            self._prefetch_before(state.last_step)

    # -- reducing ------------------------------------------------------------------------------------------------------

    def _complete(self, number: int) -> None:
        state = self.states[number]
        state.finished, state.open_task = True, False
        if not state.expected and not self.units[number].any_trainable:
            self.open.pop(number, None)
        elif self.sync:
            self.ready.add(number)
            self._reduce_ready()
        else:
            for index, batching in enumerate(state.batching):
                if batching:
                    self._place_batch(number, index)
            state.held = True

    def _reduce_ready(self, all_of_them: bool = False) -> None:
        allowed: list[int] = []
        for number in reversed(self.open):
            if number in self.ready:
                allowed.append(number)
            elif not all_of_them and (self.states[number].open_task or self.states[number].expected):
                break
            if len(allowed) == len(self.ready):
                break
        for number in allowed:
            self.ready.remove(number)
            del self.open[number]
            self._reduce(number)

    def _reduce(self, number: int) -> None:
        self._finish_reductions()
        unit, state = self.units[number], self.states[number]
        for index, flat in enumerate(unit.flats):
            if flat.is_reduced:
                if state.batching[index] or not state.filled[index]:
                    self._place_batch(number, index)
                state.filled[index] = True
                self._start_reduction(number, index)
        self._forget_cast(number)
        state.held = False
        self.reducing = number

    def _finish_reductions(self) -> None:
        number, self.reducing = self.reducing, None
        if number is not None:
            self._finish(number)

    def _finish_previous(self) -> None:
        """``Backward.finish_previous``."""
        if self.reducing is not None and not any(f.replicas > 1 for f in self.units[self.reducing].flats):
            self._finish_reductions()

    def _start_reduction(self, number: int, index: int) -> None:
        flat, state = self.units[number].flats[index], self.states[number]
        self.device.add("reductions", flat.output_nbytes)
        own: list[int] = []
        if flat.shards > 1:
            self._collect("reduce-scatter", number, flat.input_nbytes, flat.shards, "shards", own)
        if flat.replicas > 1:
            nbytes = flat.output_nbytes or flat.input_nbytes
            self._collect("all-reduce", number, nbytes, flat.replicas, "replicas", own)
        state.reductions += own[-1:]
        if flat.offloaded:
            cast = flat.gradient_nbytes if flat.is_cast_for_grad else 0
            self.host.add("gradients", flat.gradient_nbytes)
            self.device.add("reductions", cast)
            self.device.add("reductions", -cast - flat.output_nbytes)

    def _finish(self, number: int) -> None:
        """``FlatParamHandle.finish_reduce``: reductions become gradients."""
        unit, state = self.units[number], self.states[number]
        for collective in state.reductions:
            self._issue(Action(Verb.WAIT, number, self.phase, after=collective))
        state.reductions = []
        for index, flat in enumerate(unit.flats):
            if not flat.is_reduced or not state.filled[index]:
                continue
            state.filled[index] = False
            output = flat.output_nbytes or flat.input_nbytes  # an all-reduce's input is its output
            if flat.offloaded:
                self.device.add("reductions", -flat.input_nbytes)
            else:
                if flat.is_cast_for_grad:
                    self.device.add("gradients", flat.gradient_nbytes)
                    self.device.add("reductions", -output)
                else:
                    self.device.move("reductions", "gradients", output)
                self.device.add("reductions", -flat.input_nbytes if flat.output_nbytes else 0)
            if state.has_grad[index]:  # added to what is there
                self._gradient_ledger(flat).add("gradients", -flat.gradient_nbytes)
            state.has_grad[index] = True

    def _end_backward(self) -> None:
        """``Backward._finish``."""
        for number in [n for n in reversed(self.open) if self.states[n].open_task]:
            self._complete(number)
        self._reduce_ready(all_of_them=True)
        self._finish_reductions()
        for number, state in enumerate(self.states):
            state.active_steps, state.has_left, state.last_step = 0, False, -1
            if state.holds == 0:
                self._reshard(number)
        if self.sync:
            self.open.clear()


def walk_step(
    units: Sequence[UnitCost],
    one_pass: Pass,
    start: Memory,
    host: Memory,
    microbatches: int,
    no_sync: bool,
    waits_early: bool,
) -> WalkedStep:
    """Walk through ``microbatches`` passes, from what is held between steps (``start`` on the device, ``host`` off it).

    ``no_sync``: all but the last run under it; else each reduces, and adds to ``.grad``. ``waits_early``: see ``Backward``.
    """
    walk = Walk(units, one_pass, start, host, waits_early)
    for number in range(microbatches):
        walk.run_pass(sync=number == microbatches - 1 or not no_sync)
    for ledger in (walk.device, walk.host):
        ledger.phase, ledger.unit = "optimizer", ""
        ledger.settle()
    return WalkedStep(tuple(walk.actions), tuple(walk.collectives), walk.device, walk.host)
