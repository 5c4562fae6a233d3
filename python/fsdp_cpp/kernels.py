"""The engine's kernels in place of a model's own layers, and a loss without logits.

What a module computes is found out by trying: a small copy of it on random numbers, beside the kernel. A module that differs is left
alone and named. Nothing depends on names of classes.
"""

import copy
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from . import _C

_NO_TARGET = -100

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": functools.partial(nn.functional.gelu, approximate="tanh"),
}


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
    """Lets modules of a model compute with the engine's kernels where they compute the same: RMS norms, gated MLPs (SiLU, GELU), and
    rotary positions. Before or without fully_shard(model, kernels=True), which calls it.

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
        before = getattr(type(module), _KERNEL, None)
        if before:
            used[before] = used.get(before, 0) + 1
        for recognise in (_rotary,) if before else (_norm, _gated_mlp, _rotary):
            found = recognise(module)
            if isinstance(found, _Fits):
                found.put_in_place()
                used[found.kernel] = used.get(found.kernel, 0) + 1
            elif found is not None:
                left[name or "(model)"] = found
    return Kernels(used, left)


def without_logits(model: nn.Module) -> Kernels:
    """The second half of use_kernels(model, logits=False) alone."""
    why = _leave_out_logits(model)
    if why:
        raise _C.UsageError(f"logits is False, but {why}")
    return Kernels({"loss without logits": 1}, {})


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, *, soft_cap: float = 0.0,
                         logit_bytes: int = _C.default_logit_bytes) -> Tensor:
    """The mean cross entropy of logits = hidden @ weight.T over the labels that are not -100, without all logits at once: head and
    loss are one operator, which works through the rows in pieces of `logit_bytes`.

    hidden: [..., size]; weight: [vocabulary, size]; labels: [...] of whole numbers, as many as hidden has rows; shift them before.
    soft_cap: logits are soft_cap * tanh(logits / soft_cap); 0 for none.
    """
    if hidden.shape[:-1] != labels.shape:
        raise _C.UsageError(f"labels have the shape {tuple(labels.shape)} and hidden {tuple(hidden.shape)}; each row of hidden needs one "
                            "label")
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    return torch.ops.fsdp_cpp.linear_cross_entropy(hidden, weight, labels.to(hidden.device, torch.int64), logit_bytes, soft_cap)


def plain_linears(model: nn.Module) -> set[nn.Module]:
    """Linear layers that compute as nn.Linear does, without the head, whose logits decide between words."""
    find_head = getattr(model, "get_output_embeddings", None)
    head = find_head() if callable(find_head) else None
    return {module for module in model.modules()
            if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and module is not head}


def multiply_codes(module: nn.Module) -> None:
    """Lets a linear layer of a sharded model compute with the codes that its weight may have."""
    def forward(self, input):
        return _linear(input, self.weight, self.bias)

    _becomes(module, forward)


@torch.compiler.disable
def _linear(input, weight, bias):
    if torch.is_autocast_enabled(input.device.type):
        input = input.to(weight.dtype)  # codes have no other
    return _C.linear(input, weight, bias)


# --- trying modules ------------------------------------------------------------------------------

_KERNEL = "_fsdp_cpp_kernel"  # of the class of a module that computes with one


@dataclasses.dataclass(frozen=True)
class _Fits:
    """A module that computes what a kernel does."""

    kernel: str
    put_in_place: Callable[[], None]


def _computes_otherwise(kernel: str) -> str:
    return f"computes another function than {kernel}"


def _copied(module: nn.Module, training: bool, parameters: dict | None = None, children: dict | None = None) -> nn.Module:
    """The module in training or not, with other parameters or children, and without hooks: a copy that nobody else sees."""
    probe = copy.copy(module)
    probe.__dict__ = dict(module.__dict__, training=training)
    for own in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        probe.__dict__[own] = {}
    probe.__dict__["_parameters"] = dict(module._parameters, **(parameters or {}))
    given = children or {}
    probe.__dict__["_modules"] = {name: given[name] if name in given else child and _copied(child, training)
                                  for name, child in module._modules.items()}
    return probe


def _results(function: Callable, copies: Iterable[nn.Module], inputs: Iterable[object], **kwargs) -> list | None:
    """Those of each copy for each input, on the CPU; None where they cannot be computed so."""
    try:
        with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
            return [function(each, x, **kwargs) for each in copies for x in inputs]
    except Exception:  # whatever a foreign module throws says that it is no such module
        return None


def _is_near(result: object, expected: Tensor) -> bool:
    if not isinstance(result, Tensor) or result.shape != expected.shape:
        return False
    return bool((result - expected).abs().max() <= 1e-4 * expected.abs().max())


def _numbers(*shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32) * scale


def _becomes(module: nn.Module, forward: Callable, **members: object) -> None:
    """Gives the module a subclass of its class with this forward, which has its class's name and signature."""
    own = type(module)

    def reduced(self, protocol):
        """For pickle, which finds classes by their names: an instance of the class that there is."""
        return own.__new__, (own,), self.__dict__

    def copied(self, memo):
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other.__dict__ = copy.deepcopy(self.__dict__, memo)
        return other

    functools.update_wrapper(forward, own.forward, updated=())
    forward.__signature__ = inspect.signature(own.forward)  # type: ignore[attr-defined]
    module.__class__ = type(own.__name__, (own,), {"forward": forward, "__module__": own.__module__, "__reduce_ex__": reduced,
                                                   "__deepcopy__": copied, **members})


