"""EMA: an exponential moving average of a sharded model's main weights."""

import contextlib
import os
from collections.abc import Iterator
from typing import Generic

import torch

from . import _C, checkpoint, export, shard


class EMA(Generic[shard.M]):
    """The moving average of the trainable main weights, in fp32; each rank keeps that of its own shard.

        ema = fsdp.EMA(model, decay=0.999)
        for batch in batches:
            ...
            optimizer.step()
            ema.update()
        with ema.applied():
            evaluate(model)

    All ranks call its functions. Buffers are not averaged.
    """

    def __init__(self, model: shard.M, decay: float = 0.999) -> None:
        if not 0.0 <= decay <= 1.0:
            raise _C.UsageError(f"decay is {decay}; it must be between 0 and 1")
        self.decay = decay
        self._model = model
        self._average: dict[str, torch.Tensor] = {}
        self._take_weights()

    def update(self) -> None:
        """average = decay * average + (1 - decay) * weight, after a step; waits for the optimizer's updates."""
        for each in self._parts():
            self._average[each.name].lerp_(each.main_weight.to(torch.float32), 1.0 - self.decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[shard.M]:
        """While it is open, the model has the averaged weights; afterwards its main weights are as before, bit for bit."""
        before = {each.name: each.main_weight.clone() for each in self._parts()}
        self._set_weights(self._average)
        try:
            yield self._model
        finally:
            self._set_weights(before)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The whole average by name, on the CPU of rank 0; {} on other ranks."""
        found: dict[str, torch.Tensor] = {}
        with self.applied():
            export.export_weights(self._model, lambda name, value: found.update({name: value.to("cpu", copy=True)}),
                                  values="main")
        return {name: found[name] for name in self._average if name in found}

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Takes this rank's part of an average that state_dict() returned on any number of ranks."""
        for each in self._parts():
            value = state_dict.get(each.name)
            if value is None or list(value.shape) != each.shape:
                raise _C.UsageError(f"the average of '{each.name}' must have the shape {each.shape}, but state_dict has "
                                    f"{'none' if value is None else list(value.shape)}")
            part = value.flatten()[each.begin:each.begin + each.numel]
            self._average[each.name].copy_(part)

    def save(self, directory: str | os.PathLike[str], *, step: int = 0) -> None:
        """Saves the average as a sharded checkpoint, as fsdp.save() does: DIRECTORY/step-00000500."""
        with self.applied():
            checkpoint.save(directory, self._model, step=step)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Loads what save() saved, on any number of ranks."""
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]  # the checkpoint has some of its own
        with self.applied():
            checkpoint.load(path, self._model)
            self._take_weights()
        for buffer, value in buffers:
            buffer.copy_(value)

    def _parts(self) -> list[_C.ShardedParameter]:
        return [each for each in shard.handle(self._model).parameters() if each.is_trainable]

    def _take_weights(self) -> None:
        self._average = {each.name: each.main_weight.to(torch.float32, copy=True) for each in self._parts()}

    def _set_weights(self, values: dict[str, torch.Tensor]) -> None:
        shard.handle(self._model).set_main_weights(values)
