"""A training step that is recorded once as a CUDA graph and then replayed."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from . import _C, experts, optim, shard


class Graph:
    """Runs `step`, a function of no arguments, again and again: eager at first, then recorded, then replayed.

        def step():
            loss.copy_(model(input_ids=batch, labels=batch).loss.detach())
            ...

        step = fsdp.Graph(step, model, optimizer)
        for tokens in loader:
            batch.copy_(tokens)
            step()

    The function reads its input from tensors that stay, does the same in every step, and never waits for the device (item(),
    print of a tensor). A replay is bitwise what the function would have computed. docs/gpu.md tells more.
    """

    def __init__(self, step: Callable[[], object], model: nn.Module, optimizer: optim.Optimizer | None = None, *,
                 warmup: int = 3, generators: Iterable[torch.Generator] = ()) -> None:
        if optimizer is not None and not isinstance(optimizer, optim.Optimizer):
            raise _C.UsageError(f"optimizer is {type(optimizer).__name__}; a recorded step needs an optimizer of fsdp_cpp, whose "
                                "state stays on the device")
        if why := experts.why_not_recorded(model):
            raise _C.UsageError(f"a graph cannot record {why}")
        self._optimizer = optimizer
        self._engine = _C.Graph(shard.handle(model), None if optimizer is None else optimizer._engine,
                                _MasksOfEagerSteps(step), warmup, list(generators))

    def __call__(self) -> None:
        """One step; returns when it is queued."""
        if self._optimizer is not None:
            self._optimizer.tell_engine()  # a replay does not run step()
        self._engine.run()

    @property
    def is_recorded(self) -> bool:
        """Whether the next step is a replay."""
        return self._engine.is_recorded


class _MasksOfEagerSteps:
    """A step of a model of transformers with the masks of its eager calls, also while it is recorded.

    While a stream records, transformers reads no positions and no paddings, and makes a mask of all pairs in case there are several
    texts in a row: attention takes three times as long, and rounds otherwise. Here what the last eager call found stays, and every
    replay checks on the device that it holds.
    """

    def __init__(self, step: Callable[[], object]) -> None:
        self._step = step
        self._are_packed: list[bool] = []  # by the calls of find_packed_sequence_indices() in an eager step

    def __call__(self) -> None:
        masks: Any = sys.modules.get("transformers.masking_utils")
        if not hasattr(masks, "is_tracing") or not hasattr(masks, "find_packed_sequence_indices"):
            self._step()
            return
        is_recorded = torch.cuda.is_current_stream_capturing()
        is_tracing, find_packed = masks.is_tracing, masks.find_packed_sequence_indices
        if not is_recorded:
            self._are_packed = []
        answers = iter(self._are_packed)

        def reads_numbers(tensor=None):
            return (tensor is not None or torch.compiler.is_compiling()) and is_tracing(tensor)

        def find(positions):
            found = find_packed(positions)
            if not is_recorded:
                self._are_packed.append(found is not None)
            elif found is not None and not next(answers, True):
                torch._assert_async((found[:, -1] == 0).all(), "a recorded step got positions of several texts in a row, but was "
                                    "recorded for one text in each; record it with an attention_mask")
                found = None
            return found

        masks.is_tracing, masks.find_packed_sequence_indices = reads_numbers, find
        try:
            self._step()
        finally:
            masks.is_tracing, masks.find_packed_sequence_indices = is_tracing, find_packed
