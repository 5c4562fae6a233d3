"""A training step that is recorded once as a CUDA graph and then replayed."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from . import _C, optim, shard


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
        self._optimizer = optimizer
        self._engine = _C.Graph(shard.handle(model), None if optimizer is None else optimizer._engine, step, warmup,
                                list(generators))

    def __call__(self) -> None:
        """One step; returns when it is queued."""
        if self._optimizer is not None:
            self._optimizer.tell_engine()  # a replay does not run step()
        self._engine.run()

    @property
    def is_recorded(self) -> bool:
        """Whether the next step is a replay."""
        return self._engine.is_recorded
