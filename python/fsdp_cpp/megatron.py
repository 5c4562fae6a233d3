"""The door for programs written for Megatron-FSDP: its functions and arguments, on our engine.

    from fsdp_cpp.megatron import fully_shard                          # instead of megatron_fsdp

    model, optimizer = fully_shard(model, torch.optim.AdamW(model.parameters()), fsdp_unit_modules=[Block],
                                   zero_dp_strategy=3, mixed_precision_policy=MixedPrecisionPolicy(...))

docs/from-megatron-fsdp.md names every difference; what has no meaning here is refused.
"""

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Iterable
from types import EllipsisType, MethodType
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from . import _C, shard, shard_optimizer
from .megatron_model import (DistributedDataParallelConfig, FSDPDistributedIndex, MegatronFSDP, MixedPrecisionPolicy, Settings,
                             become_megatron_fsdp, part_of_mesh, settings_of)

__all__ = ["DistributedDataParallelConfig", "FSDPDistributedIndex", "MegatronFSDP", "MixedPrecisionPolicy", "fully_shard",
           "fully_shard_model", "fully_shard_optimizer"]

_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")

ZeroStrategy: TypeAlias = Literal[0, 1, 2, 3, "no_shard", "optim", "optim_grads", "optim_grads_params"]
OuterStrategy: TypeAlias = Literal[0, 1, "no_shard", "optim"]
# `...`: not given, since None has a meaning.
Dtype: TypeAlias = torch.dtype | None | EllipsisType
AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)


