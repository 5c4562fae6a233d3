"""A sharded model's weights, out of the training tensor by tensor: no rank ever has the model."""

import os
from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from . import _C, checkpoint, shard


def export_weights(model: nn.Module, to: str | os.PathLike[str] | Callable[[str, torch.Tensor], object], *,
                   values: Literal["compute", "main"] = "compute", dtype: torch.dtype | None = None, on_all_ranks: bool = False,
                   config: str | checkpoint.Config | None = None, max_file_bytes: int = 5_000_000_000, overwrite: bool = False,
                   chunk_bytes: int = 16 << 20) -> None:
    """Gives all parameters and buffers of a state dict away, one after the other. All ranks call it, between steps.

    to: a directory, which rank 0 writes as save_pretrained() would and which appears complete or not at all; or a function
    that is called with the name and the whole tensor in host memory, on rank 0 or (on_all_ranks) everywhere. An exception of
    the function ends the export on all ranks.
    values: "compute", what a forward computes with; "main", what the optimizer updates. dtype: another type, to which they
    are rounded. config: as in save(). overwrite: replaces a directory that has safetensors files.
    A rank takes two times chunk_bytes and 4 MiB of memory for it; with a function, receivers have the largest tensor, too.
    """
    if values not in ("compute", "main"):
        raise _C.UsageError(f'values is {values!r}; use "compute" or "main"')
    sharded, buffers, is_main = shard.handle(model), checkpoint._buffers(model), values == "main"
    if callable(to):
        _C.export_weights_to(sharded, buffers, to, dtype, is_main, on_all_ranks, chunk_bytes)
        return
    if on_all_ranks:
        raise _C.UsageError("on_all_ranks is True, but one rank writes a directory; give a function, or leave it out")
    _C.export_weight_files(sharded, buffers, str(to), max_file_bytes, checkpoint._config_text(config), overwrite, dtype,
                           is_main, chunk_bytes)
