"""The features that ``fully_shard`` uses. Each can be left out, and models that do not need it train without it."""

from __future__ import annotations

from flatshard._comm.backends import by_backend
from flatshard._comm.fake_group import FakeCollectives
from flatshard._comm.monitor.monitor import GroupMonitor
from flatshard._comm.runtime import Peers
from flatshard._composable.extensions import use
from flatshard._composable.features.encoded_gathers import EncodedFlatParam, EncodedGathers
from flatshard._composable.features.escapes import Escapes
from flatshard._composable.features.filled_later import FilledLater
from flatshard._composable.features.kept_shards import GatherSources
from flatshard._composable.features.layer_drop import LayerDrop
from flatshard._composable.features.other_code import (
    DataWrites,
    Forked,
    IgnoredByDDP,
    LateTies,
    NotSharded,
    ResizedEmbeddings,
)
from flatshard._composable.features.precision import Precision
from flatshard._composable.features.recompute import Recompute
from flatshard._composable.features.skip import Skip
from flatshard._composable.features.transforms import Compile, Transforms
from flatshard._composable.features.user_hooks import UserHooks
from flatshard._handle.flat_param import FlatParam
from flatshard.checkpoint._state_dict_hooks import StateDicts
from flatshard.optim._hooks import Optimizers


def plug_in() -> None:
    """Make every later ``fully_shard`` use the features. Called once, when the package is imported."""
    Peers.make_monitor = GroupMonitor
    by_backend["fake"] = FakeCollectives
    FlatParam.encoded = EncodedFlatParam
    use(
        Compile(),
        Optimizers(),
        Transforms(),  # before what must not run inside a transform
        GatherSources(),
        Precision(),
        Escapes(),
        Skip(),
        UserHooks(),
        StateDicts(),
        FilledLater(),
        LayerDrop(),
        NotSharded(),
        LateTies(),
        ResizedEmbeddings(),
        IgnoredByDDP(),
        Forked(),
        DataWrites(),
        EncodedGathers(),
        Recompute(),
    )