def fully_shard_model(
        module: shard.M, device_mesh: DeviceMesh | _C.Mesh | None = None, dp_shard_dim: str | None = None,
        dp_outer_dim: str | None = None, tp_dim: str | None = None, hybrid_fsdp_group: ProcessGroup | None = None,
        hybrid_fsdp_expt_group: ProcessGroup | None = None, expt_device_mesh: DeviceMesh | None = None,
        fsdp_group_ag: ProcessGroup | None = None, expt_fsdp_group_ag: ProcessGroup | None = None,
        fsdp_unit_modules: Iterable[type[nn.Module] | str] | None = None, zero_dp_strategy: ZeroStrategy = 3,
        outer_dp_sharding_strategy: OuterStrategy = 0, device: torch.device | str | None = None,
        init_model_with_meta_device: bool = False, mixed_precision_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
        overlap_grad_reduce: bool = True, overlap_param_gather: bool = True, sync_model_each_microbatch: bool = True,
        preproc_state_dict_for_dcp_ckpt: bool = True, report_nan_in_param_grad: bool = False,
        average_in_collective: bool = False, disable_bucketing: bool = False, calculate_per_token_loss: bool = False,
        keep_fp8_transpose_cache: bool = False, nccl_ub: bool = False, fsdp_double_buffer: bool = False,
        fsdp_db_use_persist_buf_on_alloc_fail: bool = False, disable_symmetric_registration: bool = False,
        enable_fine_grained_param_gather: bool = False, use_decoupled_grad: bool = False, cuda_graph_mode: bool = False,
        maxpool_double_buffer: bool = False, *, main_params_dtype: Dtype = ..., main_grads_dtype: Dtype = ...,
        grad_comm_dtype: Dtype = ..., preserve_fp32_weights: bool | None = None, grad_reduce_in_fp32: bool = False,
        check_for_nan_in_grad: bool = False) -> shard.M:
    """Shards the module in place and returns it, as a MegatronFSDP: no_sync(), finish_grad_sync(), ...

    device_mesh may also be fsdp_cpp.mesh(outer=...), which needs no torch.distributed.
    fsdp_group_ag and average_in_collective ask for what is always so here: gathers have a communicator of their own, and
    gradients are divided once, in the reduction.
    """
    _refuse({"expt_device_mesh": expt_device_mesh, "hybrid_fsdp_expt_group": hybrid_fsdp_expt_group,
             "expt_fsdp_group_ag": expt_fsdp_group_ag},
            "experts are shared out by fsdp_cpp.mesh(ep=...) and fsdp_cpp.fully_shard(expert_parameters=...)")
    _refuse({"disable_bucketing": disable_bucketing}, "a unit is always one bucket per type")
    _refuse({"keep_fp8_transpose_cache": keep_fp8_transpose_cache},
            "weights of Python models have the types that the program gives them, so no transpose is kept: leave it out; fp8 weights "
            "are those of fsdp train --weights")
    _refuse({"enable_fine_grained_param_gather": enable_fine_grained_param_gather},
            "a unit is gathered as a whole: name smaller modules in fsdp_unit_modules")
    _refuse({"use_decoupled_grad": use_decoupled_grad},
            "the optimizer finds its gradients in .grad, in the type of the main weights: leave it out")
    _refuse({"overlap_grad_reduce": not overlap_grad_reduce}, "reductions always run beside the backward", shown=False)
    _refuse({"disable_symmetric_registration": disable_symmetric_registration and not nccl_ub},
            "nothing is registered without nccl_ub: say nccl_ub=True, or leave it out")
    _refuse_unprepared(preproc_state_dict_for_dcp_ckpt)
    if cuda_graph_mode and not torch.cuda.is_available():
        raise _C.UsageError("cuda_graph_mode is True, but torch sees no GPU")
    _check_meta(module, init_model_with_meta_device)
    policy = _policy(mixed_precision_policy, main_params_dtype, main_grads_dtype, grad_comm_dtype, preserve_fp32_weights,
                     grad_reduce_in_fp32)
    strategy = _strategy(zero_dp_strategy, outer_dp_sharding_strategy)
    mesh, index = _mesh(device_mesh, dp_shard_dim, dp_outer_dim, tp_dim, hybrid_fsdp_group, fsdp_group_ag, "+hfsdp" in strategy)
    shard.fully_shard(
        module, mesh, _units(fsdp_unit_modules), strategy=strategy, main_params=policy.main_params_dtype,
        main_grads=policy.main_grads_dtype, grad_comm=policy.grad_comm_dtype, main_storage="separate",  # for optimizers of others
        device=device, init_weights=_initialization(module), prefetch=1 if overlap_param_gather else 0,
        report_nan="per_parameter" if report_nan_in_param_grad else "off", gradient="sum" if calculate_per_token_loss else "mean",
        **_memory(nccl_ub, disable_symmetric_registration, fsdp_double_buffer, maxpool_double_buffer,
                  fsdp_db_use_persist_buf_on_alloc_fail))
    become_megatron_fsdp(module, Settings(policy, index, check_for_nan_in_grad, auto_sync=sync_model_each_microbatch,
                                          is_last=sync_model_each_microbatch))
    shard.microbatch(module, last=sync_model_each_microbatch)
    return module


def fully_shard_optimizer(optimizer: AnyOptimizer, preproc_state_dict_for_dcp_ckpt: bool = True) -> AnyOptimizer:
    """Lets a torch optimizer over a sharded module's parameters update this rank's part of the main weights."""
    _refuse_unprepared(preproc_state_dict_for_dcp_ckpt)
    model = shard.model_of(parameter for group in optimizer.param_groups for parameter in group["params"])
    settings = settings_of(model)

    def check_for_nan(*_):
        if settings.checks_nan and shard.found_nonfinite(model):
            raise _C.Error("a gradient of some rank holds a NaN or Inf (check_for_nan_in_grad); report_nan_in_param_grad=True "
                           "names the parameter")

    shard_optimizer(optimizer)
    optimizer.register_step_pre_hook(check_for_nan)
    _extend(optimizer)
    return optimizer


def fully_shard(module: shard.M, optimizer: AnyOptimizer, *arguments: Any, **keywords: Any) -> tuple[shard.M, AnyOptimizer]:
    """fully_shard_model() and fully_shard_optimizer() at once: returns both."""
    return fully_shard_model(module, *arguments, **keywords), fully_shard_optimizer(optimizer)


