"""Optimizers of others on a sharded model: they see this rank's parts of the main weights, as flat parameters."""

import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from . import _C, optim, shard

AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)

# Attributes of an optimizer that is wrapped.
_PARTS = "_fsdp_cpp_parts"
_KNOWS_RANKS = "_fsdp_cpp_knows_ranks"  # while a GradScaler that does calls its step()


class Parts:
    """The parts of a model's parameters that an optimizer updates, which stand for the parameters in its groups."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.sharded = shard.handle(model)
        if self.sharded.has_copied_main_weights:
            raise _C.UsageError("main weights are split or offloaded, so an optimizer cannot change them in place; call "
                                "fully_shard() with main_storage='separate' and without offload")
        self.all = self.sharded.parameters()
        self._by_name = {each.name: each for each in self.all}
        self.names = {id(parameter): name for name, parameter in shard.parameters_of(model).items()}
        self.owned: dict[str, nn.Parameter] = {}  # name -> the part, for what the optimizer updates and this rank has
        self.num_updates: dict[str, int] = {}     # name -> how many there were, for what the optimizer updates, on any rank

    def check(self, group: dict[str, Any]) -> None:
        """UsageError for a parameter that take() would not bring to the optimizer, or bring twice."""
        for parameter in group["params"]:
            part = self._part_of(parameter)
            if part is not None and part.name in self.num_updates:
                raise _C.UsageError(f"parameter '{part.name}' is in a group of the optimizer already")
            if part is not None and parameter.requires_grad and not part.is_trainable:
                raise _C.UsageError(f"parameter '{part.name}' was frozen in fully_shard(), so it has no gradients; set requires_grad "
                                    "before fully_shard(), and freeze it after that")

    def _part_of(self, parameter):
        return self._by_name.get(self.names.get(id(parameter), ""))

    def take(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        """Puts parts in the place of a group's parameters, and cuts the state that the optimizer has of them alike."""
        mine, names = [], []
        for index, parameter in enumerate(group["params"]):
            part = self._part_of(parameter)
            if part is None:  # one of ignored_params, whose gradients are this rank's own
                kept = parameter
            else:
                state = optimizer.state.pop(parameter, {})
                if not part.is_trainable:
                    continue
                self.num_updates[part.name] = 0
                if part.numel == 0:  # wholly on other ranks
                    continue
                kept = self.owned[part.name] = nn.Parameter(part.main_weight)
                if state:
                    optimizer.state[kept] = {key: _cut(value, part) for key, value in state.items()}
            mine.append(kept)
            if "param_names" in group:
                names.append(group["param_names"][index])
        group["params"][:] = mine
        if "param_names" in group:
            group["param_names"][:] = names

    def take_gradients(self) -> None:
        """Ends the cycle. Parts get their gradients, cast where the main weights have another type; none where no rank has one."""
        for part, gradient in zip(self.all, self.sharded.gradients_for_update()):
            if part.name in self.num_updates and gradient is not None:
                self.num_updates[part.name] += 1
            if part.name in self.owned:
                self.owned[part.name].grad = gradient

    def drop_gradients(self) -> None:
        for part in self.owned.values():
            part.grad = None


