"""Tries what a foreign module computes on a copy of it, and puts another way to compute it in its place."""

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

KERNEL = "_fsdp_cpp_kernel"  # of the class of a module that computes with one

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": functools.partial(nn.functional.gelu, approximate="tanh"),
}


@dataclasses.dataclass(frozen=True)
class Fits:
    """A module that computes what a kernel does."""

    kernel: str
    put_in_place: Callable[[], None]


def computes_otherwise(kernel: str) -> str:
    return f"computes another function than {kernel}"


def copied(module: nn.Module, training: bool, parameters: dict | None = None, children: dict | None = None) -> nn.Module:
    """The module in training or not, with other parameters or children, and without hooks: a copy that nobody else sees."""
    probe = copy.copy(module)
    probe.__dict__ = dict(module.__dict__, training=training)
    for own in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        probe.__dict__[own] = {}
    probe.__dict__["_parameters"] = dict(module._parameters, **(parameters or {}))
    given = children or {}
    probe.__dict__["_modules"] = {name: given[name] if name in given else child and copied(child, training)
                                  for name, child in module._modules.items()}
    return probe


def results(function: Callable, copies: Iterable[nn.Module], inputs: Iterable[object], **kwargs) -> list | None:
    """Those of each copy for each input, on the CPU; None where they cannot be computed so."""
    try:
        with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
            return [function(each, x, **kwargs) for each in copies for x in inputs]
    except Exception:  # whatever a foreign module throws says that it is no such module
        return None


def is_near(result: object, expected: Tensor) -> bool:
    if not isinstance(result, Tensor) or result.shape != expected.shape:
        return False
    return bool((result - expected).abs().max() <= 1e-4 * expected.abs().max())


def numbers(*shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32) * scale


def becomes(module: nn.Module, forward: Callable, **members: object) -> None:
    """Gives the module a subclass of its class with this forward, which has its class's name and signature."""
    own = type(module)

    def reduced(self, protocol):
        """For pickle, which finds classes by their names: an instance of the class that there is."""
        return own.__new__, (own,), {name: value for name, value in self.__dict__.items() if not name.startswith("_fsdp_cpp_")}

    def copied(self, memo):
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other.__dict__ = copy.deepcopy(self.__dict__, memo)
        return other

    functools.update_wrapper(forward, own.forward, updated=())
    forward.__signature__ = inspect.signature(own.forward)  # type: ignore[attr-defined]
    module.__class__ = type(own.__name__, (own,), {"forward": forward, "__module__": own.__module__, "__reduce_ex__": reduced,
                                                   "__deepcopy__": copied, **members})
