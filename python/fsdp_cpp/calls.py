"""Modules as units: whoever calls one, the engine gathers it before and is told after."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from . import _C, tensors

_UNIT = "_fsdp_cpp_unit"  # attribute of a module that is a unit


class _Unit:
    """What a module is as a unit, and what it had before."""

    def __init__(self, module: nn.Module, mirror: _C.Unit, name: str):
        self.mirror = mirror
        self.name = name
        self.own_forward = module.__dict__.get("forward")  # set on the module itself, not by its class
        self.compiled_call = module._compiled_call_impl
        self.is_gathered = False  # around a compiled call, for the forward inside


def make_unit(module: nn.Module, mirror: _C.Unit, name: str) -> None:
    unit = _Unit(module, mirror, name)
    module.__dict__[_UNIT] = unit
    module.forward = _forward(unit, module.forward)
    if unit.compiled_call is not None:
        module._compiled_call_impl = _gathered(unit, unit.compiled_call)
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


def _forward(unit, forward):
    """A forward and no pair of module hooks, so that a failing forward is seen, and direct calls of forward(), too."""
    # Dynamo does not trace this function, but the forward that it calls: the graph breaks at the unit.
    gathered = torch.compiler.disable(_gathered(unit, forward), recursive=False)

    # A compiled forward has attributes by which torch.compile would find its way around this function.
    @functools.wraps(forward, updated=())
    def unit_forward(*args, **kwargs):
        if unit.is_gathered:  # Dynamo goes on through this line: a compiled call is one graph
            return forward(*args, **kwargs)
        return gathered(*args, **kwargs)

    return unit_forward


def _compile(module, *args, **kwargs):
    """In place of module.compile(), which compiles a call of the module: the unit is gathered around that call."""
    module = module()
    type(module).compile(module, *args, **kwargs)
    unit = module.__dict__[_UNIT]
    unit.compiled_call = module._compiled_call_impl
    module._compiled_call_impl = _gathered(unit, unit.compiled_call)


def _gathered(unit: _Unit, function: Callable) -> Callable[..., Any]:
    """`function`, a forward or a compiled call that ends in one, with the unit gathered around it."""
    enter, leave = _outside_compiled_code()

    def call_unit(*args, **kwargs):
        call, args, kwargs = enter(unit.mirror, args, kwargs)
        was_gathered, unit.is_gathered = unit.is_gathered, function is unit.compiled_call
        try:
            return leave(call, function(*args, **kwargs))
        except BaseException:
            call.fail()
            raise
        finally:
            unit.is_gathered = was_gathered

    return call_unit


@functools.cache
def _outside_compiled_code():
    """The two ends of a call, which Dynamo does not trace at all. Not at import, because that imports the compiler."""
    return torch.compiler.disable(_enter), torch.compiler.disable(_leave)


def _enter(unit, args, kwargs):
    inputs = []
    tensors.collect(args, inputs)
    tensors.collect(kwargs, inputs)
    call, changed = unit.enter(inputs)
    if changed is None:
        return call, args, kwargs
    changed = iter(changed)
    try:
        return call, tensors.replaced(args, changed), tensors.replaced(kwargs, changed)
    except BaseException:  # of a container that cannot be copied
        call.fail()
        raise


def _leave(call, result):
    outputs = []
    tensors.collect(result, outputs)
    changed = call.leave(outputs)
    return result if changed is None else tensors.replaced(result, iter(changed))


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
