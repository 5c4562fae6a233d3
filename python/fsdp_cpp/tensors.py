"""Finds the tensors in the arguments and results of a forward, and puts others in their places.

Covered are tuples, lists and dicts with their subclasses (named tuples, transformers' ModelOutput), dataclasses, and what
torch's pytree knows; tensors inside other objects (a cache of keys and values) are not seen.
"""

import copy
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})


def collect(value: Any, found: list[torch.Tensor], holders: list[Any] | None = None) -> None:
    """Appends the tensors in `value` to the list `found`, in a fixed order, and to `holders` the containers that can change."""
    kind = type(value)
    if kind in _ATOMS:
        return
    if isinstance(value, torch.Tensor):
        found.append(value)
        return
    items = _items(value)
    if items is None:
        return
    if holders is not None and _is_changeable(value):
        holders.append(value)
    for each in items:
        collect(each, found, holders)


def replaced(value: Any, tensors: Iterator[torch.Tensor], in_place: Iterable[Any] = ()) -> Any:
    """`value` with its tensors replaced by those of the iterator `tensors`, in the order of collect().

    Containers in which something is replaced are copied, but for those of `in_place`, which are changed.
    """
    return _replaced(value, tensors, {id(each) for each in in_place})


class Loan:
    """The arguments of a call while a function computes with other tensors in their places: their containers stay the same objects, so that
    the function can fill them for its caller, and have their own tensors back after it."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.holders: list[Any] = []  # containers that can change
        self._owners: dict[int, tuple[Any, Any]] = {}  # id of what was put in -> it, and what was there
        self._args, self._kwargs = args, kwargs
        for value in (*args, *kwargs.values()):
            collect(value, self.tensors, self.holders)

    def give(self, tensors: Iterable[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these in place of .tensors."""
        before = [list(_items(holder)) for holder in self.holders]
        given, in_place = iter(tensors), {id(holder) for holder in self.holders}
        args = tuple(_replaced(value, given, in_place) for value in self._args)
        kwargs = {name: _replaced(value, given, in_place) for name, value in self._kwargs.items()}
        for holder, items in zip(self.holders, before):
            for old, new in zip(items, _items(holder)):
                if new is not old:
                    self._owners[id(new)] = (new, old)
        return args, kwargs

    def take_back(self) -> None:
        """Puts back what was there, wherever it is now; what the function has put there stays."""
        if self._owners:
            for holder in self.holders:
                _exchange(holder, self._owners)

    def filled_in(self, but: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors that the function has put into the containers and that are none of `but`, after take_back()."""
        if not self.holders:
            return []
        known = {id(each) for each in (*self.tensors, *but)}
        found: list[torch.Tensor] = []
        for holder in self.holders:
            collect(list(_items(holder)), found)
        return list({id(each): each for each in found if id(each) not in known}.values())

    def put(self, tensors: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Exchanges tensors of filled_in() for others: (old, new)."""
        exchanges = {id(old): (old, new) for old, new in tensors}
        for holder in self.holders:
            _exchange(holder, exchanges)


def _items(value):
    """The items of a container, in the order of _with_items(); None if it is none."""
    if isinstance(value, (tuple, list)):
        return value
    if isinstance(value, dict):
        return value.values()
    if type(value) in pytree.SUPPORTED_NODES:
        return pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)[0]
    if _is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return None


def _is_changeable(value):
    return isinstance(value, (list, dict)) or (not isinstance(value, tuple) and type(value) not in pytree.SUPPORTED_NODES)


def _replaced(value, tensors, in_place):
    if type(value) in _ATOMS:
        return value
    if isinstance(value, torch.Tensor):
        return next(tensors)
    items = _items(value)
    if items is None:
        return value
    before = list(items)
    after = [_replaced(each, tensors, in_place) for each in before]
    if all(new is old for new, old in zip(after, before)):
        return value
    return _with_items(value, after, id(value) in in_place)


def _with_items(value, items, in_place):
    kind = type(value)
    if isinstance(value, tuple):
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    if not _is_changeable(value):
        return pytree.SUPPORTED_NODES[kind].unflatten_fn(items, pytree.SUPPORTED_NODES[kind].flatten_fn(value)[1])
    result = value if in_place else copy.copy(value)
    if isinstance(value, list):
        result[:] = items
    elif isinstance(value, dict):
        for key, item in zip(list(value), items):
            result[key] = item
    else:
        for field, item in zip(dataclasses.fields(value), items):
            if hasattr(value, field.name):
                object.__setattr__(result, field.name, item)
    return result


def _exchange(holder, owners):
    """In place: {id of an item: (that item, what comes in its place)}."""
    items = list(_items(holder))
    exchanged = [owners[id(item)][1] if id(item) in owners else item for item in items]
    if any(new is not old for new, old in zip(exchanged, items)):
        _with_items(holder, exchanged, in_place=True)


def _is_dataclass(value):
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
