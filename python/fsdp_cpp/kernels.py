"""The engine's kernels in place of a model's own layers, and a loss without logits.

What a module computes is found out by trying: a small copy of it on random numbers, beside the kernel. A module that differs is left
alone and named. Nothing depends on names of classes.
"""

import copy
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator

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
    used: dict[str, int] = {}
    left: dict[str, str] = {}
    for name, module in list(model.named_modules()):
        for recognise in (_norm, _gated_mlp, _rotary):
            found = recognise(module)
            if isinstance(found, _Fits):
                found.put_in_place()
                used[found.kernel] = used.get(found.kernel, 0) + 1
            elif found is not None:
                left[name or "(model)"] = found
    if not logits:
        used |= without_logits(model).used
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


# --- trying modules ------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class _Fits:
    """A module that computes what a kernel does."""

    kernel: str
    put_in_place: Callable[[], None]


def _computes_otherwise(kernel: str) -> str:
    return f"computes another function than {kernel}"


def _copied(module: nn.Module, parameters: dict | None = None, children: dict | None = None) -> nn.Module:
    """The module with other parameters or children, and without hooks: a copy that nobody else sees."""
    probe = copy.copy(module)
    probe.__dict__ = dict(module.__dict__)
    for own in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        probe.__dict__[own] = {}
    probe.__dict__["_parameters"] = dict(module._parameters, **(parameters or {}))
    probe.__dict__["_modules"] = dict(module._modules, **(children or {}))
    return probe


def _output(function: Callable, *args, **kwargs) -> object | None:
    """Its result on the CPU; None where it cannot take these arguments."""
    try:
        with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs)
    except Exception:  # whatever a foreign module throws says that it is no such module
        return None


def _is_near(result: object, expected: Tensor) -> bool:
    return isinstance(result, Tensor) and result.shape == expected.shape and torch.allclose(
        result.float(), expected.float(), rtol=1e-4, atol=1e-6)


def _numbers(*shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32) * scale


def _becomes(module: nn.Module, forward: Callable, **members: object) -> None:
    """Gives the module a subclass of its class with this forward, which has its class's name and signature."""
    own = type(module)
    functools.update_wrapper(forward, own.forward, updated=())
    forward.__signature__ = inspect.signature(own.forward)  # type: ignore[attr-defined]
    module.__class__ = type(own.__name__, (own,), {"forward": forward, "__module__": own.__module__, **members})


# --- norms ---------------------------------------------------------------------------------------

def _norm(module: nn.Module) -> _Fits | str | None:
    """x / sqrt(mean(x^2) + eps) * (offset + weight)"""
    weight = module._parameters.get("weight")
    floats = [name for name, value in vars(module).items() if isinstance(value, float)]
    if list(module._parameters) != ["weight"] or module._modules or weight is None or weight.dim() != 1 or not floats:
        return None
    # Small numbers, beside which each eps counts.
    x, w = _numbers(3, weight.numel(), scale=0.01), _numbers(weight.numel())
    result = _output(_copied(module, {"weight": nn.Parameter(w, requires_grad=False)}).forward, x)
    if result is None:
        return None
    for eps in floats:
        for offset in (0.0, 1.0):
            expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + getattr(module, eps)) * (offset + w)
            if _is_near(result, expected):
                return _Fits("RMS norm", functools.partial(_becomes_norm, module, eps, offset))
    return _computes_otherwise("an RMS norm")


def _becomes_norm(module, eps, offset):
    plain = type(module).forward

    def forward(self, hidden_states):
        if self.weight.dtype != hidden_states.dtype:
            return plain(self, hidden_states)  # whose result has the wider type
        return torch.ops.fsdp_cpp.rms_norm(hidden_states, self.weight, getattr(self, eps), offset)[0]

    _becomes(module, forward)


# --- gated MLPs ----------------------------------------------------------------------------------

