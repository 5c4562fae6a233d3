"""Modules as units: whoever calls one, the engine gathers it before and is told after."""

import concurrent.futures
import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from . import _C, tensors

_UNIT = "_fsdp_cpp_unit"  # attribute of a module that is a unit


class OwnedParameter:
    """A parameter of a unit, and the place where its module keeps it."""

    __slots__ = ("key", "name", "parameter", "parameters")

    def __init__(self, parameters: dict[str, nn.Parameter | None], key: str, name: str) -> None:
        self.parameters = parameters
        self.key = key
        self.name = name
        self.parameter = parameters[key]

    def is_replaced(self) -> bool:
        return self.parameters.get(self.key) is not self.parameter


class _Unit:
    """A module as a unit, and what it had before."""

    def __init__(self, module: nn.Module, mirror: _C.Unit, name: str, owned: Sequence[OwnedParameter]):
        self.mirror = mirror
        self.name = name
        self.owned = tuple(owned)
        self.own_forward = module.__dict__.get("forward")  # set on the module itself, not by its class
        self.compiled_call = module._compiled_call_impl
        self.is_gathered = False  # around a call, for the forward inside


def make_unit(module: nn.Module, mirror: _C.Unit, name: str, owned: Sequence[OwnedParameter]) -> None:
    unit = _Unit(module, mirror, name, owned)
    module.__dict__[_UNIT] = unit
    module.forward = _forward(unit, module)
    _gather_around_calls(module)
    module.compile = functools.partial(_compile, weakref.ref(module))
    module._apply = functools.partial(_refuse_conversion, weakref.ref(module))


def make_plain(module: nn.Module) -> None:
    unit = module.__dict__.pop(_UNIT)
    del module.forward, module.compile, module._apply
    if unit.own_forward is not None:
        module.forward = unit.own_forward
    module._compiled_call_impl = unit.compiled_call


def is_unit(module: nn.Module) -> bool:
    return _UNIT in module.__dict__


def unit_name(module: object) -> str:
    """The name of a unit in the engine."""
    try:
        return module.__dict__[_UNIT].name
    except (AttributeError, KeyError):
        raise _C.UsageError(f"this {type(module).__name__} is no unit of a sharded model") from None


def without_holding(module: nn.Module, method: str) -> Callable[..., Any]:
    """A method of the module's class as a function that does not keep the module alive: `del model` frees a sharded model at once."""
    weak = weakref.ref(module)
    function = getattr(type(module), method)

    def call(*args, **kwargs):
        return function(weak(), *args, **kwargs)

    return call


def named_like(wrapper: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """The wrapper with the name and signature of the module's forward. Others read them: transformers, which arguments a model takes."""
    forward = module.forward
    functools.update_wrapper(wrapper, forward, updated=())
    del wrapper.__wrapped__  # type: ignore[attr-defined]  # a bound method, which would hold the module
    wrapper.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    return wrapper


def _forward(unit, module):
    """A forward and no pair of module hooks, so that a failing forward is seen, and direct calls of forward(), too."""
    forward = unit.own_forward or without_holding(module, "forward")
    # Dynamo does not trace this function, but the forward that it calls: the graph breaks at the unit.
    gathered = torch.compiler.disable(_gathered(unit, forward), recursive=False)

    def unit_forward(*args, **kwargs):
        if unit.is_gathered:  # Dynamo goes on through this line: a compiled call is one graph
            return forward(*args, **kwargs)
        return gathered(*args, **kwargs)

    return named_like(unit_forward, module)


def _gather_around_calls(module):
    """Hooks that users register on a module (weight_norm, statistics) run around its forward, and read its weights, too. So a call is gathered
    as a whole; torch has this one place for it, which module.compile() uses."""
    unit = module.__dict__[_UNIT]
    call = unit.compiled_call or without_holding(module, "_call_impl")
    gathered = _gathered(unit, call)
    module._compiled_call_impl = gathered if unit.compiled_call else torch.compiler.disable(gathered, recursive=False)


def _compile(module, *args, **kwargs):
    """In place of module.compile(), which compiles a call of the module: the unit is gathered around that call."""
    module = module()
    type(module).compile(module, *args, **kwargs)
    module.__dict__[_UNIT].compiled_call = module._compiled_call_impl
    _gather_around_calls(module)


def _gathered(unit: _Unit, function: Callable) -> Callable[..., Any]:
    """`function`, a forward or a call that ends in one, with the unit gathered around it."""
    enter, leave = _outside_compiled_code()

    def call_unit(*args, **kwargs):
        call, loan, args, kwargs = enter(unit, args, kwargs)
        was_gathered, unit.is_gathered = unit.is_gathered, True
        try:
            return leave(call, loan, function(*args, **kwargs))
        except BaseException:
            call.fail()
            loan.take_back()
            raise
        finally:
            unit.is_gathered = was_gathered

    return call_unit


@functools.cache
def _outside_compiled_code():
    """The two ends of a call, which Dynamo does not trace at all. Not at import, because that imports the compiler; and in a thread,
    because that import leaves frames behind until the collector runs, and the callers' frames hold their model."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return tuple(thread.map(torch.compiler.disable, (_enter, _leave)))


def _enter(unit, args, kwargs):
    check_not_replaced(unit.owned)
    loan = tensors.Loan(args, kwargs)
    call, changed = unit.mirror.enter(loan.tensors)
    if changed is None:
        return call, loan, args, kwargs
    try:
        return call, loan, *loan.give(changed)
    except BaseException:  # of a container that cannot be changed
        call.fail()
        raise


def _leave(call, loan, result):
    loan.take_back()
    outputs: list[torch.Tensor] = []
    tensors.collect(result, outputs)
    filled_in = loan.filled_in(but=outputs)  # gradients come back through these, too
    changed = call.leave([*outputs, *filled_in])
    if changed is None:
        return result
    loan.put(zip(filled_in, changed[len(outputs):]))
    return tensors.replaced(result, iter(changed), in_place=loan.holders)


def check_not_replaced(owned: Sequence[OwnedParameter]) -> None:
    for each in owned:
        if each.is_replaced():
            raise _C.UsageError(f"parameter '{each.name}' is no longer the one that was sharded: load_state_dict(assign=True) or an "
                                "assignment replaced it by a tensor that training would neither update nor save; copy values into it, "
                                "under fsdp_cpp.unshard(model, write=True)")


def owned_by(module: nn.Module) -> tuple[OwnedParameter, ...]:
    """The parameters of a unit, as they were sharded."""
    return module.__dict__[_UNIT].owned


def _refuse_conversion(module, function, recurse=True):
    """In place of module._apply(), by which to(), half() and cuda() would give the parameters memory that the engine does not
    know. What changes neither type nor device is let through, and does nothing."""
    for parameter in module().parameters():
        probe = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        result = function(probe)
        if (result.dtype, result.device) != (probe.dtype, probe.device):
            raise _C.UsageError(f"the model is sharded in {probe.dtype} on {probe.device}, and is to become {result.dtype} on "
                                f"{result.device}; convert or move it before fully_shard()")
    return module()
