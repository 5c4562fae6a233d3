"""Patches of a sharded model's weights: what has changed since the one before, for inference engines (docs/weights-out.md)."""

import os
from typing import Literal

import torch
from torch import nn

from . import _C, checkpoint, optim, shard
from .saved_optimizer import SavedOptimizer

Patch = _C.Patch


class PatchStream:
    """A sequence of patches, of which the first is full. All ranks call everything, in the same order.

        optimizer = fsdp.AdamW(model, lr=1e-6, marks_changes=True)
        patches = fsdp.PatchStream(model, optimizer)
        patches.write("patches", 0)         # everything: receivers begin with it
        for step in range(1, last + 1):
            ...
            optimizer.step(); optimizer.zero_grad()
            patches.write("patches", step)  # what this step changed

    names: "hf" for those of the model's parameters; "vllm" for the fused tensors that vLLM has.
    """

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer, *, names: Literal["hf", "vllm"] = "hf") -> None:
        if names not in ("hf", "vllm"):
            raise _C.UsageError(f"names is {names!r}; use 'hf' or 'vllm'")
        self._engine = _C.PatchStream(shard.handle(model), SavedOptimizer(optimizer).engine, checkpoint._buffers(model),
                                      names == "vllm")

    def take(self, step: int, *, device: torch.device | str = "cpu") -> Patch:
        """This rank's part of the patch to the weights after `step`: base, begin (a step; None if it is full), end, and tensors
        with name, shape, positions and values, on `device`. If it fails, the next patch is a full one."""
        return self._engine.take(step, str(torch.device(device)))

    def write(self, directory: str | os.PathLike[str], step: int) -> str:
        """Writes the patch as a directory in `directory`, which appears when all ranks have written their part. Returns its path. If it
        fails, the next patch is a full one."""
        return self._engine.write(str(directory), step)
