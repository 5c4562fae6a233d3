"""Optimizers for sharded models."""

import ctypes
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import nn

from . import _C, shard

Params: TypeAlias = nn.Module | Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]] | Iterable[dict[str, Any]]
OnNonfinite: TypeAlias = Literal["update", "skip"]
Updates: TypeAlias = Literal["hidden", "blocking"]
WithoutGradient: TypeAlias = Literal["skip", "update"]
Rounding: TypeAlias = Literal["nearest", "stochastic"]
LossScale: TypeAlias = float | Literal["dynamic"]
AdjustLr: TypeAlias = Literal["original", "match_rms_adamw"]
Products: TypeAlias = Literal["single", "batched"]
AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)


class Optimizer(torch.optim.Optimizer):
    """The common part of AdamW, SGD and Muon. A torch.optim.Optimizer, so that torch's schedulers drive it: `lr` and `weight_decay`
    of a parameter group may change between steps, and for all groups together `betas` and `momentum`. Moments are the engine's, and
    in checkpoints (fsdp_cpp.save); state_dict() has the groups."""

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch.amp.GradScaler asks, before it looks for Inf in gradients of which each rank has a part."""
        raise _C.UsageError("torch.amp.GradScaler does not know of ranks that have parts of gradients; fsdp_cpp's optimizers scale losses "
                            "themselves: give loss_scale='dynamic', and call backward() on optimizer.scaled(loss)")

    def __init__(self, params: Params, make: Callable[[_C.Sharded, dict[str, Any]], _C.Optimizer], defaults: dict[str, Any],
                 options: dict[str, Any], decay_spares_vectors: bool) -> None:
        params = shard.unwrapped(params) if isinstance(params, nn.Module) else params
        groups = _groups_of(params)
        model = params if isinstance(params, nn.Module) else shard.model_of(p for group in groups for p in _tensors_of(group))
        sharded = shard.handle(model)
        super().__init__(groups, defaults)
        self._fixed = {name: value for name, value in defaults.items() if name not in ("lr", "weight_decay", *_MOMENTA)}
        self._parts = list(_parts_of(model, self.param_groups, decay_spares_vectors))
        self._check_groups()
        self._applied = self._wanted()
        self._applied_momenta = self._momenta()
        rules = [(pattern, *wanted) for (_, _, pattern), wanted in zip(self._parts, self._applied)]
        self._engine = make(sharded, {**_our_names(defaults), **self._momenta(), "lr": self._rate(), **options, "rules": rules})

    def _rate(self):
        """The engine has one rate, of which each group has a fraction."""
        return max(group["lr"] for group in self.param_groups)

    def _wanted(self):
        """(weight decay, fraction of the rate) of every rule, as the groups say now."""
        rate = self._rate()
        return [(group["weight_decay"] if decays else 0.0, _rounded(group["lr"] / rate) if rate else 1.0)
                for group, decays, _ in self._parts]

    def _momenta(self):
        return _our_names({name: value for name, value in self.param_groups[0].items() if name in _MOMENTA})

    def _check_groups(self):
        for group in self.param_groups:
            for name in ("lr", "weight_decay"):
                if isinstance(group[name], bool) or not isinstance(group[name], numbers.Real):
                    raise _C.UsageError(f"{name} is {group[name]!r} ({type(group[name]).__name__}); it must be a number")
            for name, value in self._fixed.items():
                if group[name] != value:
                    raise _C.UsageError(f"{name} of a parameter group is {group[name]}, but {value} for the others; of groups only "
                                        "lr and weight_decay may differ or change")
            for name in _MOMENTA:
                first = self.param_groups[0].get(name)
                if name in group and _as_tuple(group[name]) != _as_tuple(first):
                    raise _C.UsageError(f"{name} of a parameter group is {group[name]}, but {first} for the others; it may change "
                                        "for all groups together")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step with the gradients of this cycle; returns at once unless updates="blocking". A closure is called before it, to compute
        them, and its result is returned. Parameters that got no gradient on any rank are left alone (without_gradient)."""
        result = _called(closure)
        self.tell_engine()
        self._engine.step()
        return result

    def tell_engine(self) -> None:
        """Brings what schedulers have changed in the groups to the engine; step() does it, too."""
        self._check_groups()
        if self._engine.learning_rate != self._rate():
            self._engine.learning_rate = self._rate()
        for index, (wanted, applied) in enumerate(zip(self._wanted(), self._applied)):
            if wanted != applied:
                self._engine.set_rule(index, *wanted)
                self._applied[index] = wanted
        if (momenta := self._momenta()) != self._applied_momenta:
            self._engine.set_momenta(*(momenta.get(name) for name in ("beta1", "beta2", "momentum")))
            self._applied_momenta = momenta

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begins a new cycle; writes nothing."""
        self._engine.zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the optimizer is made: it updates everything that was trainable in fully_shard(), and nothing else."""
        if "_engine" in self.__dict__:
            raise _C.UsageError("add_param_group() cannot add to an optimizer of a sharded model, which updates all parameters that were "
                                "trainable in fully_shard() and no others; give parameters of another model an optimizer of their own, "
                                "and say groups when the optimizer is made")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The parameter groups, for schedules; without moments, which are cut over the ranks, and in checkpoints (fsdp_cpp.save)."""
        return {"state": {}, "param_groups": super().state_dict()["param_groups"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The groups of state_dict(). Moments are refused: fsdp_cpp.load() and Checkpointer load them."""
        if state_dict.get("state"):
            raise _C.UsageError("the state dict has moments, and those of a sharded model are cut over the ranks; save and load them "
                                "with fsdp_cpp.save(), fsdp_cpp.load() or Checkpointer")
        load_groups(self, state_dict["param_groups"])

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


