"""Joins what Megatron's fsdp_dtensor checkpoints keep apart: parameters that a model has in one piece.

    ...mlp.linear_fc1.weight_w, _v        gate and up projection of a SwiGLU, dense or of experts; biases, too
    ...in_proj.weight.query, .key, ...    of a gated delta net: query, key, value, z, beta, alpha
    ...conv1d.weight.query, .key, ...     of the same: query, key, value; biases, too

The parts are rows of the parameter, in this order.
"""

import re
from typing import NamedTuple

import torch

from .._C import Error

_SWIGLU = re.compile(r"((?:.*\.)?mlp\.(?:linear_fc1\.(?:weight|bias)|experts\.linear_fc1\.(?:weight|bias)\d+|"
                     r"(?:experts\.local_experts\.\d+|shared_experts)\.linear_fc1\.(?:weight|bias)))(_w|_v)")
_GDN_PROJECTION = re.compile(r"((?:.*\.)?in_proj\.weight)(\.query|\.key|\.value|\.z|\.beta|\.alpha)")
_GDN_CONVOLUTION = re.compile(r"((?:.*\.)?conv1d\.(?:weight|bias))(\.query|\.key|\.value)")
_SPLITS = ((_SWIGLU, ("_w", "_v")), (_GDN_PROJECTION, (".query", ".key", ".value", ".z", ".beta", ".alpha")),
           (_GDN_CONVOLUTION, (".query", ".key", ".value")))


class Part(NamedTuple):
    """A stored tensor that is rows of a parameter, or all of it."""
    key: str
    first_row: int


class Source(NamedTuple):
    """A parameter, buffer or moment, and the stored tensors that it is made of."""
    dtype: torch.dtype
    shape: tuple
    parts: list


def joined(sources: dict[str, Source]) -> dict[str, Source]:
    """The sources with whole parameters in the places of their first parts; an Error where a part is missing or does not fit."""
    result = {}
    for name, source in sources.items():
        base, suffixes = _split_of(name)
        if base is None:
            result[name] = source
        elif base not in result:
            if base in sources:
                raise Error(f"'{base}' is there in one piece and as '{name}'; leave one of them out (--allow-extra)")
            missing = [base + suffix for suffix in suffixes if base + suffix not in sources]
            if missing:
                raise Error(f"'{name}' is a part of '{base}', and '{missing[0]}' is missing; use another checkpoint, or keep "
                            "the parts as they are (--keep-split)")
            result[base] = _stacked(base, {base + suffix: sources[base + suffix] for suffix in suffixes})
    return result


def _split_of(name):
    for pattern, suffixes in _SPLITS:
        match = pattern.fullmatch(name)
        if match:
            return match[1], suffixes
    return None, ()


def _stacked(base, pieces):
    first_name, first = next(iter(pieces.items()))
    rows, parts = 0, []
    for name, piece in pieces.items():
        is_half = not name.endswith("_v") or piece.shape[:1] == first.shape[:1]
        if not piece.shape or piece.shape[1:] != first.shape[1:] or piece.dtype != first.dtype or not is_half:
            raise Error(f"'{name}' is {piece.dtype} {list(piece.shape)} and '{first_name}' is {first.dtype} "
                        f"{list(first.shape)}: they are no parts of one '{base}'; keep them as they are (--keep-split)")
        parts += [Part(part.key, rows + part.first_row) for part in piece.parts]
        rows += piece.shape[0]
    return Source(first.dtype, (rows, *first.shape[1:]), parts)