# --- norms ---------------------------------------------------------------------------------------

def _norm(module: nn.Module) -> _Fits | str | None:
    """x / sqrt(mean(x^2) + eps) * (offset + weight)"""
    weight = module._parameters.get("weight")
    floats = [name for name, value in vars(module).items() if isinstance(value, float)]
    if list(module._parameters) != ["weight"] or module._modules or weight is None or weight.dim() != 1 or not floats:
        return None
    plain = type(module).forward
    w = _numbers(weight.numel())
    copies = [_copied(module, mode, {"weight": nn.Parameter(w, requires_grad=False)}) for mode in (True, False)]
    inputs = [_numbers(3, weight.numel(), scale=scale) for scale in (0.01, 1e3)]  # beside the small ones each eps counts
    results = _results(plain, copies, inputs)
    if results is None or "forward" in vars(module):
        return None
    for eps in floats:
        for offset in (0.0, 1.0):
            expected = [x * torch.rsqrt(x.square().mean(-1, keepdim=True) + getattr(module, eps)) * (offset + w) for x in inputs]
            if all(map(_is_near, results, expected * 2)):
                return _Fits("RMS norm", functools.partial(_becomes_norm, module, eps, offset))
    return _computes_otherwise("an RMS norm")


def _becomes_norm(module, eps, offset):
    plain = type(module).forward

    def forward(self, *args, **kwargs):
        # The kernel does not compute a gate beside the input or results of a wider type, and plain has its own errors.
        if kwargs or len(args) != 1 or self.weight.dtype != args[0].dtype or self.weight.shape != args[0].shape[-1:]:
            return plain(self, *args, **kwargs)
        return torch.ops.fsdp_cpp.rms_norm(args[0], self.weight, getattr(self, eps), offset)[0]

    _becomes(module, forward, **{_KERNEL: "RMS norm"})


# --- gated MLPs ----------------------------------------------------------------------------------

def _gated_mlp(module: nn.Module) -> _Fits | str | None:
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
            return _Fits(kernel, functools.partial(_becomes_gated, module, kernel, order, back, kind))
        refusal = refusal if order is None else _computes_otherwise("a gated MLP")
    return refusal


