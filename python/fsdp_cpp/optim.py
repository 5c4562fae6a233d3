"""Optimizers for sharded models."""

import numbers
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import nn

from . import _C, shard

Params: TypeAlias = nn.Module | Iterable[nn.Parameter] | Iterable[dict[str, Any]]
OnNonfinite: TypeAlias = Literal["update", "skip"]
Updates: TypeAlias = Literal["hidden", "blocking"]
Rounding: TypeAlias = Literal["nearest", "stochastic"]
LossScale: TypeAlias = float | Literal["dynamic"]
AdjustLr: TypeAlias = Literal["original", "match_rms_adamw"]
Products: TypeAlias = Literal["single", "batched"]
AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)


class Optimizer(torch.optim.Optimizer):
    """What AdamW, SGD and Muon have in common. A torch.optim.Optimizer, so that torch's schedulers drive it: `lr` and `weight_decay`
    of a parameter group may change between steps. The state is the engine's, and in checkpoints (fsdp_cpp.save)."""

    def __init__(self, params: Params, make: Callable[[_C.Sharded, dict[str, Any]], _C.Optimizer], defaults: dict[str, Any],
                 options: dict[str, Any], decay_spares_vectors: bool) -> None:
        groups = _groups_of(params)
        model = params if isinstance(params, nn.Module) else shard.model_of(p for group in groups for p in group["params"])
        sharded = shard.handle(model)
        super().__init__(groups, defaults)
        self._fixed = {name: value for name, value in defaults.items() if name not in ("lr", "weight_decay")}
        self._parts = list(_parts_of(model, self.param_groups, decay_spares_vectors))
        self._check_groups()
        self._applied = self._wanted()
        rules = [(pattern, *wanted) for (_, _, pattern), wanted in zip(self._parts, self._applied)]
        self._engine = make(sharded, {**_our_names(defaults), "lr": self._rate(), **options, "rules": rules})

    def _rate(self):
        """The engine has one rate, of which each group has a fraction."""
        return max(group["lr"] for group in self.param_groups)

    def _wanted(self):
        """(weight decay, fraction of the rate) of every rule, as the groups say now."""
        rate = self._rate()
        return [(group["weight_decay"] if decays else 0.0, _rounded(group["lr"] / rate) if rate else 1.0)
                for group, decays, _ in self._parts]

    def _check_groups(self):
        for group in self.param_groups:
            for name in ("lr", "weight_decay"):
                if isinstance(group[name], bool) or not isinstance(group[name], numbers.Real):
                    raise _C.UsageError(f"{name} is {group[name]!r} ({type(group[name]).__name__}); it must be a number")
            for name, value in self._fixed.items():
                if group[name] != value:
                    raise _C.UsageError(f"{name} of a parameter group is {group[name]}, but {value} for the others; of groups only "
                                        "lr and weight_decay may differ or change")

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step with the gradients of this cycle; returns at once unless updates="blocking"."""
        if closure is not None:
            raise _C.UsageError("step() takes no closure: the gradients of one cycle are updated once")
        self.tell_engine()
        self._engine.step()

    def tell_engine(self) -> None:
        """Brings what schedulers have changed in the groups to the engine; step() does it, too."""
        self._check_groups()
        if self._engine.learning_rate != self._rate():
            self._engine.learning_rate = self._rate()
        for index, (wanted, applied) in enumerate(zip(self._wanted(), self._applied)):
            if wanted != applied:
                self._engine.set_rule(index, *wanted)
                self._applied[index] = wanted

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begins a new cycle; writes nothing."""
        self._engine.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Refused: it would be without the moments, which are cut over the ranks."""
        raise _C.UsageError("the state of the optimizer is cut over the ranks; save it with fsdp_cpp.save() or Checkpointer")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused, as state_dict() is."""
        raise _C.UsageError("the state of the optimizer is cut over the ranks; load it with fsdp_cpp.load() or Checkpointer")

    def wait(self) -> None:
        """Waits until all updates are done."""
        self._engine.wait()

    def gradient_norm(self) -> float:
        """The norm of all ranks' gradients of the last step, before clipping; needs max_norm or measures_norm."""
        return self._engine.gradient_norm()

    def was_skipped(self) -> bool:
        """Whether the last step changed nothing because of a NaN or Inf."""
        return self._engine.was_skipped()

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward() on, if losses are scaled."""
        return self._engine.scaled(loss)


def _groups_of(params):
    """A model, parameters or parameter groups as groups of trainable parameters."""
    groups = list(params.parameters()) if isinstance(params, nn.Module) else list(params)
    if groups and not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    groups = [dict(group, params=[p for p in group["params"] if p.requires_grad]) for group in groups]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise _C.UsageError("there is nothing to update; no parameter is trainable")
    return groups


def _trainable_names(model):
    """Names of the parameters that the engine updates, which must be those that require gradients now."""
    trainable = {each.name: each.is_trainable for each in shard.handle(model).parameters()}
    for name, parameter in model.named_parameters():
        if name in trainable and trainable[name] != parameter.requires_grad:
            raise _C.UsageError(f"requires_grad of parameter '{name}' has changed since fully_shard(), which has divided the "
                                f"trainable from the frozen; set it to {parameter.requires_grad} before fully_shard()")
    return {name for name, is_trainable in trainable.items() if is_trainable}


def _parts_of(model, groups, decay_spares_vectors):
    """(group, whether it decays, names as a pattern): a rule of the engine for each. Groups cover the model."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    left = _trainable_names(model)
    for group in groups:
        for parameter in group["params"]:
            if names.get(id(parameter)) not in left:
                raise _C.UsageError(f"parameter '{names.get(id(parameter))}' is not sharded: it came after fully_shard(), or is one "
                                    "of ignored_params; give it an optimizer of its own, and hand over the others in groups")
    for group in groups:
        for decays in (True, False):
            part = [p for p in group["params"] if decays == (not decay_spares_vectors or p.dim() > 1)]
            if part:
                left.difference_update(names[id(p)] for p in part)
                yield group, decays, "|".join(names[id(p)] for p in part)
    if left:
        raise _C.UsageError(f"parameter '{sorted(left)[0]}' is in no group, nor are {len(left) - 1} others; freeze them with "
                            "requires_grad_(False) before fully_shard(), or add a group with lr=0")