def _gated_mlp(module: nn.Module) -> _Fits | str | None:
    """down(activation(gate(x)) * up(x)), gate and up in one matrix or in two"""
    linears = {name: child for name, child in module._modules.items() if isinstance(child, nn.Linear)}
    others = [child for name, child in module._modules.items() if name not in linears]
    if module._parameters or any(True for child in others for _ in child.parameters()):
        return None
    into, back = _directions(linears)
    if back is None:
        return None
    size, inner = 8, 6

    def small(linear, inputs, outputs):
        probe = nn.Linear(inputs, outputs, bias=linear.bias is not None, device="cpu", dtype=torch.float32)
        probe.weight.data.copy_(_numbers(outputs, inputs))
        if probe.bias is not None:
            probe.bias.data.copy_(_numbers(outputs))
        return probe

    width = inner if len(into) == 2 else 2 * inner
    probes = {name: small(linears[name], size, width) for name in into}
    if len(into) == 2:
        probes[into[1]].weight.data.neg_()  # another one than gate's
    probes[back] = small(linears[back], inner, size)
    x = _numbers(2, 3, size)
    result = _output(_copied(module, children=probes).forward, x)
    if result is None:
        return None
    with torch.no_grad():
        for order in (into, into[::-1]) if len(into) == 2 else (into,):
            parts = [probes[name](x) for name in order]
            gate, up = parts if len(parts) == 2 else parts[0].chunk(2, -1)
            for kind, activation in _ACTIVATIONS.items():
                if _is_near(result, probes[back](activation(gate) * up)):
                    return _Fits(f"gated {'SiLU' if kind == 'silu' else 'GELU'}", functools.partial(_becomes_gated, module, order, back, kind))
    return _computes_otherwise("a gated MLP")


def _directions(linears: dict[str, nn.Linear]) -> tuple[list[str], str | None]:
    """The names of those that go in, gate and up or one of both, and of the one that goes back."""
    for back, down in linears.items():
        into = [name for name in linears if name != back]
        fits = [linears[name].in_features == down.out_features and
                linears[name].out_features * len(into) == 2 * down.in_features for name in into]
        if len(into) in (1, 2) and all(fits):
            return into, back
    return [], None


