"""Experts of gated MLPs, computed by one product for all experts, and shared out over the ranks of an ep group."""

import functools
import itertools

import torch
from torch import Tensor, nn

from . import _C
from .trying import ACTIVATIONS, KERNEL, Fits, becomes, computes_otherwise, copied, is_near, numbers, results

_EXPERTS = "_fsdp_cpp_experts"  # of a module whose experts compute so: their Ranks


class Ranks:
    """The ranks that share out the experts of a module, and what they have agreed on."""

    def __init__(self) -> None:
        self.ep: _C.Axis | None = None  # None: this rank has all experts
        self.agreed_tokens = -1         # of a padded exchange, which compares numbers where this one is another


def share_out(model: nn.Module, ep: _C.Axis) -> list[str]:
    """The experts of use_kernels() become those of the ranks of this axis. Returns the names of their parameters, of which every rank is
    to have its own slices."""
    names = []
    for name, module in model.named_modules():
        if _EXPERTS in module.__dict__:
            module.__dict__[_EXPERTS].ep = ep
            names += [f"{name}.{parameter}" if name else parameter for parameter in module._parameters]
    return names


def why_not_recorded(model: nn.Module) -> str:
    """Names experts that a graph cannot record, because the host multiplies them one by one; "" if there are none."""
    for name, module in model.named_modules():
        if _EXPERTS not in module.__dict__:
            continue
        for parameter in module._parameters.values():
            if parameter.dtype != torch.bfloat16:
                return f"the experts of '{name}', which compute in {parameter.dtype}: groups are one product in bf16 alone"
            if any(size % 8 for size in parameter.shape[1:]):
                return f"the experts of '{name}', whose matrices are {tuple(parameter.shape[1:])}: groups are one product where 8 divides sizes"
    return ""


def recognised(module: nn.Module) -> Fits | str | None:
    """The sum over the experts of a token, each times its weight: down(activation(gate(x)) * up(x)), where the gates and ups of all
    experts are one parameter [experts, 2 * inner, size] and the downs another, [experts, size, inner]."""
    matrices = _matrices_of(module)
    if matrices is None or "forward" in vars(module) or getattr(module, "_is_expert_parallel", False):
        return None
    into, down = matrices
    count, size, inner = module._parameters[into].shape[0], 8, 4  # products in groups want rows of 16 bytes
    small = {into: nn.Parameter(numbers(count, 2 * inner, size), requires_grad=False),
             down: nn.Parameter(numbers(count, size, inner), requires_grad=False)}
    chosen = torch.tensor([[0, count - 1], [count // 2, 0], [count - 1, count // 2 - 1], [1, 0], [0, 1]], device="cpu")
    inputs = [(numbers(5, size, scale=scale), chosen, numbers(5, 2).abs()) for scale in (1.0, 1e3)]  # large ones find what is clamped
    plain = type(module).forward
    tried = results(lambda probe, x: plain(probe, *x), [copied(module, mode, small) for mode in (True, False)], inputs)
    if tried is None:
        return None
    with torch.no_grad():
        for kind in ACTIVATIONS:
            if all(map(is_near, tried, [_mixed(*x, small[into], small[down], kind) for x in inputs] * 2)):
                return Fits("experts in groups", functools.partial(_becomes_grouped, module, into, down, kind))
    return computes_otherwise("experts of gated MLPs")


def _matrices_of(module) -> tuple[str, str] | None:
    """The names of both parameters."""
    if len(module._parameters) != 2 or any(each is None or each.dim() != 3 for each in module._parameters.values()):
        return None
    if any(True for child in module.children() for _ in child.parameters()):
        return None
    for into, down in itertools.permutations(module._parameters):
        count, rows, size = module._parameters[into].shape
        if count > 1 and tuple(module._parameters[down].shape) == (count, size, rows / 2):
            return into, down
    return None


def _mixed(x, chosen, weight, into, down, activation):
    """The formula, expert by expert."""
    results = torch.zeros_like(x)
    for token, (experts, weights) in enumerate(zip(chosen.tolist(), weight)):
        for expert, factor in zip(experts, weights):
            gate, up = (into[expert] @ x[token]).chunk(2)
            results[token] += factor * (down[expert] @ (ACTIVATIONS[activation](gate) * up))
    return results


def _becomes_grouped(module: nn.Module, into: str, down: str, activation: str) -> None:
    plain = type(module).forward

    def forward(self, *args, **kwargs):
        # Others are its own business, and so are its errors.
        if kwargs or len(args) != 3 or not all(isinstance(each, Tensor) and each.dim() == 2 for each in args):
            return plain(self, *args, **kwargs)
        return _mix(self.__dict__[_EXPERTS], *args, getattr(self, into), getattr(self, down), activation)

    becomes(module, forward, **{KERNEL: "experts in groups"})
    module.__dict__[_EXPERTS] = Ranks()


@torch.compiler.disable  # how many tokens an expert has is known when they are there
def _mix(ranks, tokens, chosen, weight, into, down, activation):
    if torch.is_autocast_enabled(tokens.device.type):
        dtype = torch.get_autocast_dtype(tokens.device.type)
        tokens, into, down = tokens.to(dtype), into.to(dtype), down.to(dtype)
    mixed, ranks.agreed_tokens = _C.mix_by_experts(tokens, chosen, weight.to(tokens.dtype), into, down, activation, ranks.ep,
                                                   ranks.agreed_tokens)
    return mixed