def _rounded(number):
    """As the engine keeps it: schedulers change a ratio of rates by an ulp, which is no change."""
    return torch.tensor(number, dtype=torch.float32).item()


def _our_names(defaults):
    options = {name: value for name, value in defaults.items() if name != "betas"}
    if "betas" in defaults:
        options["beta1"], options["beta2"] = defaults["betas"]
    return options


class AdamW(Optimizer):
    """Adam with decoupled weight decay, fused with clipping and casts into one pass beside the next forward.

    params: the sharded model, its parameters, or groups of them with `lr` and `weight_decay` of their own.
    max_norm: clips the gradients of all ranks to this norm; 0 for none.
    decay_spares_vectors: vectors and scalars (biases, norms) do not decay; torch.optim.AdamW lets them.
    first_moment, second_moment: types of the moments; bf16, fp16 and fp8 (torch.float8_e4m3fn) save memory.
    on_nonfinite: "skip" leaves everything as it is when a gradient of any rank is NaN or Inf.
    loss_scale: a number, or "dynamic", for fp16; call backward() on scaled(loss) then.
    updates: "hidden" beside the next work, or "blocking".
    rounding: "stochastic" for bf16 or fp16 weights without main weights.
    marks_changes: remembers which weights' bits have changed, for PatchStream.
    """

    def __init__(self, params: Params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 1e-2, *, max_norm: float = 0.0, decay_spares_vectors: bool = False,
                 first_moment: torch.dtype = torch.float32, second_moment: torch.dtype = torch.float32,
                 measures_norm: bool = False, on_nonfinite: OnNonfinite = "update", loss_scale: LossScale = 1.0,
                 loss_scale_interval: int = 2000, updates: Updates = "hidden", rounding: Rounding = "nearest",
                 seed: int = 0, marks_changes: bool = False) -> None:
        step = dict(max_norm=max_norm, measures_norm=measures_norm, on_nonfinite=on_nonfinite, loss_scale=loss_scale,
                    loss_scale_interval=loss_scale_interval, updates=updates, rounding=rounding, seed=seed,
                    marks_changes=marks_changes)
        super().__init__(params, _C.adamw, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay),
                         dict(step, first_moment=first_moment, second_moment=second_moment), decay_spares_vectors)


class SGD(Optimizer):
    """Stochastic gradient descent with momentum; the options that AdamW has, too, are the same."""

    def __init__(self, params: Params, lr: float = 1e-3, momentum: float = 0.0, weight_decay: float = 0.0,
                 nesterov: bool = False, *, max_norm: float = 0.0, decay_spares_vectors: bool = False,
                 momentum_dtype: torch.dtype = torch.float32, measures_norm: bool = False,
                 on_nonfinite: OnNonfinite = "update", loss_scale: LossScale = 1.0, loss_scale_interval: int = 2000,
                 updates: Updates = "hidden", rounding: Rounding = "nearest", seed: int = 0, marks_changes: bool = False) -> None:
        step = dict(max_norm=max_norm, measures_norm=measures_norm, on_nonfinite=on_nonfinite, loss_scale=loss_scale,
                    loss_scale_interval=loss_scale_interval, updates=updates, rounding=rounding, seed=seed,
                    marks_changes=marks_changes)
        super().__init__(params, _C.sgd, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov),
                         dict(step, momentum_dtype=momentum_dtype), decay_spares_vectors)


