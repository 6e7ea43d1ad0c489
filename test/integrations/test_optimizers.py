"""All optimizers of timm, and Adafactor of transformers: another number of ranks continues an interrupted run."""

from functools import partial
from typing import Any

import pytest
import restarts
import torch
from pairs import some
from restarts import Make

pytestmark = [pytest.mark.clients("timm", "torchvision", "transformers"), pytest.mark.slow]
pytestmark += [pytest.mark.time_limit(1800)]

F64, NO_CLIP, MOMENTUM = {"momentum_dtype": torch.float64}, {"max_grad_norm": None}, {"momentum": 0.9}
NO_DECAY = {"weight_decay": 0.0}
SETTINGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("adafactorbv", "adafactorbvc", "cadafactorbv", "cadafactorbvc"), F64),
    **dict.fromkeys(("lamb", "lambc", "lambcd", "lambcw", "lambw", "clamb", "clambw"), NO_CLIP),
    **dict.fromkeys(("csgdc", "csgdp", "csgdw"), MOMENTUM),
    # They add eps to the rate, so torch's helper, which makes state by a step with rate 0, would decay weights.
    **dict.fromkeys(("madgrad", "madgradw"), NO_DECAY),
}
"""Required settings: momentum in the parameters' dtype, no clipping by the total norm, or any momentum at all."""

REFUSED = {"adahessian"}  # needs a backward with a graph
COMPILED = {"kron", "kronc", "kronw"}  # they compile functions, for which forked ranks wait forever
PARTS = {"adabelief", "adan", "laprop", "lion", "madgrad", "nadam", "radam", "rmsproptf", "sgd"}
WHOLE = {"adafactor", "cnadamw", "csgdw", "lamb", "lars", "mars", "muon", "novograd", "sgdp"}


def all_of_them() -> dict[str, Make]:
    """Return an optimizer of each class, as other names only differ in settings. Optimizers of other packages have no
    class."""
    import timm.optim
    from transformers.optimization import Adafactor

    kinds = {name: timm.optim.get_optimizer_info(name).opt_class for name in timm.optim.list_optimizers()}
    names = {kind: name for name, kind in kinds.items() if isinstance(kind, type) and name not in PARTS | WHOLE}
    names |= {kind: name for name, kind in kinds.items() if name in PARTS | WHOLE}
    made: dict[str, Make] = {}
    for name in {*names.values(), *PARTS, *WHOLE, "cadamw", "cadafactorbv"}:
        settings = {"weight_decay": 0.1, **SETTINGS.get(name, {})}
        made[name] = partial(timm.optim.create_optimizer_v2, opt=name, lr=0.05, **settings)
    fixed = partial(Adafactor, lr=0.05, scale_parameter=False, relative_step=False)
    return {**made, "adafactor of transformers": fixed, "adafactor with its own rate": Adafactor}


def save(ctx: Any, path: str, names: list[str]) -> dict[str, bool]:
    """Save each optimizer; return which of them step full parameters."""
    return {name: restarts.save(ctx, name, all_of_them()[name], path) for name in names}


def restart(ctx: Any, path: str, steps_whole: dict[str, bool]) -> None:
    for name, is_wrapped in steps_whole.items():
        restarts.restart(ctx, name, all_of_them()[name], path, is_wrapped)


def test_other_ranks_go_on(pool, tmp_path):
    every = sorted(all_of_them().keys() - REFUSED - COMPILED)
    assert len(every) > 30
    found, other = pool.run(save, str(tmp_path / "x"), some(every, 8, turn=3), world_size=2, timeout=300)
    assert found == other
    assert PARTS & found.keys()
    assert {name for name in found if found[name] and name in PARTS | WHOLE} == WHOLE & found.keys()
    pool.run(restart, str(tmp_path / "x"), found, world_size=3, timeout=300)
