"""Statements about state: copies, checkpoints, moves to other ranks, and queries that change nothing."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from fuzz import programs
from fuzz.comparisons import close, largest
from fuzz.random_models import forget
from fuzz.runner import Runner
from fuzz.twins import Saved, Twin
from parity import everybody
from saving import read_safetensors
from torch import Tensor, nn

import flatshard
from flatshard import checkpoint as saving
from flatshard.weights._changes import apply_changed_params, iter_changed_params
from flatshard.weights._sent import SentParams


class Files(Runner):
    """Copy, save, load, move and query models."""

    # -- copies and files

    def _copy(self, s: programs.Copy, twin: Twin | None, module: None) -> bool:
        if twin is None or self.twins[s.to] is not None or self.program.optimizer == "flat":
            return False
        for each in (twin.model, twin.plain):
            forget(each)  # terms recorded by recomputation in backward
        found: list[nn.Module] = []
        if not self.attempt(lambda: found.append(copy.deepcopy(twin.model)), twin):
            return True
        plain = copy.deepcopy(twin.plain)
        new = Twin(s.to, twin.which, twin.sharding, twin.ranks)
        new.rtol, new.converted = twin.rtol, twin.converted
        new.begin(found[0], plain, self._optimizer(found[0]), self._optimizer(plain))
        new.trained, new.laid_out = twin.trained, twin.laid_out
        new.synced = {**twin.synced, **twin.synced_outside}
        new.factors, new.partial = dict(twin.factors), set(twin.partial)
        self.twins[s.to] = new
        return True

    def _restart(self, s: programs.Restart, twin: Twin, module: None) -> bool:
        if not twin.is_idle or self.interrupted or twin.partial or not all(twin.synced.values()):
            return False
        if any(u.is_unsharded_by_user for u in twin.units) or twin.converted:
            return False
        new = Twin(twin.number, 1 - twin.which, self.program.shardings[1 - twin.which], self.ranks[1 - twin.which])
        new.rtol = twin.rtol
        plain, plain_opt = twin.plain, twin.plain_opt
        self._discard_losses(twin)
        plain_opt.zero_grad()
        with self._folder() as folder:
            path = folder / str(self._first(twin))
            if s.how == "job":
                folder.mkdir(exist_ok=True)
                job = {"model": twin.model, "optimizer": twin.opt, "step": 5}
                flatshard.save_checkpoint(path, job, process_group=twin.ranks.group)
            else:
                whole = saving.full_state_dict(twin.model), saving.optim_state_dict(twin.model, twin.opt, full=True)
            dist.barrier(self.ctx.group)
            model, plain, opt, plain_opt = self._make(new, plain, plain_opt)
            if s.how == "job":
                job = {"model": model, "optimizer": opt, "step": 0}
                loaded = flatshard.load_checkpoint(folder / "0", job, process_group=new.ranks.group)
                assert loaded["step"] == 5
            else:
                model.load_state_dict(whole[0])
                saving.load_optim_state_dict(model, opt, whole[1])
        for buffer in plain.buffers() if s.how == "job" else ():
            dist.broadcast(buffer.data, dist.get_global_rank(self.ctx.group, 0), self.ctx.group)
        new.begin(model, plain, opt, plain_opt)
        new.changes = twin.changes + 1
        self.twins[twin.number] = new
        return True

    def _reshardover(self, s: programs.ReshardOver, twin: Twin, module: None) -> bool:
        """Move to other ranks. All of the program's ranks take part, whichever of them the model is sharded over."""
        places = {ranks.size: ranks for ranks in self.everywhere}
        to = places.get({"all": self.ctx.world_size, "half": 2 * (self.ctx.world_size == 4), "alone": 1}[s.to])
        if to is None or self.interrupted or twin.undefined or twin.shown or twin.partial:
            return False
        sharding, where = twin.sharding.over(to)
        self._discard_losses(twin)
        if self.attempt(
            lambda: flatshard.elastic.redistribute(twin.model, twin.opt, participants=self.ctx.group, **where), twin
        ):
            twin.ranks, twin.sharding = to, sharding
            twin.changes += 1
            twin.sent, twin.laid_out = None, twin.dtype
        return True

    def _save(self, s: programs.Save, twin: Twin, module: nn.Module) -> bool:
        if (self.interrupted and s.kind == "sharded") or (twin.shown and s.kind == "sharded"):
            return False
        if s.kind == "optim":
            module = twin.model
        found: list[Any] = []
        verbs: dict[str, Callable[[], Any]] = {
            "full": lambda: saving.full_state_dict(module),
            "stream": lambda: dict(saving.iter_full_params(module)),
            "files": lambda: self._export(twin, module),
            "sharded": lambda: copy.deepcopy(module.state_dict()),
            "local": lambda: copy.deepcopy(saving.local_state_dict(module)),
            "optim": lambda: saving.optim_state_dict(twin.model, twin.opt, full=True),
        }
        if not self.attempt(lambda: found.append(verbs[s.kind]()), twin, module):
            return True
        state, path = found[0], twin.path(s.place) if s.kind != "optim" else ""
        plain_module = twin.plain.get_submodule(path)
        plain: Any = {name: value.detach().clone() for name, value in plain_module.state_dict().items()}
        if s.kind in ("full", "stream", "files"):
            expected = plain if s.kind == "full" else {n: p.detach() for n, p in plain_module.named_parameters()}
            buffers = dict(plain_module.named_buffers()) if s.kind == "files" else {}
            expected = {**expected, **{n: b for n, b in buffers.items() if n in state}}
            assert set(state) == set(expected), f"{sorted(state)}, expected {sorted(expected)}"
            for name, value in state.items():
                assert value.shape == expected[name].shape, f"{name}: {value.shape}, expected {expected[name].shape}"
                if name not in buffers:
                    close(value, expected[name], twin.rtol, f"{name} of what was saved")
        if s.kind == "optim":
            plain = copy.deepcopy(twin.plain_opt.state_dict())
            self._compare_optimizers(state, twin)
        self.saved[s.kind, path] = Saved(
            state, plain, twin.dtype, (twin.which, twin.ranks.size), twin.cuts(path), twin.trained, twin.laid_out
        )
        return True

    def _export(self, twin: Twin, module: nn.Module) -> dict[str, Tensor]:
        """Export to safetensors, and read the result back."""
        state: dict[str, Tensor] = {}
        with self._folder() as folder:
            path = folder / str(self._first(twin))
            saving.export_safetensors(module, path)
            dist.barrier(self.ctx.group)
            for file in sorted(path.glob("*.safetensors")):
                state |= read_safetensors(file)
        return state

    @staticmethod
    def _compare_optimizers(state: dict[str, Any], twin: Twin) -> None:
        for name, p in twin.plain.named_parameters():
            expected, got = twin.plain_opt.state.get(p, {}), state["state"].get(name, {})
            if not p.numel():  # no rank can know whether another one has used it
                continue
            assert set(got) == set(expected), f"the optimizer's state of {name}: {set(got)}, expected {set(expected)}"
            for key, value in expected.items():
                if isinstance(value, Tensor):
                    close(got[key], value, twin.rtol, f"{key} of {name}", largest(value))

    def _load(self, s: programs.Load, twin: Twin, module: nn.Module) -> bool:
        path = twin.path(s.place) if s.kind != "optim" else ""
        if (s.kind, path) not in self.saved or twin.shown or self.interrupted:
            return False
        saved = self.saved[s.kind, path]
        state, plain = saved.state, saved.plain
        if saved.dtype is not twin.dtype or saved.which != (twin.which, twin.ranks.size):
            return False
        as_now = saved.trained == twin.trained and saved.laid_out is twin.laid_out
        self.loads_other_cuts = not as_now and s.kind in ("sharded", "local")
        if self.loads_other_cuts and len({*everybody(self.ctx, saved.cuts == twin.cuts(path))}) > 1:
            return False  # some ranks refuse, others do not
        verbs: dict[str, Callable[[], Any]] = {
            "full": lambda: module.load_state_dict(state),
            "sharded": lambda: module.load_state_dict(state),
            "local": lambda: saving.load_local_state_dict(module, state),
            "optim": lambda: saving.load_optim_state_dict(twin.model, twin.opt, state),
        }
        if not self.attempt(verbs[s.kind], twin, module):
            return True
        if s.kind == "optim":
            twin.plain_opt.load_state_dict(plain)
        else:
            twin.plain.get_submodule(path).load_state_dict(plain)
            twin.changes += 1
        return True

    # -- questions

    def _ask(self, s: programs.Ask, twin: Twin, module: nn.Module) -> bool:
        if self.interrupted or (not twin.is_idle and s.what not in ("describe", "num_parameters")):
            return False
        if self.program.optimizer == "flat" and s.what in ("get_total_norm", "gradient_statistics"):
            return False
        plain = twin.plain.get_submodule(twin.path(s.place))
        return self.attempt(lambda: getattr(self, f"_ask_{s.what}")(twin, module, plain), twin, module) or True

    def _ask_describe(self, twin: Twin, module: nn.Module, plain: nn.Module) -> None:
        found = flatshard.describe(module)
        own = [n for n in twin.names if twin.owner[n] in twin.units_of(module)]
        expected = sum(twin.plain.get_parameter(n).numel() for n in own)
        assert found.numel == expected, f"{found.numel} elements, expected {expected}"
        assert found.world_size == twin.ranks.size or twin.sharding.mesh
        assert str(found)

    def _ask_num_parameters(self, twin: Twin, module: nn.Module, plain: nn.Module) -> None:
        numels = [(p.numel(), p.requires_grad) for p in plain.parameters()]
        assert flatshard.tensors.num_parameters(module) == sum(n for n, _ in numels)
        assert flatshard.tensors.num_parameters(module, trainable_only=True) == sum(n for n, trains in numels if trains)

    def _ask_check_replicas(self, twin: Twin, module: nn.Module, plain: nn.Module) -> None:
        flatshard.debug.check_replicas(module)

    def _ask_get_total_norm(self, twin: Twin, module: nn.Module, plain: nn.Module) -> None:
        grads = [p.grad for p in plain.parameters() if p.grad is not None]
        expected = nn.utils.get_total_norm(grads)
        close(flatshard.optim.get_total_norm(module).double(), expected.double(), twin.rtol, "the norm")

    def _ask_gradient_statistics(self, twin: Twin, module: nn.Module, plain: nn.Module) -> None:
        found = sorted(flatshard.optim.gradient_statistics(module).values(), key=lambda g: (g.norm, g.numel))
        grads = [p.grad for p in plain.parameters() if p.grad is not None]
        expected = sorted((g.float().norm().item(), g.numel(), largest(g)) for g in grads)  # bf16 would tie some
        got = torch.tensor([[g.norm, float(g.numel), g.max_abs] for g in found])
        close(got, torch.tensor(expected), max(twin.rtol, 1e-6), "statistics")

    def _ask_segment_reduce(self, twin: Twin, module: nn.Module, plain: nn.Module) -> None:
        params = [p for p in module.parameters() if p.is_floating_point()]
        found = flatshard.optim.segment_reduce([p.detach() for p in params], params)
        expected = [p.norm().item() for p in plain.parameters() if p.is_floating_point()]
        close(found.double(), torch.tensor(expected, dtype=torch.float64), max(twin.rtol, 1e-6), "norms")

    def _ask_iter_changed_params(self, twin: Twin, module: nn.Module, plain: nn.Module) -> None:
        """Check that a server that applies each change has the model's values."""
        if twin.sent is not None and twin.sent[0]._module is twin.model:
            sent, weights = twin.sent
            for plan, changes in everybody(self._there(twin), (sent.layout, list(iter_changed_params(sent)))):
                for change in changes:
                    apply_changed_params(weights, plan, change)
        else:
            names = {n for n, _ in twin.model.named_parameters(remove_duplicate=False)}
            weights = dict(saving.iter_full_params(twin.model, names=names))
            if twin.sharding.param_dtype is None:
                twin.sent = SentParams(twin.model), weights
        for name, p in twin.plain.named_parameters():
            close(weights[name], p, twin.rtol, f"the server's {name}")

    def _ask_optim_state_dict(self, twin: Twin, module: nn.Module, plain: nn.Module) -> None:
        state = saving.optim_state_dict(twin.model, twin.opt)
        saving.load_optim_state_dict(twin.model, twin.opt, state)
        self._compare_optimizers(saving.optim_state_dict(twin.model, twin.opt, full=True), twin)

    def _ask_summed_gradients(self, twin: Twin, module: nn.Module, plain: nn.Module) -> None:
        infos = [flatshard.tensors.shard_info(p) for p in module.parameters()]
        if any(info is not None and info.never_cut for info in infos):
            return  # only the gradient's owner can use its results
        if self.program.optimizer == "flat":
            return  # only flat parameters have gradients
        got, expected = (
            sum(p.grad.pow(2).sum() for p in m.parameters() if p.grad is not None) for m in (module, plain)
        )
        close(torch.as_tensor(got).double(), torch.as_tensor(expected).double(), twin.rtol, "the sum")
