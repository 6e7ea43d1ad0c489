"""The order of a step, recorded: a copy of the module runs forward and backward on the meta device.

The copy's parameters have the dtypes that units compute in, and its inputs and outputs are cast as the hooks cast them. The
hooks here are those of the copy, which nobody else sees; they only write down what happens.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from flatshard._composable.backward import current_graph_task
from flatshard._composable.escapes import tensors_in
from flatshard._composable.precision import FullPrecisionModule, cast_floats
from flatshard._plan_build import Built
from flatshard._plan_order import Event, Pass, What


def recorded_order(root: nn.Module, built: Built, example_inputs: Any) -> Pass:
    """What ``root`` does with ``example_inputs`` on the meta device.

    Raises:
        TypeError: ``example_inputs`` are neither a tuple, a list, a dict nor a tensor.
        ValueError: the outputs hold nothing to run backward from.
        NotImplementedError: a reentrant checkpoint.
        Exception: what the forward raises, with a note.
    """
    given = (example_inputs,) if isinstance(example_inputs, Tensor) else example_inputs
    if not isinstance(given, tuple | list | dict):
        raise TypeError(
            "plan: example_inputs must be a tuple of arguments, a dict of keyword arguments, or a tensor, got a "
            f"{type(given).__name__}"
        )
    args, kwargs = ((), given) if isinstance(given, dict) else (tuple(given), {})
    recorder = _Recorder(root, built)
    try:
        recorder.run(_on_meta(args), _on_meta(kwargs))
    except NotImplementedError:
        raise
    except Exception as e:
        e.add_note(
            "plan: so ended the forward or backward of a copy on the meta device, where tensors have no values. Where the "
            "model needs them, leave example_inputs out, and pass tokens= and activations="
        )
        raise
    forward, backward = recorder.events
    return Pass(tuple(forward), tuple(backward), recorded=True)


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_like(value, device="meta", requires_grad=value.requires_grad)
    if isinstance(value, dict):
        return {k: _on_meta(v) for k, v in value.items()}
    return type(value)(map(_on_meta, value)) if type(value) in (tuple, list) else value


class _Saved:
    """A tensor that autograd saved: counted as long as it lives, its memory once."""

    def __init__(self, tensor: Tensor, books: dict[int, list[Any]]) -> None:
        self.tensor, self.books = tensor.detach(), books
        storage = tensor.untyped_storage()
        self.key = id(storage)
        books.setdefault(self.key, [0, storage])[0] += 1

    def __del__(self) -> None:
        entry = self.books[self.key]
        entry[0] -= 1
        if not entry[0]:
            del self.books[self.key]


class _Recorder:
    def __init__(self, root: nn.Module, built: Built) -> None:
        self.built = built
        self.events: tuple[list[Event], list[Event]] = ([], [])
        self.steps = 0
        self.books: dict[int, list[Any]] = {}  # bytes that autograd saved, by storage
        self.at = (0, 0)  # operations and bytes saved so far
        self.task = -1
        self.running: list[int] = []  # units whose forwards are under way, outermost first
        memo: dict[int, Any] = {}
        self.copies = list(_stand_ins(root, built, memo))
        self.root = copy.deepcopy(root, memo)
        self.own = {
            id(s): s for s in (t.untyped_storage() for t in self.copies)
        }  # no activations; kept, as ids are reused
        for number, unit in enumerate(built.choice.planned):
            self._hook(memo[id(unit.module)], number)
            if (policy := built.choice.config_of(unit).mixed_precision).param_dtype is not None:
                for module in (memo[id(m)] for m in unit.modules if policy.ignores(m)):
                    full = FullPrecisionModule()
                    module.register_forward_pre_hook(full.before, with_kwargs=True)
                    module.register_forward_hook(full.after, with_kwargs=True)
        for param, (unit_number, flat, index) in built.places.items():
            if param.requires_grad:
                made = functools.partial(self._gradient, Event(What.GRADIENT, unit_number, flat=flat, index=index))
                memo[id(param)].register_post_accumulate_grad_hook(made)

    def run(self, args: Any, kwargs: Any) -> None:
        self.flops = FlopCounterMode(display=False)
        with self.flops:
            with torch.enable_grad(), saved_tensors_hooks(self._pack, lambda saved: saved.tensor):
                output = self.root(*args, **kwargs)
                losses = [t.sum() for t in tensors_in(output) if t.requires_grad and t.is_floating_point()]
            if not losses:
                raise ValueError("plan: the outputs of the forward hold no floating-point tensor that requires grad")
            del output
            self._note(0)
            sum(losses[1:], losses[0]).backward()  # type: ignore[no-untyped-call]
            self._note(1)

    def _pack(self, tensor: Tensor) -> Any:
        if id(tensor.untyped_storage()) in self.own:
            return _Own(tensor)
        return _Saved(tensor, self.books)

    def _note(self, phase: int, unit: int = 0) -> None:
        """What has been computed and saved since the last time."""
        now = (self.flops.get_total_flops(), sum(storage.nbytes() for _, storage in self.books.values()))
        flops, saved = (a - b for a, b in zip(now, self.at, strict=True))
        self.at = now
        if flops or saved:
            self.events[phase].append(Event(What.COMPUTE, unit, flops=flops, saved=saved))

    def _happen(self, event: Event) -> None:
        task = current_graph_task()
        phase = int(task != -1)
        if phase and self.task not in (-1, task):
            raise NotImplementedError(
                "plan: a backward inside the backward (a reentrant checkpoint) is not planned: use_reentrant=False is, or "
                "leave example_inputs out"
            )
        self.task = task
        self._note(phase, event.unit)
        self.events[phase].append(event)

    def _gradient(self, event: Event, param: Tensor) -> None:
        param.grad = None
        self._happen(event)

    def _hook(self, module: nn.Module, number: int) -> None:
        unit = self.built.choice.planned[number]
        policy = self.built.choice.config_of(unit).mixed_precision
        depth = self.running

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            self._happen(Event(What.ENTER, number))
            outermost = not depth
            depth.append(number)
            if policy.param_dtype is not None and (
                policy.cast_root_forward_inputs if outermost else policy.cast_forward_inputs
            ):
                args, kwargs = cast_floats((args, kwargs), policy.param_dtype)
            return self._watch_inputs(number, args), kwargs

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            depth.pop()
            if policy.output_dtype is not None:
                output = cast_floats(output, policy.output_dtype)
            nodes = (
                {t.grad_fn for t in tensors_in(output) if t.grad_fn is not None} if torch.is_grad_enabled() else set()
            )
            self._happen(Event(What.EXIT, number, flag=bool(nodes)))
            if nodes:
                came = functools.partial(self._begin, number, self.steps, [])
                self.steps += 1
                for node in nodes:
                    node.register_prehook(came)
            return output

        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        # Also when a checkpoint has recomputed enough, and ends a forward by an exception: then `output` is None.
        module.register_forward_hook(after, with_kwargs=True, always_call=True)

    def _begin(self, number: int, step: int, begun: list[bool], grads: Any) -> None:
        if not begun:
            begun.append(True)
            self._happen(Event(What.BEGIN, number, step=step))

    def _watch_inputs(self, number: int, args: tuple[Any, ...]) -> tuple[Any, ...]:
        inputs = [t for t in tensors_in(args) if t.requires_grad]
        if inputs and torch.is_grad_enabled():
            left: list[bool] = []
            for tensor in inputs:
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(functools.partial(self._leave, number, left))
        return args

    def _leave(self, number: int, left: list[bool], grads: Any) -> None:
        if not left:
            left.append(True)
            self._happen(Event(What.LEAVE, number))


class _Own:
    """A parameter or buffer that autograd saved."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


def _stand_ins(root: nn.Module, built: Built, memo: dict[int, Any]) -> Iterator[Tensor]:
    """Parameters and buffers on the meta device for a copy of ``root``, in the dtypes that it computes in."""
    dtypes = {
        owned.param: flat.options.compute_dtype or flat.dtype
        for flats in built.flats
        for flat in flats
        for owned in flat.owned
    }
    policies = {m: built.choice.config_of(u).mixed_precision for u in built.choice.planned for m in u.modules}
    for module in root.modules():
        for param in module._parameters.values():
            if param is not None and id(param) not in memo:
                empty = torch.empty_like(param.detach(), device="meta", dtype=dtypes.get(param, param.dtype))
                memo[id(param)] = nn.Parameter(empty, param.requires_grad)
                yield memo[id(param)]
        policy = policies.get(module)
        for buffer in module._buffers.values():
            if buffer is not None and id(buffer) not in memo:
                cast = policy is not None and buffer.is_floating_point() and not policy.ignores(module)
                dtype = (policy.buffer_dtype if policy is not None and cast else None) or buffer.dtype
                memo[id(buffer)] = torch.empty_like(buffer, device="meta", dtype=dtype)
                yield memo[id(buffer)]