def _gate_of(module, linears, into, back) -> tuple[str, list[str] | None]:
    """The activation, and the order of gate and up. "" where it computes otherwise; without an order where it computes nothing so."""
    size, inner = 8, 6

    def small(linear, inputs, outputs, sign=1):
        probe = nn.Linear(inputs, outputs, bias=linear.bias is not None, device="cpu", dtype=torch.float32)
        probe.weight.data.copy_(_numbers(outputs, inputs, scale=sign))
        if probe.bias is not None:
            probe.bias.data.copy_(_numbers(outputs))
        return probe

    width = inner if len(into) == 2 else 2 * inner
    probes = {name: small(linears[name], size, width, sign) for name, sign in zip(into, (1, -1))}
    probes[back] = small(linears[back], inner, size)
    inputs = [_numbers(2, 3, size, scale=scale) for scale in (1.0, 1e3)]  # large numbers find what is clamped
    results = _results(type(module).forward, [_copied(module, mode, children=probes) for mode in (True, False)], inputs)
    if results is None:
        return "", None
    with torch.no_grad():
        for order in (into, into[::-1]) if len(into) == 2 else (into,):
            for kind, activation in _ACTIVATIONS.items():
                expected = []
                for x in inputs:
                    parts = [probes[name](x) for name in order]
                    gate, up = parts if len(parts) == 2 else parts[0].chunk(2, -1)
                    expected.append(probes[back](activation(gate) * up))
                if all(map(_is_near, results, expected * 2)):
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
        parts = [getattr(self, name)(args[0]) for name in into]
        return getattr(self, back)(torch.ops.fsdp_cpp.gated(parts[0], parts[1] if len(parts) == 2 else None, kind))

    _becomes(module, forward, **{_KERNEL: kernel})


# --- rotary positions ----------------------------------------------------------------------------

_ROTATE = "apply_rotary_pos_emb"  # the function that transformers' files of models have
_KERNEL_OF = "_fsdp_cpp_kernel_of"


