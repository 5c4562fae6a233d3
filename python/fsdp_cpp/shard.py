"""fully_shard(): any torch.nn.Module on the engine, and what can be asked of the result."""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import _C, calls, experts, kernels as layer_kernels, ranks
from . import units as unit_selection

M = TypeVar("M", bound=nn.Module)

Named: TypeAlias = Literal["no_shard", "optim", "optim_grads", "optim_grads_params", "optim+hfsdp", "optim_grads+hfsdp",
                           "optim_grads_params+hfsdp"]
# Placements of parameter, gradient and optimizer on the outer and the inner axis; these are the legal ones.
Placements: TypeAlias = Literal["RR/PP/RR", "RR/PP/RS", "RR/PS/RS", "RS/PP/RS", "RS/PS/RS", "RR/PP/SS", "RR/PS/SS", "RR/SS/SS",
                                "RS/PP/SS", "RS/PS/SS", "RS/SS/SS", "SS/PP/SS", "SS/PS/SS", "SS/SS/SS"]
Strategy: TypeAlias = Named | Placements
MainStorage: TypeAlias = Literal["separate", "split"]
Weights: TypeAlias = Literal["bf16", "fp8-tensor", "fp8-row", "fp8-block", "mxfp8"]
WeightsGradient: TypeAlias = Literal["quantized", "plain"]
Pool: TypeAlias = Literal["on_demand", "double_buffer", "max_pool", "planned"]
OnMove: TypeAlias = Literal["follow", "refuse"]
OtherUnits: TypeAlias = Literal["on_demand", "persistent"]
UserBuffers: TypeAlias = Literal["off", "registered", "symmetric"]
Gradient: TypeAlias = Literal["mean", "sum"]
GradientLifetime: TypeAlias = Literal["persistent", "step"]
ReportNan: TypeAlias = Literal["off", "per_parameter"]
Collectives: TypeAlias = Literal["between_ranks", "always"]
TpPlacement: TypeAlias = _C.TpShard | _C.TpPartial | _C.TpEqual
InitialValues: TypeAlias = Literal["of_every_rank", "of_rank_zero"]

# Attributes that modules get, and parameters.
_ATTRIBUTE = "_fsdp_cpp_sharded"  # of a sharded model: the engine's handle
_PARAMETERS = "_fsdp_cpp_parameters"  # of a sharded model: its parameters by the names that the engine has
PENDING = "_fsdp_cpp_pending"     # of a model that is to be sharded when it is needed: a function that does it
MODEL = "_fsdp_cpp_model"         # of a parameter: a function that returns its model

# Arguments of fully_shard() that the engine does not know; all others are its options.
_OF_PYTHON = ("model", "mesh", "units", "kernels", "logits", "init_weights", "ignored_params")