def _becomes_gated(module, into, back, kind):
    def forward(self, hidden_states):
        parts = [getattr(self, name)(hidden_states) for name in into]
        return getattr(self, back)(torch.ops.fsdp_cpp.gated(parts[0], parts[1] if len(parts) == 2 else None, kind))

    _becomes(module, forward)


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
    for batch, channels in ((1, 8), (2, 8)):
        angle = _numbers(batch, 5, channels // 2)
        cosine, sine = torch.cat((angle, angle), -1).cos(), torch.cat((angle, angle), -1).sin()
        result = _output(function, q, k, cosine, sine)
        expected = _output(_rotated, q, k, cosine, sine, 1)
        if not isinstance(result, tuple) or not all(map(_is_near, result, expected)):
            return _computes_otherwise("rotary positions of halves")
    return _Fits("rotary positions", functools.partial(_replace_rotation, file, function))


def _names_in(function: Callable) -> Iterator[str]:
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


def _replace_rotation(file, function):
    if hasattr(getattr(file, _ROTATE), _KERNEL_OF):
        return

    @functools.wraps(function)
    def rotate(q, k, cos, sin, *args, unsqueeze_dim=1, **kwargs):
        fits = not args and not kwargs and unsqueeze_dim in (1, 2) and q.dim() == 4 and cos.dim() == 3 and q.dtype == k.dtype
        if not fits or cos.shape[0] not in (1, q.shape[0]):
            return function(q, k, cos, sin, *args, unsqueeze_dim=unsqueeze_dim, **kwargs)
        return _rotated(q, k, cos[0] if cos.shape[0] == 1 else cos, sin[0] if sin.shape[0] == 1 else sin, unsqueeze_dim)

    setattr(rotate, _KERNEL_OF, function)
    setattr(file, _ROTATE, rotate)


# --- a loss without logits -----------------------------------------------------------------------

_TARGETS = "_fsdp_cpp_targets"  # of a head, while its model wants the loss
_LOSS = "_fsdp_cpp_loss"        # of a head: what it returned


def _leave_out_logits(model: nn.Module) -> str:
    """Lets the head compute the loss, where the model asks for nothing else. Why it cannot; "" where it does."""
    find_head = getattr(model, "get_output_embeddings", None)
    head = find_head() if callable(find_head) else None
    name = f"the model ({type(model).__name__})"
    if not isinstance(inspect.getattr_static(model, "loss_function", None), property) or not isinstance(head, nn.Linear):
        return f"{name} is no causal language model of transformers with a linear head"
    if head.bias is not None:
        return f"the head of {name} has a bias"
    cap = float(getattr(model.config, "final_logit_softcapping", None) or 0.0)
    if not _is_mean_of_logits(model, head, cap):
        return f"{name} computes its loss in another way than as the mean cross entropy of its head's logits"
    plain_forward, plain_head = type(model).forward, type(head).forward
    plain_loss = inspect.getattr_static(model, "loss_function").fget

    def forward(self, *args, return_logits=False, **kwargs):
        head = self.get_output_embeddings()
        targets = None if return_logits or not self.training else _targets_of(kwargs)
        if targets is None:
            return plain_forward(self, *args, **kwargs)
        setattr(head, _TARGETS, targets)
        try:
            output = plain_forward(self, *args, **kwargs)
        finally:
            setattr(head, _TARGETS, None)
            setattr(head, _LOSS, None)
        output.logits = None
        return output

    def head_forward(self, hidden_states):
        targets = getattr(self, _TARGETS)
        if targets is None:
            return plain_head(self, hidden_states)
        return linear_cross_entropy(hidden_states, self.weight, targets, soft_cap=cap)

    def call_head(self, *args, **kwargs):
        result = super(type(self), self).__call__(*args, **kwargs)
        if getattr(self, _TARGETS) is not None:
            setattr(self, _LOSS, result)  # what the model does to its logits does not concern it
        return result

    def loss_of_head(self, logits, labels, vocab_size, num_items_in_batch=None, **kwargs):
        head = self.get_output_embeddings()
        loss = getattr(head, _LOSS)
        if loss is None:
            return plain_loss(self)(logits, labels, vocab_size, num_items_in_batch=num_items_in_batch, **kwargs)
        if num_items_in_batch is None:
            return loss.clone()  # models add to it in place
        count = (getattr(head, _TARGETS) != _NO_TARGET).sum().clamp_min(1)
        return loss * (count / num_items_in_batch)

    def refuse(self, function):
        raise _C.UsageError("loss_function of a model that computes its loss without logits cannot be replaced; set it before")

    _becomes(head, head_forward, __call__=call_head)
    _becomes(model, forward, loss_function=property(lambda self: functools.partial(loss_of_head, self), refuse))
    setattr(head, _TARGETS, None)
    setattr(head, _LOSS, None)
    return ""


def _targets_of(kwargs: dict) -> Tensor | None:
    """The label of each position; None where the model is asked for something else than the loss of all of them."""
    labels, shifted = kwargs.get("labels"), kwargs.get("shift_labels")
    if (labels is None and shifted is None) or not isinstance(kwargs.get("logits_to_keep", 0), int) or kwargs.get("logits_to_keep", 0):
        return None
    if kwargs.get("return_dict") is False:
        return None
    if shifted is None:
        shifted = nn.functional.pad(labels, (0, 1), value=kwargs.get("ignore_index", _NO_TARGET))[..., 1:]
    ignored = kwargs.get("ignore_index", _NO_TARGET)
    return shifted if ignored == _NO_TARGET else shifted.masked_fill(shifted == ignored, _NO_TARGET)


def _is_mean_of_logits(model, head, cap) -> bool:
    """Tries the model's own forward with a small head, behind layers that return random numbers."""
    from transformers.modeling_outputs import MoeModelOutputWithPast

    hidden = _numbers(2, 5, 8)
    labels = torch.tensor([[3, 1, _NO_TARGET, 2, 4], [1, 0, 5, _NO_TARGET, 2]])

    class Layers(nn.Module):
        def forward(self, *args, **kwargs):
            return MoeModelOutputWithPast(last_hidden_state=hidden)

    small = nn.Linear(8, model.config.get_text_config().vocab_size, bias=False, device="cpu", dtype=torch.float32)
    small.weight.data.copy_(_numbers(small.out_features, 8))
    names = {id(head): small, id(getattr(model, model.base_model_prefix, None)): Layers()}
    probe = _copied(model, children={name: names[id(child)] for name, child in model._modules.items() if id(child) in names})
    # The model adds its experts' loss by itself.
    alone = {"output_router_logits": False} if hasattr(model.config, "output_router_logits") else {}
    for given in ({}, {"num_items_in_batch": torch.tensor(11)}):
        result = _output(probe.forward, input_ids=torch.zeros(2, 5, dtype=torch.int64), labels=labels, **alone, **given)
        targets = nn.functional.pad(labels, (0, 1), value=_NO_TARGET)[..., 1:]
        with torch.no_grad():
            expected = linear_cross_entropy(hidden, small.weight, targets, soft_cap=cap)
        if given:
            expected = expected * (targets != _NO_TARGET).sum() / given["num_items_in_batch"]
        if result is None or not _is_near(result.loss, expected):
            return False
    return True