# Keys of parameter groups that schedulers may change, for all groups together.
_MOMENTA = ("betas", "momentum")


def load_groups(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Gives the optimizer's groups the values of these, such as schedulers read and write: lr, initial_lr, weight_decay, ..."""
    own = optimizer.param_groups
    if len(groups) != len(own):
        raise _C.UsageError(f"{len(groups)} parameter groups are to be loaded, and the optimizer has {len(own)}; make it with the same groups")
    for group, values in zip(own, groups):
        group.update({name: _like(value, group.get(name)) for name, value in values.items() if name not in ("params", "param_names")})


def group_values(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The groups without their parameters, as far as JSON can hold them."""
    def holds(value):
        return value is None or isinstance(value, (bool, int, float, str)) or (
            isinstance(value, (list, tuple)) and all(map(holds, value)))

    def number(value):  # rates may be tensors
        return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value

    groups = [{name: number(value) for name, value in group.items() if name not in ("params", "param_names")}
              for group in optimizer.param_groups]
    return [{name: value for name, value in group.items() if holds(value)} for group in groups]


def _like(value, before):
    if isinstance(before, torch.Tensor):
        return torch.full_like(before, value)
    return tuple(value) if isinstance(before, tuple) else value


def _as_tuple(value):
    return tuple(value) if isinstance(value, (list, tuple)) else value


def _called(closure):
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _groups_of(params):
    """A model, parameters (named or not) or parameter groups as groups of trainable parameters."""
    groups = list(params.parameters()) if isinstance(params, nn.Module) else list(params)
    if groups and not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    groups = [dict(group, params=[p for p in _listed(group["params"]) if _tensor_of(p).requires_grad]) for group in groups]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise _C.UsageError("there is nothing to update; no parameter is trainable")
    return groups


def _listed(params):
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _tensor_of(parameter):
    """torch.optim takes (name, parameter), too."""
    return parameter[1] if isinstance(parameter, tuple) else parameter


def _tensors_of(group):
    return map(_tensor_of, group["params"])


def _trainable_names(model):
    """Names of the parameters that the engine updates, which must be those that require gradients now."""
    trainable = {each.name: each.is_trainable for each in shard.handle(model).parameters()}
    for name, parameter in shard.parameters_of(model).items():
        if name in trainable and trainable[name] != parameter.requires_grad:
            raise _C.UsageError(f"requires_grad of parameter '{name}' has changed since fully_shard(), which has divided the "
                                f"trainable from the frozen; set it to {parameter.requires_grad} before fully_shard()")
    return {name for name, is_trainable in trainable.items() if is_trainable}


def _names_of(model):
    """{id of a parameter: its name}, also of those that came after fully_shard()."""
    return {id(parameter): name for names in (model.named_parameters(), shard.parameters_of(model).items()) for name, parameter in names}


def _parts_of(model, groups, decay_spares_vectors):
    """(group, whether it decays, names as a pattern): a rule of the engine for each. Groups cover the model."""
    names = _names_of(model)
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
    """Rounds as the engine does: schedulers change a ratio of rates by an ulp, which is no change."""
    return ctypes.c_float(number).value


# Options of every optimizer's step, by the names of their keywords.
_OF_A_STEP = ("max_norm", "measures_norm", "on_nonfinite", "loss_scale", "loss_scale_interval", "updates", "without_gradient", "rounding",
              "seed", "marks_changes")


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
    without_gradient: parameters that no rank had a gradient of are left alone ("skip"), or updated with zeros ("update").
    rounding: "stochastic" for bf16 or fp16 weights without main weights.
    marks_changes: remembers which weights' bits have changed, for PatchStream.
    """

    def __init__(self, params: Params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 1e-2, *, max_norm: float = 0.0, decay_spares_vectors: bool = False,
                 first_moment: torch.dtype = torch.float32, second_moment: torch.dtype = torch.float32,
                 measures_norm: bool = False, on_nonfinite: OnNonfinite = "update", loss_scale: LossScale = 1.0,
                 loss_scale_interval: int = 2000, updates: Updates = "hidden",
                 without_gradient: WithoutGradient = "skip", rounding: Rounding = "nearest",
                 seed: int = 0, marks_changes: bool = False) -> None:
        step = {name: value for name, value in locals().items() if name in _OF_A_STEP}
        super().__init__(params, _C.adamw, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay),
                         dict(step, first_moment=first_moment, second_moment=second_moment), decay_spares_vectors)


class SGD(Optimizer):
    """Stochastic gradient descent with momentum; the options that AdamW has, too, are the same."""

    def __init__(self, params: Params, lr: float = 1e-3, momentum: float = 0.0, weight_decay: float = 0.0,
                 nesterov: bool = False, *, max_norm: float = 0.0, decay_spares_vectors: bool = False,
                 momentum_dtype: torch.dtype = torch.float32, measures_norm: bool = False,
                 on_nonfinite: OnNonfinite = "update", loss_scale: LossScale = 1.0, loss_scale_interval: int = 2000,
                 updates: Updates = "hidden",
                 without_gradient: WithoutGradient = "skip", rounding: Rounding = "nearest", seed: int = 0, marks_changes: bool = False) -> None:
        step = {name: value for name, value in locals().items() if name in _OF_A_STEP}
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
                 loss_scale_interval: int = 2000, updates: Updates = "hidden",
                 without_gradient: WithoutGradient = "skip", rounding: Rounding = "nearest",
                 seed: int = 0, marks_changes: bool = False) -> None:
        step = {name: value for name, value in locals().items() if name in _OF_A_STEP}
        a, b, c = ns_coefficients
        super().__init__(params, _C.muon,
                         dict(lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov, betas=betas, eps=eps),
                         dict(step, a=a, b=b, c=c, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn,
                              adamw_rate_scale=adamw_rate_scale, norm_eps=norm_eps, products_dtype=products_dtype,
                              products=products, momentum_dtype=momentum_dtype, first_moment=first_moment,
                              second_moment=second_moment), decay_spares_vectors)