class Muon(Optimizer):
    """Muon for the matrices that fully_shard(matrices=...) names, and AdamW for everything else; the options that AdamW has, too,
    are the same. Each matrix is updated by its owner alone.

        model = fsdp.fully_shard(model, matrices="model.layers.*")
        optimizer = fsdp.Muon(model, lr=3e-4)

    momentum, nesterov, ns_coefficients, ns_steps, adjust_lr_fn: as those of torch.optim.Muon, but adjust_lr_fn is "match_rms_adamw"
        unless "original" is asked for, so that matrices and others share one learning rate.
    adamw_rate_scale: AdamW's learning rate, relative to that of matrices.
    products_dtype: torch.float32 or torch.bfloat16; None for bf16 on a device and fp32 on a CPU.
    products: "batched" multiplies equal shapes of a unit together; "single" gives the same bits whatever a rank owns.
    norm_eps: torch.optim.Muon's eps; eps is AdamW's.
    """

    def __init__(self, params: Params, lr: float = 1e-3, weight_decay: float = 0.1, momentum: float = 0.95, nesterov: bool = True,
                 ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315), ns_steps: int = 5,
                 adjust_lr_fn: AdjustLr = "match_rms_adamw", *, adamw_rate_scale: float = 1.0,
                 betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, norm_eps: float = 1e-7,
                 products_dtype: torch.dtype | None = None, products: Products = "single", max_norm: float = 0.0,
                 decay_spares_vectors: bool = False, momentum_dtype: torch.dtype = torch.float32,
                 first_moment: torch.dtype = torch.float32, second_moment: torch.dtype = torch.float32,
                 measures_norm: bool = False, on_nonfinite: OnNonfinite = "update", loss_scale: LossScale = 1.0,
                 loss_scale_interval: int = 2000, updates: Updates = "hidden", rounding: Rounding = "nearest",
                 seed: int = 0, marks_changes: bool = False) -> None:
        step = dict(max_norm=max_norm, measures_norm=measures_norm, on_nonfinite=on_nonfinite, loss_scale=loss_scale,
                    loss_scale_interval=loss_scale_interval, updates=updates, rounding=rounding, seed=seed,
                    marks_changes=marks_changes)
        a, b, c = ns_coefficients
        super().__init__(params, _C.muon,
                         dict(lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov, betas=betas, eps=eps),
                         dict(step, a=a, b=b, c=c, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn,
                              adamw_rate_scale=adamw_rate_scale, norm_eps=norm_eps, products_dtype=products_dtype,
                              products=products, momentum_dtype=momentum_dtype, first_moment=first_moment,
                              second_moment=second_moment), decay_spares_vectors)


def shard_optimizer(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Lets an element-wise optimizer of others update a sharded model: it then sees this rank's parts of the main weights.

        optimizer = fsdp.shard_optimizer(torch.optim.Adagrad(model.parameters(), lr=1e-2))

    Its parameter groups stay the same objects, so schedulers that were made before drive it; state that it has already is cut
    alike.
    Optimizers that look at whole matrices (Shampoo, Adafactor's factored moments) would see parts of them; they need
    fully_shard(granularity="tensor"), and even then a flattened view. Muon has a class of its own here.
    """
    if isinstance(optimizer, Optimizer):
        raise _C.UsageError(f"{type(optimizer).__name__} of fsdp_cpp is made for sharded models; use it as it is")
    model = shard.model_of(parameter for group in optimizer.param_groups for parameter in group["params"])
    sharded = shard.handle(model)
    if sharded.has_copied_main_weights:
        raise _C.UsageError("main weights are split or offloaded, so an optimizer cannot change them in place; call "
                            "fully_shard() with main_storage='separate' and without offload")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parts = {each.name: each for each in sharded.parameters()}
    owned: dict[str, nn.Parameter] = {}  # name -> this rank's part, as the optimizer sees it
    for group in optimizer.param_groups:
        mine = []
        for parameter in group["params"]:
            part = parts.get(names[id(parameter)])
            if part is None:  # one of ignored_params, whose gradients are this rank's own
                mine.append(parameter)
                continue
            state = optimizer.state.pop(parameter, {})
            if not part.is_trainable or part.main_weight.numel() == 0:  # or wholly on other ranks
                continue
            owned[part.name] = nn.Parameter(part.main_weight)
            mine.append(owned[part.name])
            if state:
                optimizer.state[owned[part.name]] = {key: _cut(value, part) for key, value in state.items()}
        group["params"][:] = mine

    def take_gradients(*_):
        sharded.wait_gradients()
        for each in sharded.parameters():
            if each.name in owned:
                owned[each.name].grad = each.gradient

    def refresh(*_):
        sharded.refresh_weights()

    def zero_grad(set_to_none=True):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        sharded.zero_grad()

    optimizer.register_step_pre_hook(take_gradients)
    optimizer.register_step_post_hook(refresh)
    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    return optimizer


def _cut(value, part):
    """This rank's part of what an optimizer keeps per element; anything else as it is."""
    if not isinstance(value, torch.Tensor) or list(value.shape) != part.shape or value.dim() == 0:
        return value
    return value.flatten()[part.begin:part.begin + part.main_weight.numel()].clone()


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Clips the gradients of all ranks together to this norm, and returns the norm before. All ranks call it, between
    backward() and step(); AdamW(max_norm=...) does it in the same pass as the update."""
    sharded = shard.handle(model)
    sharded.wait_gradients()
    parts = [each.gradient for each in sharded.parameters() if each.gradient is not None and each.gradient.numel() > 0]
    norm = sharded.squared_gradient_norm().sqrt().squeeze()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    for part in parts:
        part.mul_(factor.to(part.dtype))
    return norm.float()