def _rotary(module: nn.Module) -> _Fits | str | None:
    """Pairs of channels (i, i + half) that turn by an angle, of which half of the cosines and sines are read."""
    file = sys.modules.get(type(module).__module__)
    function = getattr(file, _ROTATE, None)
    if function is None or not any(name == _ROTATE for name in _names_in(type(module).forward)):
        return None
    if hasattr(function, _KERNEL_OF):
        return _Fits("rotary positions", lambda: None)
    q, k = _numbers(2, 4, 5, 8), _numbers(2, 2, 5, 8)

    def is_turned(batch, channels):
        angle = _numbers(batch, 5, channels // 2)
        tables = torch.cat((angle, angle), -1).cos(), torch.cat((angle, angle), -1).sin()
        results = _results(lambda _, heads: function(*heads, *tables), [module], [(q, k)])
        expected = _rotated(q, k, *(table[0] if batch == 1 else table for table in tables), 1)
        return results is not None and isinstance(results[0], tuple) and all(map(_is_near, results[0], expected))

    if not is_turned(1, 8) or not is_turned(2, 8):
        return _computes_otherwise("rotary positions of halves")
    return _Fits("rotary positions", functools.partial(_replace_rotation, file, function, is_turned(1, 4)))


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


# --- a loss without logits -----------------------------------------------------------------------

_HEAD = "_fsdp_cpp_computes_loss"  # of the class of a head that does
_TARGETS = "_fsdp_cpp_targets"     # of such a head, while its model wants the loss
_LOSS = "_fsdp_cpp_loss"           # of such a head: what it returned


def _leave_out_logits(model: nn.Module) -> str:
    """Lets the head compute the loss, where the model asks for nothing else. Why it cannot; "" where it does."""
    find_head = getattr(model, "get_output_embeddings", None)
    head = find_head() if callable(find_head) else None
    name = f"the model ({type(model).__name__})"
    if hasattr(type(head), _HEAD):
        return ""
    if not isinstance(inspect.getattr_static(model, "loss_function", None), property) or not isinstance(head, nn.Linear):
        return f"{name} is no causal language model of transformers with a linear head"
    if "forward" in vars(model) or "forward" in vars(head):
        return f"{name} is sharded or wrapped already; leave out its logits before"
    if head.bias is not None or type(head).forward is not nn.Linear.forward:
        return f"the head of {name} is no plain linear layer without a bias"
    cap = float(getattr(model.config, "final_logit_softcapping", None) or 0.0)
    if not _is_mean_of_logits(model, head, cap):
        return f"{name} computes its loss in another way than as the mean cross entropy of its head's logits"
    plain_forward, plain_head, plain_call = type(model).forward, type(head).forward, type(head).__call__
    plain_loss = inspect.getattr_static(model, "loss_function").fget

    def forward(self, *args, return_logits=False, **kwargs):
        head = self.get_output_embeddings()
        wants_logits = return_logits or not self.training or not hasattr(type(head), _HEAD)
        targets = None if wants_logits else _targets_of(kwargs)
        if targets is None:
            return plain_forward(self, *args, **kwargs)
        setattr(head, _TARGETS, targets)
        try:
            output = plain_forward(self, *args, **kwargs)
        finally:
            setattr(head, _TARGETS, None)
            setattr(head, _LOSS, None)
        return type(output)(**{name: value for name, value in output.items() if name != "logits"})

    def head_forward(self, input):
        targets = getattr(self, _TARGETS)
        return plain_head(self, input) if targets is None else linear_cross_entropy(input, self.weight, targets, soft_cap=cap)

    def call_head(self, *args, **kwargs):
        result = plain_call(self, *args, **kwargs)
        if getattr(self, _TARGETS) is not None:
            setattr(self, _LOSS, result)  # what the model does to its logits does not concern it
        return result

    def loss_of_head(self, logits, labels, vocab_size, num_items_in_batch=None, **kwargs):
        head = self.get_output_embeddings()
        loss = getattr(head, _LOSS, None)
        if loss is None:
            return plain_loss(self)(logits, labels, vocab_size, num_items_in_batch=num_items_in_batch, **kwargs)
        if num_items_in_batch is None:
            return loss.clone()  # models add to it in place
        count = (getattr(head, _TARGETS) != _NO_TARGET).sum().clamp_min(1)
        return loss * (count / num_items_in_batch)

    def refuse(self, function):
        raise _C.UsageError("loss_function of a model that computes its loss without logits cannot be replaced; set it before")

    _becomes(head, head_forward, __call__=call_head, **{_HEAD: True, _TARGETS: None, _LOSS: None})
    _becomes(model, forward, loss_function=property(lambda self: functools.partial(loss_of_head, self), refuse))
    return ""


def _targets_of(kwargs: dict) -> Tensor | None:
    """The label of each position; None where the model is asked for something else than the loss of all of them."""
    labels, shifted = kwargs.get("labels"), kwargs.get("shift_labels")
    keeps = kwargs.get("logits_to_keep", 0)
    if labels is None or not isinstance(keeps, int) or keeps != 0 or kwargs.get("return_dict") is False:
        return None
    ignored = kwargs.get("ignore_index", _NO_TARGET)
    if shifted is None:
        shifted = nn.functional.pad(labels, (0, 1), value=ignored)[..., 1:]
    return shifted if ignored == _NO_TARGET else shifted.masked_fill(shifted == ignored, _NO_TARGET)


def _is_mean_of_logits(model, head, cap) -> bool:
    """Tries the model's own forward with a small head, behind layers that return random numbers."""
    from transformers.modeling_outputs import MoeModelOutputWithPast

    hidden = _numbers(2, 5, 8)
    labels = torch.tensor([[3, 1, _NO_TARGET, 2, 4], [1, 0, 5, _NO_TARGET, 2]], device="cpu")

    class Layers(nn.Module):
        def forward(self, *args, **kwargs):
            return MoeModelOutputWithPast(last_hidden_state=hidden)

    small = nn.Linear(8, model.config.get_text_config().vocab_size, bias=False, device="cpu", dtype=torch.float32)
    small.weight.data.copy_(_numbers(small.out_features, 8))
    names = {id(head): small, id(getattr(model, model.base_model_prefix, None)): Layers()}
    replaced = {name: names[id(child)] for name, child in model._modules.items() if id(child) in names}
    copies = [_copied(model, mode, children=replaced) for mode in (True, False)]
    # The model adds its experts' loss by itself.
    given = {"output_router_logits": False} if hasattr(model.config, "output_router_logits") else {}
    given |= {"input_ids": torch.zeros(2, 5, dtype=torch.int64, device="cpu"), "labels": labels}
    num_items = [None, torch.tensor(11, device="cpu")]
    results = _results(lambda probe, items: type(probe).forward(probe, num_items_in_batch=items, **given).loss, copies, num_items)
    targets = nn.functional.pad(labels, (0, 1), value=_NO_TARGET)[..., 1:]
    with torch.no_grad():
        mean = linear_cross_entropy(hidden, small.weight, targets, soft_cap=cap)
    expected = [mean, mean * (targets != _NO_TARGET).sum() / num_items[1]]
    return results is not None and all(map(_is_near, results, expected * 2))
