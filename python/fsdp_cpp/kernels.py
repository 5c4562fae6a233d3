"""The engine's kernels in place of a model's own layers.

What a module computes is found out by trying: a small copy of it on random numbers, beside the kernel. A module that differs is left
alone and named. Nothing depends on names of classes.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from . import _C, experts
from .head_loss import leave_out_logits
from .trying import ACTIVATIONS, KERNEL, Fits, becomes, computes_otherwise, copied, is_near, numbers, results


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The result of use_kernels(): how many modules compute with which kernel, and why others were left alone, by their names."""

    used: dict[str, int]
    left: dict[str, str]

    def __str__(self) -> str:
        used = ", ".join(f"{count} x {kernel}" for kernel, count in self.used.items()) or "none fits"
        names = list(self.left)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        left = "; left alone: " + ", ".join(f"{name} ({self.left[name]})" for name in names[:3]) + more if names else ""
        return f"kernels: {used}{left}"


def use_kernels(model: nn.Module, *, logits: bool = True) -> Kernels:
    """Lets modules of a model compute with the engine's kernels where they compute the same: RMS norms, gated MLPs (SiLU, GELU),
    rotary positions, and experts of gated MLPs. Before or without fully_shard(model, kernels=True), which calls it.

    logits: False computes the loss of a causal language model of transformers without its logits: a training forward with labels
        returns logits=None; eval() or forward(..., return_logits=True) returns them.

    Parameters, names, checkpoints and hooks stay as they are; modules get a subclass of their class. Rotary positions are a function of
    the file that has the model, which other models of it then use, too.
    """
    if not isinstance(model, nn.Module):
        raise _C.UsageError(f"model is {type(model).__name__}; use_kernels() takes a torch.nn.Module")
    used: dict[str, int] = {} if logits else without_logits(model).used
    left: dict[str, str] = {}
    for name, module in list(model.named_modules()):
        before = getattr(type(module), KERNEL, None)
        if before:
            used[before] = used.get(before, 0) + 1
        for recognise in (_rotary,) if before else (_norm, _gated_mlp, _rotary, experts.recognised):
            found = recognise(module)
            if isinstance(found, Fits):
                found.put_in_place()
                used[found.kernel] = used.get(found.kernel, 0) + 1
            elif found is not None:
                left[name or "(model)"] = found
    return Kernels(used, left)


def without_logits(model: nn.Module) -> Kernels:
    """The second half of use_kernels(model, logits=False) alone."""
    why = leave_out_logits(model)
    if why:
        raise _C.UsageError(f"logits is False, but {why}")
    return Kernels({"loss without logits": 1}, {})


# --- linear layers of a sharded model ------------------------------------------------------------

_PRODUCTS = "_fsdp_cpp_products"  # of the class of a linear layer: its function of one input and several weights


def plain_linears(model: nn.Module) -> list[nn.Module]:
    """Linear layers that compute as nn.Linear does, without the head, whose logits decide between words."""
    find_head = getattr(model, "get_output_embeddings", None)
    head = find_head() if callable(find_head) else None
    return [module for module in model.modules()
            if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and module is not head]


def multiply(module: nn.Module, codes: bool) -> None:
    """Lets a linear layer write the gradient of its weight where it is added up, and compute with the codes that the weight may have."""
    products = _products_of_codes if codes else _products

    def forward(self, input):
        return products(input, [self.weight], [self.bias])[0]

    becomes(module, forward, **{_PRODUCTS: staticmethod(products)})


def _products(input, weights, biases):
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(input.device.type):
        return [nn.functional.linear(input, weight, bias) for weight, bias in zip(weights, biases)]
    return _C.linear(input, weights, biases)


@torch.compiler.disable
def _products_of_codes(input, weights, biases):
    if torch.is_autocast_enabled(input.device.type):
        input = input.to(weights[0].dtype)  # codes have no other
    return _C.linear(input, weights, biases)


def _outputs_of(linears: list[nn.Module], input: Tensor) -> list[Tensor]:
    """Those of layers with one input, at once where nobody sees the difference: the input is quantised once, and products of the backward
    add up its gradient."""
    products = getattr(type(linears[0]), _PRODUCTS, None)
    are_alike = all(getattr(type(linear), _PRODUCTS, None) is products for linear in linears)
    if products is None or not are_alike or torch.compiler.is_compiling() or any(map(_is_seen, linears)):
        return [linear(input) for linear in linears]
    return products(input, [linear.weight for linear in linears], [linear.bias for linear in linears])


