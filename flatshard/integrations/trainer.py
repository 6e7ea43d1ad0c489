"""transformers' Trainer: :class:`ShardedTrainer`, or :class:`Sharded` before another Trainer in a class's bases.

What is overridden is where Trainer would put DistributedDataParallel around the model, and what only one rank does though
all must. A checkpoint is the one that a single process writes: any number of processes resumes from it, with or without this.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.utils import logging

import flatshard
from flatshard.integrations.accelerate import shard
from flatshard.integrations.state import is_sharded, policy_of, whole_optimizer_state

logger = logging.get_logger(__name__)


class Sharded:
    """A mixin that makes a Trainer shard its model: ``class Mine(Sharded, Seq2SeqTrainer)``. All ranks call its methods.

    The model is sharded when training or evaluation begins. Then ``trainer.model`` is the same object, and its parameters are
    parts: save it by ``trainer.save_model``. Its ``generate`` gathers once, so ranks may generate different lengths.

    Other models of the trainer (TRL's ``ref_model``) are sharded alike, if they are of the same class. So their parts
    correspond, as ``sync_ref_model=True`` needs. Those of another class (``teacher_model``) stay whole, with a warning.
    """

    model: nn.Module
    accelerator: Any
    args: Any
    optimizer: Any
    lr_scheduler: Any
    optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None
    get_optimizer_cls_and_kwargs: Callable[..., tuple[Any, dict[str, Any]]]

    def __init__(self, *args: Any, sharding: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Create a Trainer with the arguments of its own class, and these.

        Args:
            sharding: arguments of ``fully_shard``. Without ``policy``, layers that the model names itself become units.

        Raises:
            ValueError: no policy is given, and the model names no layers; or ``fsdp`` or ``deepspeed`` of the Trainer's
                arguments is set.
        """
        super().__init__(*args, **kwargs)
        if self.args.fsdp or self.args.deepspeed:
            raise ValueError("the model would be sharded twice: leave out fsdp= and deepspeed= of TrainingArguments")
        self._sharding = dict(sharding or {})
        if "policy" not in self._sharding:
            self._sharding["policy"] = policy_of(self.model)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Shard the model where the Trainer wraps it: before training, and before evaluation without it."""
        shard(self.accelerator, self.model, **self._sharding)
        self._shard_others()
        if training:
            logger.info(
                f"  Number of trainable parameters of the whole model = {self.get_num_trainable_parameters():,}, of which "
                "the next lines count this rank's part"
            )
        return self.model

    def _shard_others(self) -> None:
        for name, other in vars(self).items():
            if not isinstance(other, nn.Module) or is_sharded(other):
                continue
            if type(other) is type(self.model):
                flatshard.fully_shard(other, **self._sharding)
            elif any(True for _ in other.parameters()):
                kind = type(other).__name__
                warnings.warn(
                    f"trainer.{name}, a {kind}, is not sharded: each rank has all of it. To shard it, call "
                    f"flatshard.fully_shard(trainer.{name}, policy={{Block}}) before training",
                    stacklevel=2,
                )

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Create the Trainer's optimizer. If it looks at full matrices (``optim="adafactor"``), it steps full parameters."""
        is_given = self.optimizer is not None
        shard(self.accelerator, self.model, **self._sharding)
        made = super().create_optimizer(model)  # type: ignore[misc]
        if not is_given and not flatshard.optim.works_on_shards(made):
            _, settings = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)
            given = {key: value for key, value in settings.items() if key in made.defaults}
            self.optimizer = flatshard.optim.WholeParameterOptimizer(made.param_groups, type(made), **given)
        return self.optimizer

    def get_num_trainable_parameters(self) -> int:
        """Return the number of trainable parameters, counting full ones."""
        return flatshard.tensors.num_parameters(self.model, trainable_only=True)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model for ``from_pretrained``, or the adapters of a model of peft. All ranks must call it."""
        if not is_sharded(self.model):
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        folder = self.args.output_dir if output_dir is None else output_dir
        if hasattr(self.model, "peft_config"):
            from flatshard.integrations.peft import adapter_state_dict

            state = adapter_state_dict(self.model)
        else:
            state = flatshard.checkpoint.full_state_dict(self.model, rank0_only=not self.args.save_on_each_node)
        self._save(folder, state_dict=state)  # type: ignore[attr-defined]
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)  # type: ignore[attr-defined]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Gather the optimizer's state on all ranks, of which each has a shard, for the rank that saves."""
        state = whole_optimizer_state(self.model, self.optimizer, rank0_only=not self.args.save_on_each_node)
        if not self.args.should_save:
            return
        torch.save(state, os.path.join(output_dir, OPTIMIZER_NAME))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*save.*the state of the optimizer")
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))


class ShardedTrainer(Sharded, Trainer):
    """A Trainer of transformers for a sharded model: ``ShardedTrainer(model, args, sharding={"policy": {Block}})``."""
