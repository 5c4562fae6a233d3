"""An optimizer's part of a checkpoint: its tensors, the numbers of its groups, and how both come back."""

import json
from typing import Any

import torch

from . import _C, optim, other_optimizers


class SavedOptimizer:
    """One of fsdp_cpp's optimizers, one of shard_optimizer(), or None."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer
        is_ours = isinstance(optimizer, optim.Optimizer)
        self.engine = optimizer._engine if isinstance(optimizer, optim.Optimizer) else None
        if not (optimizer is None or is_ours or other_optimizers.is_wrapped(optimizer)):
            raise _C.UsageError(f"optimizer is {type(optimizer).__name__}, which does not know of ranks; checkpoints hold the state of "
                                "fsdp_cpp's optimizers and of those that shard_optimizer() has wrapped")

    def other(self) -> _C.OtherOptimizer | None:
        """The tensors of a wrapped optimizer, as they are now; loading fills them."""
        if self._optimizer is None or self.engine is not None:
            return None
        parts = other_optimizers.parts_of(self._optimizer)
        other = _C.OtherOptimizer()
        other.name = type(self._optimizer).__name__
        other.step = max(parts.num_updates.values(), default=0)
        tensors = {(name, key): value.float() for name, key, value in self._state() if _is_elementwise(value, parts.owned[name])}
        other.tensors = sorted({key for _, key in tensors})
        other.parts = tensors
        return other

    def settings(self) -> str:
        """All but the tensors that have a number for each of a parameter's: one text, equal on all ranks."""
        if self._optimizer is None:
            return ""
        settings: dict[str, Any] = {"param_groups": optim.group_values(self._optimizer)}
        if self.engine is None:
            settings["num_updates"] = other_optimizers.parts_of(self._optimizer).num_updates
            settings["scalars"] = self._scalars()
        return json.dumps(settings)

    def restore(self, other: _C.OtherOptimizer | None, found: _C.LoadedCheckpoint) -> None:
        """Brings back what other() and settings() had."""
        if self._optimizer is None:
            return
        settings = json.loads(found.optimizer or "{}")
        if other is not None:
            self._set_state(other, settings, found.optimizer_step)
        groups = settings.get("param_groups", [])
        if len(groups) == len(self._optimizer.param_groups):
            optim.load_groups(self._optimizer, groups)
        elif groups:
            _C.log_warning(f"{found.path} has {len(groups)} parameter groups, and the optimizer {len(self._optimizer.param_groups)}: rates and "
                           "decays stay as the optimizer was made")

    def _state(self):
        """(name of a parameter, key, value) of a wrapped optimizer's state, on this rank."""
        for name, part in other_optimizers.parts_of(self._optimizer).owned.items():
            for key, value in self._optimizer.state.get(part, {}).items():
                yield name, key, value

    def _scalars(self):
        """Numbers beside the tensors, but for the count of updates: they must be equal for all parameters."""
        parts = other_optimizers.parts_of(self._optimizer)
        scalars = {}
        for name, key, value in self._state():
            if _is_elementwise(value, parts.owned[name]) or key == "step" or value is None:
                continue
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                raise _C.UsageError(f"'{key}' of parameter '{name}' has the shape {list(value.shape)}; checkpoints hold the state of "
                                    "optimizers that keep one number for each of a parameter's")
            number = value.item() if isinstance(value, torch.Tensor) else value
            if scalars.setdefault(key, number) != number:
                raise _C.UsageError(f"'{key}' of parameter '{name}' is {number}, and {scalars[key]} of another; checkpoints hold one for all")
        return scalars

    def _set_state(self, other, settings, step):
        """By the optimizer's own load_state_dict(), which knows types and devices."""
        parts = other_optimizers.parts_of(self._optimizer)
        by_id = {id(part): name for name, part in parts.owned.items()}
        parts.num_updates = {name: settings.get("num_updates", {}).get(name, step) for name in parts.num_updates}
        loaded = self._optimizer.state_dict()
        positions = [p for group in self._optimizer.param_groups for p in group["params"]]
        for index, part in enumerate(positions):
            name = by_id.get(id(part))
            if name is None:  # one of ignored_params
                continue
            loaded["state"].pop(index, None)
            if (count := parts.num_updates[name]) > 0:
                tensors = {key: other.parts[name, key] for key in other.tensors if (name, key) in other.parts}
                scalars = {key: torch.tensor(float(value)) for key, value in settings.get("scalars", {}).items()}
                loaded["state"][index] = {"step": torch.tensor(float(count)), **scalars, **tensors}
        self._optimizer.load_state_dict(loaded)


def _is_elementwise(value, part):
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == part.numel()