def _with_optimizer():
    """The signature of fully_shard(), in which the optimizer is the second argument."""
    signature, own = inspect.signature(fully_shard_model), inspect.signature(fully_shard)
    module, *others = signature.parameters.values()
    return own.replace(parameters=[module, own.parameters["optimizer"], *others])


fully_shard.__signature__ = _with_optimizer()  # type: ignore[attr-defined]


def _extend(optimizer):
    """Megatron-FSDP's keywords of step() and zero_grad()."""
    step, zero_grad = optimizer.step, optimizer.zero_grad

    @functools.wraps(step)  # with the marks that schedulers leave on it
    def extended_step(self, *args, sync_grad_before_optimizer_step=True, install_optimized_model_weights=True, **keywords):
        """The optimizer's own step. sync_grad_before_optimizer_step: a cycle that has not ended is ended in any case."""
        _refuse({"install_optimized_model_weights": not install_optimized_model_weights},
                "weights always follow their main weights: leave it out", shown=False)
        return step(*args, **keywords)

    def extended_zero_grad(self, set_to_none=True, *, zero_grad_buffer=True):
        """zero_grad_buffer=False keeps the gradients of this cycle."""
        if zero_grad_buffer:
            zero_grad(set_to_none)
        else:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    # Bound, as schedulers expect it.
    optimizer.step, optimizer.zero_grad = MethodType(extended_step, optimizer), MethodType(extended_zero_grad, optimizer)


def _refuse_unprepared(preproc_state_dict_for_dcp_ckpt):
    _refuse({"preproc_state_dict_for_dcp_ckpt": not preproc_state_dict_for_dcp_ckpt},
            "checkpoints are made by fsdp_cpp.Checkpointer, and state dicts by fsdp_cpp.state_dict()", shown=False)


def _refuse(arguments, reason, shown=True):
    for name, value in arguments.items():
        if value:
            raise _C.UsageError(f"{name} is {value if shown else False}; {reason}")


def _check_meta(module, expects_meta):
    is_meta = any(parameter.is_meta for parameter in module.parameters())
    if expects_meta and not is_meta:
        raise _C.UsageError("init_model_with_meta_device is True, but no parameter is on the meta device; build the model under "
                            "torch.device('meta'), or say False")
    if is_meta and not expects_meta:
        raise _C.UsageError("the model is on the meta device; say init_model_with_meta_device=True")


def _initialization(model):
    """None for what fully_shard() does by itself, if no module has Megatron-FSDP's other name of reset_parameters()."""
    def is_private(module):
        return hasattr(module, "_reset_parameters") and not hasattr(module, "reset_parameters")

    def reset(module):
        if not is_private(module) and not hasattr(module, "reset_parameters"):
            raise _C.UsageError(f"{type(module).__name__} has parameters on the meta device, and neither reset_parameters() nor "
                                "_reset_parameters(); give it one of them")
        (module._reset_parameters if is_private(module) else module.reset_parameters)()

    return reset if not hasattr(model, "_init_weights") and any(map(is_private, model.modules())) else None


def _strategy(inner, outer):
    def name(value, names, argument):
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names):
            return names[value]
        if value in names:
            return value
        raise _C.UsageError(f"{argument} is {value!r}; use 0 to {len(names) - 1}, or one of {', '.join(names)}")

    inner = name(inner, _STRATEGIES, "zero_dp_strategy")
    outer = name(outer, ("no_shard", "optim"), "outer_dp_sharding_strategy")
    if outer == "no_shard":
        return inner
    if inner == "no_shard":
        raise _C.UsageError("outer_dp_sharding_strategy is 1 with zero_dp_strategy 0; the inner axis is cut first: use "
                            "zero_dp_strategy 1, 2 or 3, or outer_dp_sharding_strategy 0")
    return inner + "+hfsdp"