def fully_shard(model: M, mesh: ranks.Over = None, units: unit_selection.Units = None, *,
                expert_parameters: str | Sequence[str] = (),
                tensor_parameters: Mapping[str, TpPlacement] | None = None,
                strategy: Strategy = "optim_grads_params", params: torch.dtype | None = None,
                main_params: torch.dtype | None = torch.float32, main_storage: MainStorage = "split",
                main_grads: torch.dtype | None = None, grad_comm: torch.dtype | None = None, weights: Weights = "bf16",
                weights_except: str | Sequence[str] = (), weights_gradient: WeightsGradient = "quantized", pool: Pool = "max_pool",
                prefetch: int = 1, pool_budget_bytes: int = 0, on_move: OnMove = "follow", other_units: OtherUnits = "on_demand",
                user_buffers: UserBuffers = "off", gradient: Gradient = "mean",
                gradient_lifetime: GradientLifetime = "persistent", offload: float = 0.0, offload_pin: bool = True,
                offload_overlap: bool = True, offload_chunk_numel: int = 1 << 20, report_nan: ReportNan = "off",
                collectives: Collectives = "between_ranks", granularity: str = "element",
                matrices: str | Sequence[str] | Mapping[str, Sequence[int] | None] = (),
                matrices_except: str | Sequence[str] = (), initial_values: InitialValues = "of_every_rank", device: torch.device | str | None = None,
                kernels: bool = False, logits: bool = True,
                init_weights: Callable[[nn.Module], object] | None = None,
                ignored_params: Iterable[nn.Parameter] | None = None) -> M:
    """Shards the parameters of a model in place over the ranks, unit by unit, and returns the model.

    All ranks call it with the same model. Modules inside that were sharded before become units of it. The model is then used as
    before:

        model = fsdp.fully_shard(model)
        optimizer = fsdp.AdamW(model, lr=3e-4)
        loss = model(input_ids=x, labels=x).loss
        loss.backward(); optimizer.step(); optimizer.zero_grad()

    mesh: None for all ranks of the job; fsdp.mesh(outer=2, ep=2, tp=2); a torch DeviceMesh of one or two dimensions (outer, inner); or a
        ProcessGroup.
    units: the modules that are gathered and reduced together: classes, names or patterns of names ("model.layers.*"),
        functions of a module, or a list of these. The model itself is always one. Default: the repeated blocks, the modules
        that hold them, and large layers beside them, which one line of the log names.
    expert_parameters: patterns of names ("*.experts.*", where `*` is any text, also over dots) of parameters with one slice per
        expert along their first dimension, of which the ranks of an ep group have their own alone.
    tensor_parameters: what the ranks of a tp group have of parameters, by patterns of names, of which the first that matches
        counts: {"*.up.weight": fsdp.TpShard(0), "*.norm.weight": fsdp.TpPartial()}. Others are equal.
    strategy: "no_shard", "optim", "optim_grads", "optim_grads_params" (ZeRO-0 to 3), the last three also with "+hfsdp", or
        three pairs of placements such as "RS/PS/SS".
    params: the type in which floating-point parameters compute; None for their own. Unlike model.bfloat16() it leaves the
        main weights unrounded.
    main_params: the type of the main weights, which the optimizer updates; None for the weights themselves.
    main_storage: "split" stores fp32 main weights of bf16 weights in 16 bits beside them; "separate" whole.
    main_grads, grad_comm: the types in which gradients are summed and in which they travel; None for the weights' own, and
        for that of main_grads.
    weights: how matrices of nn.Linear modules are gathered and multiplied: as params says ("bf16"), or in one byte with scales of the whole
        ("fp8-tensor"), of rows ("fp8-row"), of blocks ("fp8-block"), or "mxfp8". The head of a model of transformers stays as it is.
    weights_except: patterns of names of parameters that stay, too: "model.layers.0.*". weights_gradient: "quantized" or "plain" products.
    pool: where gathered weights live: "on_demand", "double_buffer", "max_pool" or "planned".
    prefetch, pool_budget_bytes: units gathered ahead; or as many as fit in so many bytes.
    on_move, other_units, user_buffers: see docs/memory.md and docs/gpu.md.
    gradient: "mean" or "sum" over ranks.
    gradient_lifetime: "persistent", or "step" to release main gradients in zero_grad().
    offload: the fraction of the optimizer's state that lives in host memory; offload_pin, offload_overlap and
        offload_chunk_numel say how.
    report_nan: "per_parameter" names the parameter, rank and microbatch of a NaN or Inf in a gradient, at some cost.
    collectives: "always" issues collectives on a single rank, too, to measure them.
    granularity: where a shard may end in a tensor: "element", "row", "block(N)" or "tensor".
    matrices: patterns of names of parameters whose matrices stay whole, each with one owner, for fsdp.Muon: "model.layers.*", of which
        those of two or more dimensions count. A dict gives the rows of fused ones: {"*.qkv_proj.weight": [1024, 256, 256]}.
    matrices_except: patterns of names of those that are left out.
    initial_values: "of_every_rank" (they must be equal) or "of_rank_zero" (sent to the others).
    device: of the shards; None for that of the parameters.
    kernels: lets modules compute with the engine's kernels where they compute the same; logits=False computes the loss of a causal
        language model of transformers without logits. See use_kernels().
    init_weights: for parameters on the meta device: a function of a module that sets the module's own parameters and buffers.
        Default: the model's _init_weights(module) as transformers has it, else the module's reset_parameters().
    ignored_params: parameters that stay as they are, whole and with gradients of each rank's own.

    docs/python.md tells more of each.
    """
    options = {name: value for name, value in locals().items() if name not in _OF_PYTHON}
    options.update(tensor_parameters=_as_dict(tensor_parameters), matrices=dict(matrices) if isinstance(matrices, Mapping) else matrices)
    if not isinstance(model, nn.Module):
        raise _C.UsageError(f"model is {type(model).__name__}; fully_shard() takes a torch.nn.Module")
    if is_sharded(model):
        raise _C.UsageError("the model is sharded already; a model can be sharded once")
    inner = _dissolved(model)
    chosen = unit_selection.find(model, units if not inner else [*inner, *unit_selection.listed(units)])
    over = ranks.default_mesh() if mesh is None else ranks.mesh(mesh)
    _use_kernels(model, over, kernels, logits)
    if over.ep.size > 1:
        options["expert_parameters"] = [*_as_list(expert_parameters), *experts.share_out(model, over.ep)]
    parameters = dict(model.named_parameters())
    _refuse_subclasses(parameters)
    multiplies_codes = weights != "bf16"
    linears = layer_kernels.plain_linears(model) if kernels or multiplies_codes else []
    mirrors = _Mirrors(model, chosen, init_weights, set(ignored_params or ()), set(linears))
    sharded = _C.fully_shard(mirrors.of[model], over, options)
    for module in linears:
        layer_kernels.multiply(module, multiplies_codes)
    for module, name in chosen.items():
        name = name or ("(model)" if "model" in model._modules else "model")  # as the engine calls it
        calls.make_unit(module, mirrors.of[module], name, mirrors.owned[module])
    model.__dict__[_ATTRIBUTE] = sharded
    model.__dict__[_PARAMETERS] = parameters
    for parameter in model.parameters():
        setattr(parameter, MODEL, weakref.ref(model))
    if units is None and not inner and over.world.rank == 0:
        _C.log_info(f"units: {unit_selection.described(chosen)}")
    return model


