"""transformers.Trainer for sharded models, and a mixin that does the same for trainers derived from it."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn

from .. import checkpoint, optim, shard
from .accelerate import Accelerator

_Base: Any = transformers.Trainer if TYPE_CHECKING else object
_ADAMW = ("adamw_torch", "adamw_torch_fused")
_SCHEDULER = "scheduler.pt"


class TrainerMixin(_Base):
    """Makes a trainer shard its model with fully_shard(), train it with fsdp_cpp.AdamW, and save sharded checkpoints.

        class SFTTrainer(TrainerMixin, trl.SFTTrainer): ...

    shard_options: keywords of fully_shard(), for a model that is not sharded yet.
    """

    def __init__(self, *args: Any, shard_options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self.shard_options = dict(shard_options or {})
        self._whole_weights: dict[str, torch.Tensor] | None = None
        super().__init__(*args, **kwargs)
        self._shard_model()

    def _shard_model(self) -> None:
        if self.optimizer is not None:
            is_ours = isinstance(self.optimizer, optim.Optimizer)
        elif self.optimizer_cls_and_kwargs is not None:
            is_ours = issubclass(self.optimizer_cls_and_kwargs[0], optim.Optimizer)
        else:
            is_ours = self.args.optim in _ADAMW
        self.accelerator.shard_model(self.model, main_storage="split" if is_ours else "separate")

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        Accelerator.of(self.accelerator, self.shard_options)
        self.args._n_gpu = min(self.args.n_gpu, 1)  # a process has one GPU; the Trainer would use DataParallel on several

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not shard.is_sharded(model):
            super()._move_model_to_device(model, device)

    # --- optimizer ---------------------------------------------------------------------------------------------------------

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        self._shard_model()  # model_init makes new models
        return super().create_optimizer(*args, **kwargs)

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: transformers.TrainingArguments, model: Any = None) -> tuple[Any, Any]:
        """fsdp_cpp.AdamW in place of torch's; other optimizers go through fsdp_cpp.shard_optimizer()."""
        kind, kwargs = transformers.Trainer.get_optimizer_cls_and_kwargs(args, model)
        if kind is not torch.optim.AdamW:
            return kind, kwargs
        return optim.AdamW, {name: value for name, value in kwargs.items() if name != "fused"}

    # --- saving and loading ------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves whole weights for from_pretrained(), from rank 0. All ranks call it."""
        self._whole_weights = checkpoint.state_dict(self.model, on_all_ranks=self.args.save_on_each_node)
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            self._whole_weights = None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, self._whole_weights if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.accelerator.save_shards(output_dir, step=self.state.global_step)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not os.path.isdir(_shards(checkpoint)):
            return
        self.accelerator.load_shards(checkpoint)
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, _SCHEDULER), weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Loads weights alone; shards come with the optimizer's state, when there is an optimizer."""
        if os.path.isdir(_shards(resume_from_checkpoint)):
            return
        if not shard.is_sharded(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            checkpoint.load(resume_from_checkpoint, self.model)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        checkpoint.load(_shards(best) if os.path.isdir(_shards(best)) else best, self.model)


class Trainer(TrainerMixin, transformers.Trainer):
    """A transformers.Trainer whose model is sharded.

        trainer = Trainer(model=model, args=args, train_dataset=rows, shard_options={"strategy": "optim"})
        trainer.train(resume_from_checkpoint=True)
    """


def _shards(directory: str) -> str:
    return os.path.join(directory, "sharded_0")
