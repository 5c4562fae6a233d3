"""accelerate's Accelerator for sharded models: the loop of a program stays as it is."""

import contextlib
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import accelerate
import torch
from accelerate.utils import DistributedType
from torch import nn

from .. import _C, checkpoint, clip_grad_norm_, optim, other_optimizers, ranks, shard, shard_optimizer

_OPTIMIZED_MODEL = "_fsdp_cpp_model"  # attribute of a prepared optimizer: the sharded model that it updates


class Accelerator(accelerate.Accelerator):
    """An accelerate.Accelerator whose prepare() shards models with fully_shard() instead of wrapping them.

        accelerator = Accelerator(gradient_accumulation_steps=4, shard_options={"strategy": "optim"})
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    Optimizers of torch update this rank's parts (fsdp_cpp.shard_optimizer); those of fsdp_cpp are made after prepare(model).
    All ranks call clip_grad_norm_(), get_state_dict(), save_model(), save_state() and load_state().

    shard_options: keywords of fully_shard() for models that are not sharded yet.
    """

    shard_options: dict[str, Any]

    def __init__(self, *args: Any, shard_options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._set_up(shard_options)

    @classmethod
    def of(cls, plain: accelerate.Accelerator, shard_options: Mapping[str, Any] | None = None) -> "Accelerator":
        """Makes an existing accelerator one of this class, in place, for programs that hold references to it."""
        plain.__class__ = cls
        plain._set_up(shard_options)
        return plain

    def _set_up(self, shard_options: Mapping[str, Any] | None) -> None:
        others = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)
        if self.distributed_type in others:
            raise _C.UsageError(f"accelerate is set to {self.distributed_type.value}, which shards the model, too; turn that off")
        if self.scaler is not None:
            raise _C.UsageError("mixed_precision is 'fp16', whose scaler looks for whole gradients; use 'bf16', or "
                                "shard_options={'params': torch.float16} and AdamW(loss_scale='dynamic')")
        if ranks.world().size != self.num_processes:
            raise _C.UsageError(f"accelerate has {self.num_processes} processes, but the job has {ranks.world().size} ranks; "
                                "start it with torchrun, and on CPUs with Accelerator(cpu=True)")
        self.shard_options = dict(shard_options or {})
        self._leaves_out_shards = False
        self._sharded_optimizers: list[Any] = []  # while accelerate does not see them
        self.register_save_state_pre_hook(self._save_shards_of_state)
        self.register_load_state_pre_hook(self._load_shards_of_state)

    # --- preparing ---------------------------------------------------------------------------------------------------------

    def shard_model(self, model: nn.Module, *, main_storage: shard.MainStorage = "split") -> nn.Module:
        """Shards a model in place with shard_options; leaves a sharded one as it is.

        mixed_precision="bf16" means params=torch.bfloat16 and main_grads=torch.float32. main_storage is the default.
        """
        if _sharded(model) is not None:
            return model
        options: dict[str, Any] = {"main_storage": main_storage}
        if self.mixed_precision == "bf16":
            options.update(params=torch.bfloat16, main_grads=torch.float32)
        if self.device_placement and self.device.type != "cpu":
            if any(parameter.is_meta for parameter in model.parameters()):
                options["device"] = self.device
            else:
                model.to(self.device)
        return shard.fully_shard(model, **{**options, **self.shard_options})

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        optimizers = [each for each in args if isinstance(each, torch.optim.Optimizer)]
        # Optimizers of others change main weights in place. Models come first, whatever the order of the arguments.
        is_ours = all(isinstance(each, optim.Optimizer) for each in optimizers)
        for each in args:
            if isinstance(each, nn.Module):
                self.shard_model(each, main_storage="split" if is_ours else "separate")
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> nn.Module:
        if not evaluation_mode:
            self.shard_model(model)
        elif _sharded(model) is None:
            return super().prepare_model(model, device_placement, evaluation_mode)
        # accelerate's evaluation mode applies mixed precision and torch.compile, and does not wrap the model.
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        model = _updated_by(optimizer)
        if model is None or getattr(optimizer, "_is_accelerate_prepared", False):
            return super().prepare_optimizer(optimizer, device_placement)
        if not isinstance(optimizer, optim.Optimizer):
            if not other_optimizers.is_wrapped(optimizer):
                shard_optimizer(optimizer)
            for part in _parameters(optimizer):
                setattr(part, shard.MODEL, weakref.ref(model))  # clip_grad_norm_() takes them, too
        prepared = super().prepare_optimizer(optimizer, device_placement=False)
        setattr(prepared, _OPTIMIZED_MODEL, model)
        return prepared

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> nn.Module:
        inner = _sharded(model)
        if inner is None:
            return super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)
        # accelerate would bind the forward to the model once more; a unit's forward is bound already.
        if not keep_fp32_wrapper and "_original_forward" in inner.__dict__:
            inner.forward = inner.__dict__.pop("_original_forward")
        return super().unwrap_model(model, keep_torch_compile=keep_torch_compile)

    # --- training ----------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        inner = _sharded(model)
        with super().no_sync(model) if inner is None else shard.no_sync(inner):
            yield

    def clip_grad_norm_(self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2) -> Any:
        """Clips the gradients of all ranks together; the parameters are all trainable ones of a model."""
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not any(hasattr(each, shard.MODEL) for each in parameters):
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        model = shard.model_of(parameters)  # type: ignore[arg-type]
        given, whole = {id(each) for each in parameters}, {id(each): each for each in model.parameters()}
        missing = sum(each.requires_grad for key, each in whole.items() if key not in given)
        if norm_type != 2 or missing and given & set(whole):
            raise _C.UsageError(f"clip_grad_norm_() got norm_type {norm_type} and {missing} trainable parameters less than the model "
                                "has; a sharded model is clipped as a whole, with norm_type 2")
        return clip_grad_norm_(model, max_norm)

    # --- saving and loading ------------------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole model on rank 0, {} on the others."""
        inner = _sharded(model)
        if inner is None:
            return super().get_state_dict(model, unwrap)
        return {} if self._leaves_out_shards else checkpoint.state_dict(inner) or {}

    def save_shards(self, directory: str | os.PathLike[str], *, step: int = 0) -> None:
        """Saves every sharded model with its optimizer: DIRECTORY/sharded_0, ..."""
        for path, model, optimizer in self._shards_in(directory):
            checkpoint.save(path, model, optimizer, step=step, schedule={"accelerate_step": self.step})

    def load_shards(self, directory: str | os.PathLike[str]) -> None:
        """Loads what save_shards() saved, on any number of ranks."""
        for path, model, optimizer in self._shards_in(directory):
            # Ranks that have no file of accelerate's own must agree with the others about it.
            self.step = checkpoint.load(path, model, optimizer).schedule["accelerate_step"]

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        with self._without_shards():
            return super().save_state(output_dir, safe_serialization, **kwargs)

    def load_state(self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Loads what save_state() saved, on any number of ranks; ranks that were not there before keep their random states."""
        with self._without_shards():
            super().load_state(input_dir, load_kwargs, **kwargs)

    def _shards_in(self, directory):
        optimizers = {id(getattr(each, _OPTIMIZED_MODEL, None)): each.optimizer for each in self._optimizers + self._sharded_optimizers}
        models = [inner for inner in map(_sharded, self._models) if inner is not None]
        for index, model in enumerate(models):
            yield os.path.join(directory, f"sharded_{index}"), model, optimizers.get(id(model))

    @contextlib.contextmanager
    def _without_shards(self):
        """accelerate saves and loads what every rank has whole. Its hooks, which know the directory, do the rest."""
        before = self._optimizers
        self._sharded_optimizers = [each for each in before if hasattr(each, _OPTIMIZED_MODEL)]
        self._optimizers = [each for each in before if not hasattr(each, _OPTIMIZED_MODEL)]
        self._leaves_out_shards = True
        try:
            yield
        finally:
            self._optimizers, self._sharded_optimizers, self._leaves_out_shards = before, [], False

    def _save_shards_of_state(self, models, weights, directory):
        self.save_shards(directory)
        weights[:] = [state for model, state in zip(models, weights) if _sharded(model) is None]

    def _load_shards_of_state(self, models, directory):
        self.load_shards(directory)
        models[:] = [model for model in models if _sharded(model) is None]


def _sharded(model: nn.Module) -> nn.Module | None:
    """The sharded model, which torch.compile() may have wrapped; None for others."""
    inner = getattr(model, "_orig_mod", model)
    return inner if shard.is_sharded(inner) else None


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _updated_by(optimizer: torch.optim.Optimizer) -> nn.Module | None:
    """The sharded model that an optimizer updates; None for others."""
    if other_optimizers.is_wrapped(optimizer):
        return other_optimizers.parts_of(optimizer).model
    parameters = _parameters(optimizer)
    return shard.model_of(parameters) if any(hasattr(each, shard.MODEL) for each in parameters) else None
