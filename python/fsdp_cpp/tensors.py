"""Finds the tensors in the arguments and results of a forward, and puts others in their places.

Covered are tuples, lists and dicts with their subclasses (named tuples, transformers' ModelOutput), dataclasses, and what
torch's pytree knows; tensors inside other objects (a cache of keys and values) are not seen.
"""

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})


def collect(value: Any, found: list[torch.Tensor]) -> None:
    """Appends the tensors in `value` to the list `found`, in a fixed order."""
    kind = type(value)
    if kind in _ATOMS:
        return
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for each in value:
            collect(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            collect(each, found)
    elif kind in pytree.SUPPORTED_NODES:
        for each in pytree.SUPPORTED_NODES[kind].flatten_fn(value)[0]:
            collect(each, found)
    elif _is_dataclass(value):
        for field in dataclasses.fields(value):
            collect(getattr(value, field.name, None), found)


def replaced(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """`value` with its tensors replaced by those of the iterator `tensors`, in the order of collect().

    Containers are copied, not changed: the caller may use its own again.
    """
    kind = type(value)
    if kind in _ATOMS:
        return value
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, tuple):
        items = [replaced(each, tensors) for each in value]
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    if kind is list:
        return [replaced(each, tensors) for each in value]
    if kind is dict:
        return {key: replaced(each, tensors) for key, each in value.items()}
    if isinstance(value, list):
        result: Any = copy.copy(value)
        result[:] = [replaced(each, tensors) for each in value]
        return result
    if isinstance(value, dict):
        result = copy.copy(value)
        for key, each in value.items():
            result[key] = replaced(each, tensors)
        return result
    if kind in pytree.SUPPORTED_NODES:
        node = pytree.SUPPORTED_NODES[kind]
        items, context = node.flatten_fn(value)
        return node.unflatten_fn([replaced(each, tensors) for each in items], context)
    if _is_dataclass(value):
        result = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(result, field.name, replaced(getattr(value, field.name), tensors))
        return result
    return value


def _is_dataclass(value):
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