def _use_kernels(model, over, kernels, logits):
    if not kernels and logits:
        return
    used = layer_kernels.use_kernels(model, logits=logits) if kernels else layer_kernels.without_logits(model)
    if over.world.rank == 0:
        _C.log_info(str(used))


def _as_list(patterns):
    return [patterns] if isinstance(patterns, str) else patterns


def _as_dict(tensor_parameters):
    """The engine takes a dict; whatever is no mapping it names in its error."""
    return dict(tensor_parameters or {}) if isinstance(tensor_parameters, Mapping | None) else tensor_parameters


def _dissolved(model: nn.Module) -> list[nn.Module]:
    """Makes plain modules of those inside that are sharded already, as FSDP2's order from the inside out leaves them, and
    returns their units. Their parameters are whole for a moment, until the model is sharded."""
    units = []
    for module in list(model.modules()):
        if not is_sharded(module):
            continue
        over = handle(module).mesh
        if over.ep.size > 1 or over.tp.size > 1:
            raise _C.UsageError(f"a module inside is sharded with ep {over.ep.size} and tp {over.tp.size}, so this rank has slices of "
                                "its parameters; shard the whole model in one call, with units=...")
        with unshard(module):
            _refuse_rounding(module)
            values = [(parameter, parameter.detach().clone()) for parameter in module.parameters()]
        module.__dict__.pop(_ATTRIBUTE).close()
        del module.__dict__[_PARAMETERS]
        for parameter, value in values:
            parameter.data = value
        for unit in filter(calls.is_unit, list(module.modules())):
            calls.make_plain(unit)
            units.append(unit)
    return units


def _refuse_rounding(module: nn.Module) -> None:
    """Weights are all that is taken over; main weights that hold more would be rounded."""
    weights = parameters_of(module)
    for each in handle(module).parameters():
        mine, main = weights[each.name].detach().flatten()[each.begin:each.begin + each.numel], each.main_weight
        if not torch.equal(main, mine.to(main.dtype)):
            raise _C.UsageError(f"main weights of '{each.name}' hold more than its weights: the module was sharded with params=..., "
                                "or trained; shard it with the model around it alone, and give params there")


def _refuse_subclasses(parameters):
    for name, parameter in parameters.items():
        if is_traceable_wrapper_subclass(parameter):
            raise _C.UsageError(f"parameter '{name}' is a {type(parameter).__name__}, which has no memory of its own: parameters of "
                                "torch's tensor parallelism or of torchao cannot be sharded; hand over plain tensors, and see "
                                "fsdp_cpp.mesh(tp=...) with tensor_parameters")


class _Mirrors:
    """The module tree as the engine sees it, and what each unit owns of it."""

    def __init__(self, model, chosen, init_weights, ignored, linears):
        self._model = model
        self._init_weights = init_weights
        self._ignored = ignored
        self._linears = linears
        self.of = {}                                  # module -> its mirror
        self.owned = {unit: [] for unit in chosen}  # unit -> its parameters
        self._add(model, "", model)

    def _add(self, module, prefix, unit):
        if module in self.of:
            return self.of[module]
        is_unit = module in self.owned
        unit = module if is_unit else unit
        make = _C.Unit if is_unit else _C.Module
        self.of[module] = here = make(type(module).__name__, initialization(self._model, module, self._init_weights), module in self._linears)
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in self._ignored:
                here.add_parameter(name, parameter)
                self.owned[unit].append(calls.OwnedParameter(module._parameters, name, prefix + name))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                here.add_buffer(name, buffer)
        for name, child in module._modules.items():
            if child is not None:
                here.add_child(name, self._add(child, f"{prefix}{name}.", unit))
        return here


def initialization(model: nn.Module, module: nn.Module,
                   init_weights: Callable[[nn.Module], object] | None) -> Callable[[], object] | None:
    """A function that gives the module's own parameters and buffers their first values, or None."""
    if init_weights is not None:
        return lambda: init_weights(module)
    if hasattr(model, "_init_weights"):
        return lambda: model._init_weights(module)
    return getattr(module, "reset_parameters", None)