def _policy(policy, main_params, main_grads, grad_comm, preserve_fp32_weights, grad_reduce_in_fp32):
    """The policy, over whose types those that are given one by one win."""
    types = {}
    if preserve_fp32_weights is not None:
        types["main_params_dtype"] = torch.float32 if preserve_fp32_weights else None
    if grad_reduce_in_fp32:
        types["main_grads_dtype"] = types["grad_comm_dtype"] = torch.float32
    given = dict(main_params_dtype=main_params, main_grads_dtype=main_grads, grad_comm_dtype=grad_comm)
    types.update((name, value) for name, value in given.items() if value is not ...)
    return dataclasses.replace(policy or MixedPrecisionPolicy(), **types)


def _mesh(device_mesh, dp_shard_dim, dp_outer_dim, tp_dim, hybrid_group, gather_group, shards_outer):
    """(what shard.fully_shard() takes, the index of it)."""
    named = {"dp_shard_dim": dp_shard_dim, "dp_outer_dim": dp_outer_dim, "tp_dim": tp_dim}
    if (dp_outer_dim is None) != (hybrid_group is None):
        raise _C.UsageError("dp_outer_dim and hybrid_fsdp_group belong together; give both or none")
    if device_mesh is None or isinstance(device_mesh, _C.Mesh):
        for argument, name in named.items():
            if name is not None:
                raise _C.UsageError(f"{argument} is {name!r}, without a device_mesh of torch that has it; give both or none")
        return device_mesh, FSDPDistributedIndex(None, fsdp_group_ag=gather_group)
    for argument, name in named.items():
        if name is not None:
            part_of_mesh(device_mesh, argument, name)
    if tp_dim is not None and device_mesh[tp_dim].size() > 1:
        raise _C.UsageError(f"tp_dim is {tp_dim!r} with {device_mesh[tp_dim].size()} ranks; here it has one: use "
                            "fsdp_cpp.mesh(tp=...) and fsdp_cpp.fully_shard(tensor_parameters=...)")
    if dp_shard_dim is None:
        if dp_outer_dim is not None:
            raise _C.UsageError(f"dp_outer_dim is {dp_outer_dim!r} without dp_shard_dim; name both dimensions")
        mesh = device_mesh
    else:
        outer = [] if dp_outer_dim is None else [dp_outer_dim]
        mesh = part_of_mesh(device_mesh, "(dp_outer_dim, dp_shard_dim)" if outer else "dp_shard_dim", *outer, dp_shard_dim)
    if hybrid_group is not None and hybrid_group.size() != mesh.size():
        raise _C.UsageError(f"hybrid_fsdp_group has {hybrid_group.size()} ranks, but dp_outer_dim x dp_shard_dim is "
                            f"{mesh.size()}")
    return mesh, FSDPDistributedIndex(device_mesh, **named, hybrid_fsdp_group=hybrid_group, fsdp_group_ag=gather_group,
                                      hsdp_outer_dp_shard=shards_outer)


def _units(classes):
    """Classes, some of them by the path from which they are imported."""
    if classes is None:
        return None
    units = []
    for each in classes:
        if isinstance(each, str):
            path, _, name = each.rpartition(".")
            try:
                each = getattr(importlib.import_module(path), name)
            except (ImportError, AttributeError, ValueError) as error:
                raise _C.UsageError(f"fsdp_unit_modules has {each!r}, which cannot be imported: {error}") from None
        units.append(each)
    return units


def _memory(nccl_ub, no_symmetric, double_buffer, max_pool, persistent):
    """Megatron-FSDP's flags for temporary buffers; without any of them, our default."""
    options = {}
    if double_buffer or max_pool:
        options["pool"] = "max_pool" if max_pool else "double_buffer"
    if persistent:
        options["other_units"] = "persistent"
    if nccl_ub:
        options["user_buffers"] = "registered" if no_symmetric else "symmetric"
    return options