class _Wrapped:
    """Comes before the class of an optimizer that is wrapped."""

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch.amp.GradScaler asks; ours has said that it knows."""
        if self.__dict__.get(_KNOWS_RANKS):
            return False
        raise _C.UsageError("torch.amp.GradScaler does not know of ranks that have parts of gradients; use fsdp_cpp.GradScaler, which has "
                            "the same methods")

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """One step with the gradients of this cycle; a closure is called before it, to compute them."""
        loss = optim._called(closure)
        parts = self.__dict__[_PARTS]
        parts.take_gradients()
        try:
            result = super().step(*args, **kwargs)  # type: ignore[misc]
        finally:
            parts.drop_gradients()
        parts.sharded.refresh_weights()
        return result if closure is None else loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begins a new cycle."""
        super().zero_grad(set_to_none=True)  # type: ignore[misc]
        self.__dict__[_PARTS].sharded.zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Parameters of the same model."""
        super().add_param_group(param_group)  # type: ignore[misc]
        added = self.param_groups[-1]  # type: ignore[attr-defined]
        parts = self.__dict__[_PARTS]
        try:
            if shard.model_of(added["params"]) is not parts.model:
                raise _C.UsageError("add_param_group() got parameters of another model; give them an optimizer of their own")
            parts.check(added)
        except _C.UsageError:
            self.param_groups.pop()  # type: ignore[attr-defined]
            raise
        parts.take(self, added)

    step.hooked = True  # type: ignore[attr-defined]  # the step inside runs torch's hooks; load_state_dict() would add them here, too


def shard_optimizer(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Lets an element-wise optimizer of others update a sharded model: it then sees this rank's parts of the main weights.

        optimizer = fsdp.shard_optimizer(torch.optim.Adagrad(model.parameters(), lr=1e-2))

    It stays the same object with the same groups, so schedulers that were made before drive it; state that it has already is cut
    alike. Checkpointer, save() and load() take it as they take fsdp_cpp's own.
    Optimizers that look at whole matrices (Shampoo, Adafactor's factored moments) would see parts of them; they need
    fully_shard(granularity="tensor"), and even then a flattened view. Muon has a class of its own here.
    """
    if isinstance(optimizer, optim.Optimizer):
        raise _C.UsageError(f"{type(optimizer).__name__} of fsdp_cpp is made for sharded models; use it as it is")
    if is_wrapped(optimizer):
        raise _C.UsageError("the optimizer is wrapped already; shard_optimizer() is called once")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise _C.UsageError("LBFGS looks at all parameters at once, and would see this rank's parts alone; use an element-wise optimizer")
    model = shard.model_of(parameter for group in optimizer.param_groups for parameter in group["params"])
    parts = Parts(model)
    for group in optimizer.param_groups:
        parts.check(group)
    for group in optimizer.param_groups:
        parts.take(optimizer, group)
    optimizer.__dict__[_PARTS] = parts
    cls = type(optimizer)
    optimizer.__class__ = type(cls.__name__, (_Wrapped, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
    _follow_schedulers(optimizer)
    return optimizer


def _follow_schedulers(optimizer):
    """A scheduler that was made before has put its own function around the step of the class before, to see whether it is called."""
    if not hasattr(optimizer.__dict__.pop("step", None), "_wrapped_by_lr_sched"):
        return

    @functools.wraps(type(optimizer).step)
    def step(self, *args, **kwargs):
        self._opt_called = True
        return type(self).step(self, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = types.MethodType(step, optimizer)


def is_wrapped(optimizer: object) -> bool:
    return _PARTS in getattr(optimizer, "__dict__", {})


def parts_of(optimizer: torch.optim.Optimizer) -> Parts:
    return optimizer.__dict__[_PARTS]


def _cut(value, part):
    """This rank's part of what an optimizer keeps per element; anything else as it is."""
    if not isinstance(value, torch.Tensor) or list(value.shape) != part.shape or value.dim() == 0:
        return value
    return value.flatten()[part.begin:part.begin + part.numel].clone()


def clip_grad_norm_(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Clips the gradients of all ranks together to this norm, and returns the norm before. All ranks call it, between
    backward() and step(); AdamW(max_norm=...) does it in the same pass as the update."""
    return shard.handle(model).clip_gradients(max_norm)


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler for optimizers of shard_optimizer(): all ranks find the same Inf, and skip the same steps."""

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):  # type: ignore[no-untyped-def, override]
        if not is_wrapped(optimizer):
            raise _C.UsageError(f"fsdp_cpp.GradScaler got a {type(optimizer).__name__}; it is for optimizers of shard_optimizer(): fsdp_cpp's "
                                "own have loss_scale='dynamic', and for others there is torch.amp.GradScaler")
        sharded = parts_of(optimizer).sharded
        sharded.end_cycle("unscale_()")
        found_inf.fill_(float(sharded.found_nonfinite()))
        sharded.scale_gradients(inv_scale)
        return {inv_scale.device: found_inf}

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """optimizer.step(), unless a gradient of any rank is Inf or NaN."""
        optimizer.__dict__[_KNOWS_RANKS] = True
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            del optimizer.__dict__[_KNOWS_RANKS]
