"""fsdp_cpp: fully sharded data-parallel training of any torch.nn.Module, on the C++ engine of fsdp.cpp."""

from ._torch_check import check as _check

_check()  # before the C++ module: with another torch it cannot even be loaded

from ._C import Axis, Error, Mesh, RemoteError, TpEqual, TpPartial, TpShard, UsageError, version as __version__
from .checkpoint import Checkpointer, Loaded, load, save, state_dict
from .ema import EMA
from .export import export_weights
from .graph import Graph
from .head_loss import linear_cross_entropy
from .kernels import Kernels, use_kernels
from .optim import SGD, AdamW, Muon
from .other_optimizers import GradScaler, clip_grad_norm_, shard_optimizer
from .patch_stream import Patch, PatchStream
from .ranks import device, mesh, world
from .shard import (Memory, end_cycle, found_nonfinite, fully_shard, gradients, is_sharded, memory, microbatch, no_sync, reset,
                    set_precision, unshard)

__all__ = ["EMA", "SGD", "AdamW", "Axis", "Checkpointer", "Error", "GradScaler", "Graph", "Kernels", "Loaded", "Memory", "Mesh", "Muon", "Patch", "PatchStream", "RemoteError", "TpEqual", "TpPartial", "TpShard",
           "UsageError", "clip_grad_norm_", "device", "end_cycle", "export_weights", "found_nonfinite", "fully_shard", "gradients", "is_sharded", "linear_cross_entropy", "load", "memory", "mesh", "microbatch", "no_sync",
           "reset", "save", "set_precision", "shard_optimizer", "state_dict", "unshard", "use_kernels", "world"]