def is_sharded(model: nn.Module) -> bool:
    """Whether fully_shard() was called with this model."""
    return _ATTRIBUTE in unwrapped(model).__dict__


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside the wrappers that torch.compile() and activation checkpointing put around it."""
    while isinstance(model, nn.Module):
        inner = model._modules.get("_orig_mod") or model._modules.get("_checkpoint_wrapped_module")
        if inner is None:
            break
        model = inner
    return model


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a sharded model, by the names that they had in fully_shard(): wrappers that came later change names."""
    handle(model)
    return unwrapped(model).__dict__[_PARAMETERS]


def handle(model: nn.Module) -> _C.Sharded:
    """The engine's handle of a sharded model."""
    model = unwrapped(model)
    try:
        if _ATTRIBUTE not in model.__dict__ and PENDING in model.__dict__:
            model.__dict__[PENDING]()
        return model.__dict__[_ATTRIBUTE]
    except (AttributeError, KeyError):
        raise _C.UsageError(f"this {type(model).__name__} is not sharded; call fully_shard(model) before, and hand over "
                            "that same model") from None


def model_of(parameters: Iterable[nn.Parameter]) -> nn.Module:
    """The sharded model that all these parameters belong to."""
    models = {getattr(parameter, MODEL, lambda: None)() for parameter in parameters}
    model = models.pop() if len(models) == 1 else None
    if model is None:
        raise _C.UsageError("the parameters do not all belong to one sharded model; call fully_shard(model) before, and hand "
                            "over parameters of that model alone")
    return model


@contextlib.contextmanager
def unshard(model: M, *, write: bool = False) -> Iterator[M]:
    """While it is open, every parameter of the model is whole. With write=True changes become the value, made alike on all
    ranks. All ranks open it.

        with fsdp.unshard(model):
            print(model.lm_head.weight.norm())
    """
    whole = handle(model).whole_parameters(write, [])
    whole.enter()
    try:
        yield model
        if write:
            _take_over_replaced(model)
    finally:
        whole.exit()


@torch.no_grad()
def _take_over_replaced(model):
    """Parameters that were replaced by others (load_state_dict(assign=True)): the values are taken, and the old ones put back."""
    for unit in filter(calls.is_unit, unwrapped(model).modules()):
        for each in filter(calls.OwnedParameter.is_replaced, calls.owned_by(unit)):
            value = each.parameters.get(each.key)
            if value is None or value.shape != each.parameter.shape:
                raise _C.UsageError(f"parameter '{each.name}' was removed, or replaced by one of another shape, inside "
                                    "unshard(write=True); a sharded model keeps its parameters and their shapes")
            each.parameter.copy_(value)
            each.parameters[each.key] = each.parameter


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards inside are not the last of their cycle: gradients add up, and the reductions once per cycle wait."""
    sharded = handle(model)
    was_last = sharded.is_last_microbatch
    sharded.microbatch(False)
    try:
        yield
    finally:
        sharded.microbatch(was_last)


def microbatch(model: nn.Module, *, last: bool) -> None:
    """Acts as no_sync() until the next call: microbatch(model, last=i + 1 == n) before each of n backwards."""
    handle(model).microbatch(last)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Exact bytes of the engine's buffers on this rank, as requested from the allocator."""

    weights: int
    main_weights: int
    main_grads: int
    pool: int
    reduction: int
    moments: int
    workspace: int
    host: int
    total: int
    peak: int
    text: str = dataclasses.field(repr=False)

    def __str__(self) -> str:
        return self.text


def memory(model: nn.Module) -> Memory:
    """The bytes that the engine and the optimizer hold for this model."""
    sharded = handle(model)
    return Memory(**sharded.memory(), text=sharded.memory_text())


def set_precision(model: nn.Module, **precision: Any) -> None:
    """Changes the type in which gradients travel, between cycles: set_precision(model, grad_comm=torch.bfloat16)."""
    handle(model).set_precision(precision)


def found_nonfinite(model: nn.Module) -> bool:
    """Whether any rank's gradients of this cycle hold a NaN or Inf. All ranks call it."""
    return handle(model).found_nonfinite()


def end_cycle(model: nn.Module) -> None:
    """Ends this cycle of backwards: reduces gradients of which none was announced as the last, and waits. step() and
    clip_grad_norm_() do it, too. The next backward needs zero_grad() before it. All ranks call it."""
    handle(model).end_cycle("end_cycle()")


def reset(model: nn.Module) -> None:
    """After an exception in forward or backward: drops everything under way and this cycle's gradients. All ranks call it."""
    handle(model).reset()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's part of every gradient of this cycle: {name: one-dimensional tensor}; whole on one rank. Waits for the reductions;
    UsageError if there are none, or if they are not complete."""
    sharded = handle(model)
    sharded.check_complete("gradients()")
    gradients = ((each.name, each.gradient) for each in sharded.parameters())
    return {name: gradient for name, gradient in gradients if gradient is not None}
