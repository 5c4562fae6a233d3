"""The loss of a language model's head without its logits: the operator, and causal models of transformers that compute with it."""

import functools
import inspect

import torch
from torch import Tensor, nn

from . import _C
from .trying import becomes, copied, is_near, numbers, results

_NO_TARGET = -100


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


# --- models of transformers ----------------------------------------------------------------------
_HEAD = "_fsdp_cpp_computes_loss"  # of the class of a head that does
_TARGETS = "_fsdp_cpp_targets"     # of such a head, while its model wants the loss
_LOSS = "_fsdp_cpp_loss"           # of such a head: what it returned


def leave_out_logits(model: nn.Module) -> str:
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

    becomes(head, head_forward, __call__=call_head, **{_HEAD: True, _TARGETS: None, _LOSS: None})
    becomes(model, forward, loss_function=property(lambda self: functools.partial(loss_of_head, self), refuse))
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

    hidden = numbers(2, 5, 8)
    labels = torch.tensor([[3, 1, _NO_TARGET, 2, 4], [1, 0, 5, _NO_TARGET, 2]], device="cpu")

    class Layers(nn.Module):
        def forward(self, *args, **kwargs):
            return MoeModelOutputWithPast(last_hidden_state=hidden)

    small = nn.Linear(8, model.config.get_text_config().vocab_size, bias=False, device="cpu", dtype=torch.float32)
    small.weight.data.copy_(numbers(small.out_features, 8))
    names = {id(head): small, id(getattr(model, model.base_model_prefix, None)): Layers()}
    replaced = {name: names[id(child)] for name, child in model._modules.items() if id(child) in names}
    copies = [copied(model, mode, children=replaced) for mode in (True, False)]
    # The model adds its experts' loss by itself.
    given = {"output_router_logits": False} if hasattr(model.config, "output_router_logits") else {}
    given |= {"input_ids": torch.zeros(2, 5, dtype=torch.int64, device="cpu"), "labels": labels}
    num_items = [None, torch.tensor(11, device="cpu")]
    tried = results(lambda probe, items: type(probe).forward(probe, num_items_in_batch=items, **given).loss, copies, num_items)
    targets = nn.functional.pad(labels, (0, 1), value=_NO_TARGET)[..., 1:]
    with torch.no_grad():
        mean = linear_cross_entropy(hidden, small.weight, targets, soft_cap=cap)
    expected = [mean, mean * (targets != _NO_TARGET).sum() / num_items[1]]
    return tried is not None and all(map(is_near, tried, expected * 2))
