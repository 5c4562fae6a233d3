"""Checkpoints of sharded models, in the format of fsdp.cpp (docs/checkpoints.md), and whole state dicts for other tools."""

import dataclasses
import json
import os
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn

from . import _C, shard
from .saved_optimizer import SavedOptimizer


class Config(Protocol):
    """A model's configuration as transformers has it."""

    def to_json_string(self, use_diff: bool = ...) -> str: ...


@dataclasses.dataclass(frozen=True)
class Loaded:
    """Facts that came with the state of a checkpoint."""

    path: str
    step: int
    schedule: Any       # what save() was given
    data: Any           # the same, of the rank in this rank's place; None if the number of ranks was another
    missing: list[str]  # names that allow_missing allowed; they kept their values
    extra: list[str]    # names that allow_extra allowed


def save(directory: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, step: int = 0,
         schedule: Any = None, data: Any = None, dtype: torch.dtype | None = None, config: str | Config | None = None) -> None:
    """Saves once, and returns when the checkpoint is visible: DIRECTORY/step-00000500. All ranks call it.

    schedule and data: anything that JSON can hold; schedule is the same on all ranks (a scheduler's state_dict(), say), data is
    this rank's own (how far it has read). dtype: of the stored weights; None for that of the main weights, which is exact.
    config: the text of the model's config.json, or an object with to_json_string() as transformers' configurations have.
    """
    saved = SavedOptimizer(optimizer)
    _C.save_checkpoint(str(directory), shard.handle(model), saved.engine, saved.other(), _buffers(model), step, _text(schedule),
                       _text(data), saved.settings(), dtype, _config_text(config))


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *,
         allow_missing: str | Iterable[str] = (), allow_extra: bool = False) -> Loaded:
    """Loads a checkpoint of any number of ranks, a run's latest one, or weights from safetensors files of other tools.

    Names and shapes must match; allow_missing (patterns) and allow_extra=True allow the exceptions. The optimizer's groups get the numbers
    that they had (lr, initial_lr, weight_decay, ...), from which schedulers go on. All ranks call it.
    """
    saved = SavedOptimizer(optimizer)
    other = saved.other()
    found = _C.load_checkpoint(str(path), shard.handle(model), saved.engine, other, _buffers(model), _patterns(allow_missing), allow_extra)
    saved.restore(other, found)
    return _loaded(found)


class Checkpointer:
    """Saves a run again and again, beside the training. One per run; all ranks call everything in the same order.

        checkpointer = fsdp.Checkpointer("runs/7b", model, optimizer, keep_last=3)
        loaded = checkpointer.load_latest()
        for step in range(loaded.step if loaded else 0, last):
            ...
            if (step + 1) % 500 == 0:
                checkpointer.save(step + 1)
        checkpointer.wait()
    """

    def __init__(self, directory: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *,
                 background: bool = True, keep_last: int = 0, keep_every: int = 0, dtype: torch.dtype | None = None,
                 config: str | Config | None = None) -> None:
        self._model = model
        self._optimizer = SavedOptimizer(optimizer)
        self._engine = _C.Checkpointer(str(directory), shard.handle(model), self._optimizer.engine, background, keep_last,
                                       keep_every, dtype, _config_text(config))

    def save(self, step: int, *, schedule: Any = None, data: Any = None) -> None:
        """Copies the state and returns; a thread writes the copy (background=False: returns when it is visible). Throws an
        error of the save before."""
        self._engine.save(self._optimizer.other(), _buffers(self._model), step, _text(schedule), _text(data), self._optimizer.settings())

    def load_latest(self, *, allow_missing: str | Iterable[str] = (), allow_extra: bool = False) -> Loaded | None:
        """The latest checkpoint's facts, after loading it; None if there is none yet."""
        other = self._optimizer.other()
        found = self._engine.load_latest(other, _buffers(self._model), _patterns(allow_missing), allow_extra)
        if found is None:
            return None
        self._optimizer.restore(other, found)
        return _loaded(found)

    def wait(self) -> None:
        """Waits until the last save is visible; throws if it failed."""
        self._engine.wait()


def state_dict(model: nn.Module, *, on_all_ranks: bool = False,
               device: torch.device | str = "cpu") -> dict[str, torch.Tensor] | None:
    """The whole model as model.state_dict() of the plain one, on rank 0 (None elsewhere) or on all ranks. All ranks call it.

    Units are gathered one after the other; values are the weights as they compute.
    """
    sharded = shard.handle(model)
    keeps = on_all_ranks or sharded.mesh.world.rank == 0
    parameters = shard.parameters_of(model)
    members: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for each in sharded.parameters():
        members.setdefault(each.unit, []).append((each.name, parameters[each.name]))
    values: dict[int, torch.Tensor] = {}  # by the parameter's id: a shared one has several names
    for unit, owned in members.items():
        whole = sharded.whole_parameters(False, [unit])
        whole.enter()
        try:
            for name, parameter in owned:
                joined = sharded.join_slices(name, parameter)  # by all ranks of an ep or tp group
                if keeps:
                    values[id(parameter)] = joined.to(device, copy=True)
                del joined  # a view, which must not outlive its unit
        finally:
            whole.exit()
    if not keeps:
        return None
    return {name: values[id(value)] if id(value) in values else _copied(value, device)
            for name, value in shard.unwrapped(model).state_dict(keep_vars=True).items()}


def _copied(value, device):
    """A buffer; or what get_extra_state() has returned, which may be anything."""
    return value.detach().to(device, copy=True) if isinstance(value, torch.Tensor) else value


def _buffers(model):
    """Buffers that state_dict() would hold: equal on all ranks, or rank 0's count."""
    skipped = {f"{prefix}.{name}" if prefix else name for prefix, module in model.named_modules()
               for name in module._non_persistent_buffers_set}
    return [(name, buffer) for name, buffer in model.named_buffers() if name not in skipped]


def _patterns(patterns):
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _text(value):
    try:
        return "" if value is None else json.dumps(value)
    except TypeError as error:
        raise _C.UsageError(f"schedule and data must be what JSON can hold: {error}") from None


def _config_text(config):
    if config is None or isinstance(config, str):
        return config or ""
    return config.to_json_string(use_diff=False)


def _loaded(found):
    def value(text: str) -> object:
        try:
            return json.loads(text) if text else None
        except json.JSONDecodeError:  # another program's own words
            return text

    return Loaded(found.path, found.step, value(found.schedule), value(found.data), found.missing, found.extra)