def _is_seen(module) -> bool:
    """Whether a call of the module is more than its forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
                or module._compiled_call_impl or "forward" in vars(module))


# --- norms ---------------------------------------------------------------------------------------

def _norm(module: nn.Module) -> Fits | str | None:
    """x / sqrt(mean(x^2) + eps) * (offset + weight)"""
    weight = module._parameters.get("weight")
    floats = [name for name, value in vars(module).items() if isinstance(value, float)]
    if list(module._parameters) != ["weight"] or module._modules or weight is None or weight.dim() != 1 or not floats:
        return None
    plain = type(module).forward
    w = numbers(weight.numel())
    copies = [copied(module, mode, {"weight": nn.Parameter(w, requires_grad=False)}) for mode in (True, False)]
    inputs = [numbers(3, weight.numel(), scale=scale) for scale in (0.01, 1e3)]  # beside the small ones each eps counts
    tried = results(plain, copies, inputs)
    if tried is None or "forward" in vars(module):
        return None
    for eps in floats:
        for offset in (0.0, 1.0):
            expected = [x * torch.rsqrt(x.square().mean(-1, keepdim=True) + getattr(module, eps)) * (offset + w) for x in inputs]
            if all(map(is_near, tried, expected * 2)):
                return Fits("RMS norm", functools.partial(_becomes_norm, module, eps, offset))
    return computes_otherwise("an RMS norm")


def _becomes_norm(module, eps, offset):
    plain = type(module).forward

    def forward(self, *args, **kwargs):
        # The kernel does not compute a gate beside the input or results of a wider type, and plain has its own errors.
        if kwargs or len(args) != 1 or self.weight.dtype != args[0].dtype or self.weight.shape != args[0].shape[-1:]:
            return plain(self, *args, **kwargs)
        return torch.ops.fsdp_cpp.rms_norm(args[0], self.weight, getattr(self, eps), offset)[0]

    becomes(module, forward, **{KERNEL: "RMS norm"})


# --- gated MLPs ----------------------------------------------------------------------------------

def _gated_mlp(module: nn.Module) -> Fits | str | None:
    """down(activation(gate(x)) * up(x)), gate and up in one matrix or in two"""
    linears = {name: child for name, child in module._modules.items() if isinstance(child, nn.Linear)}
    others = [child for name, child in module._modules.items() if name not in linears]
    if module._parameters or any(True for child in others for _ in child.parameters()):
        return None
    if "forward" in vars(module):
        return None
    refusal = None
    for into, back in _directions(linears):
        kind, order = _gate_of(module, linears, into, back)
        if kind:
            kernel = "gated SiLU" if kind == "silu" else "gated GELU"
            return Fits(kernel, functools.partial(_becomes_gated, module, kernel, order, back, kind))
        refusal = refusal if order is None else computes_otherwise("a gated MLP")
    return refusal


def _gate_of(module, linears, into, back) -> tuple[str, list[str] | None]:
    """The activation, and the order of gate and up. "" where it computes otherwise; without an order where it computes nothing so."""
    size, inner = 8, 6

    def small(linear, inputs, outputs, sign=1):
        probe = nn.Linear(inputs, outputs, bias=linear.bias is not None, device="cpu", dtype=torch.float32)
        probe.weight.data.copy_(numbers(outputs, inputs, scale=sign))
        if probe.bias is not None:
            probe.bias.data.copy_(numbers(outputs))
        return probe

    width = inner if len(into) == 2 else 2 * inner
    probes = {name: small(linears[name], size, width, sign) for name, sign in zip(into, (1, -1))}
    probes[back] = small(linears[back], inner, size)
    inputs = [numbers(2, 3, size, scale=scale) for scale in (1.0, 1e3)]  # large numbers find what is clamped
    tried = results(type(module).forward, [copied(module, mode, children=probes) for mode in (True, False)], inputs)
    if tried is None:
        return "", None
    with torch.no_grad():
        for order in (into, into[::-1]) if len(into) == 2 else (into,):
            for kind, activation in ACTIVATIONS.items():
                expected = []
                for x in inputs:
                    parts = [probes[name](x) for name in order]
                    gate, up = parts if len(parts) == 2 else parts[0].chunk(2, -1)
                    expected.append(probes[back](activation(gate) * up))
                if all(map(is_near, tried, expected * 2)):
                    return kind, order
    return "", into


def _directions(linears: dict[str, nn.Linear]) -> Iterator[tuple[list[str], str]]:
    """The names of those that may go in, gate and up or one of both, and of the one that goes back."""
    for back, down in linears.items():
        into = [name for name in linears if name != back]
        fits = [linears[name].in_features == down.out_features and
                linears[name].out_features * len(into) == 2 * down.in_features for name in into]
        if len(into) in (1, 2) and all(fits):
            yield into, back


def _becomes_gated(module, kernel, into, back, kind):
    plain = type(module).forward

    def forward(self, *args, **kwargs):
        if kwargs or len(args) != 1:
            return plain(self, *args, **kwargs)
        parts = _outputs_of([getattr(self, name) for name in into], args[0])
        return getattr(self, back)(torch.ops.fsdp_cpp.gated(parts[0], parts[1] if len(parts) == 2 else None, kind))

    becomes(module, forward, **{KERNEL: kernel})


# --- rotary positions ----------------------------------------------------------------------------

_ROTATE = "apply_rotary_pos_emb"  # the function that transformers' files of models have
_KERNEL_OF = "_fsdp_cpp_kernel_of"


def _rotary(module: nn.Module) -> Fits | str | None:
    """Pairs of channels (i, i + half) that turn by an angle, of which half of the cosines and sines are read."""
    file = sys.modules.get(type(module).__module__)
    function = getattr(file, _ROTATE, None)
    if function is None or not any(name == _ROTATE for name in _names_in(type(module).forward)):
        return None
    if hasattr(function, _KERNEL_OF):
        return Fits("rotary positions", lambda: None)
    q, k = numbers(2, 4, 5, 8), numbers(2, 2, 5, 8)

    def is_turned(batch, channels):
        angle = numbers(batch, 5, channels // 2)
        tables = torch.cat((angle, angle), -1).cos(), torch.cat((angle, angle), -1).sin()
        tried = results(lambda _, heads: function(*heads, *tables), [module], [(q, k)])
        expected = _rotated(q, k, *(table[0] if batch == 1 else table for table in tables), 1)
        return tried is not None and isinstance(tried[0], tuple) and all(map(is_near, tried[0], expected))

    if not is_turned(1, 8) or not is_turned(2, 8):
        return computes_otherwise("rotary positions of halves")
    return Fits("rotary positions", functools.partial(_replace_rotation, file, function, is_turned(1, 4)))


def _names_in(function: Any) -> Iterator[str]:
    """The global names that a function, or one that it wraps, reads."""
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None:
            yield from code.co_names
        function = getattr(function, "__wrapped__", None)


def _rotated(q, k, cosine, sine, heads_dim):
    channels = cosine.shape[-1]
    half_cosine, half_sine = (table[..., :channels // 2].float().contiguous() for table in (cosine, sine))
    query, key = (x if heads_dim == 2 else x.transpose(1, 2) for x in (q, k))
    if channels == q.shape[-1]:
        query, key = torch.ops.fsdp_cpp.rotate(query, key, half_cosine, half_sine, False)
    else:
        turned = torch.ops.fsdp_cpp.rotate(query[..., :channels], key[..., :channels], half_cosine, half_sine, False)
        query, key = (torch.cat((part, x[..., channels:]), -1) for part, x in zip(turned, (query, key)))
    return (query, key) if heads_dim == 2 else (query.transpose(1, 2), key.transpose(1, 2))


def _replace_rotation(file, function, knows_partial):
    if hasattr(getattr(file, _ROTATE), _KERNEL_OF):
        return

    @functools.wraps(function)
    def rotate(*args, **kwargs):
        heads_dim = kwargs.get("unsqueeze_dim", 1)
        if len(args) == 4 and kwargs.keys() <= {"unsqueeze_dim"} and _has_tables(*args, heads_dim, knows_partial):
            q, k, cosine, sine = args
            return _rotated(q, k, *(table[0] if table.shape[0] == 1 else table for table in (cosine, sine)), heads_dim)
        return function(*args, **kwargs)

    setattr(rotate, _KERNEL_OF, function)
    setattr(file, _ROTATE, rotate)


def _has_tables(q, k, cosine, sine, heads_dim, knows_partial) -> bool:
    """Whether there is an angle for each position, of all sequences or of each."""
    if heads_dim not in (1, 2) or q.dim() != 4 or k.dim() != 4 or cosine.dim() != 3 or cosine.shape != sine.shape:
        return False
    positions = 3 - heads_dim
    channels = cosine.shape[2]
    return (q.dtype == k.dtype and q.shape[0] == k.shape[0] and q.shape[positions] == k.shape[positions] == cosine.shape[1]
            and q.shape[3] == k.shape[3] and cosine.shape[0] in (1, q.shape[0])
            and (channels == q.shape[3] or knows_partial and channels < q.shape[3]))
