"""The result of fully_shard_model() of Megatron-FSDP's door: the methods and attributes of its class MegatronFSDP."""

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from . import _C, shard

_SETTINGS = "_fsdp_cpp_megatron"  # attributes of the model
_INNER = "_fsdp_cpp_inner"


@dataclasses.dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Megatron-FSDP's three types; None as there: the model's own for main_params, the parameters' for gradients."""

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None


class FSDPDistributedIndex:
    """The ranks of a model in torch's words: the mesh and the groups that fully_shard_model() was given."""

    def __init__(self, device_mesh: DeviceMesh | None, dp_shard_dim: str | None = None, dp_outer_dim: str | None = None,
                 tp_dim: str | None = None, hybrid_fsdp_group: ProcessGroup | None = None,
                 hybrid_fsdp_expt_group: ProcessGroup | None = None, hsdp_outer_dp_shard: bool = False,
                 expt_device_mesh: DeviceMesh | None = None, fsdp_group_ag: ProcessGroup | None = None,
                 expt_fsdp_group_ag: ProcessGroup | None = None) -> None:
        self.device_mesh = device_mesh
        self.dp_shard_dim = dp_shard_dim
        self.dp_outer_dim = dp_outer_dim
        self.tp_dim = tp_dim
        self.hybrid_fsdp_group = hybrid_fsdp_group
        self.hsdp_outer_dp_shard = hsdp_outer_dp_shard
        self.fsdp_group_ag = fsdp_group_ag
        self.use_hybrid_fsdp = dp_outer_dim is not None
        _no_experts(hybrid_fsdp_expt_group or expt_device_mesh or expt_fsdp_group_ag)

    def get_submesh(self, mesh_dim_names: str | Sequence[str], is_expert_parallel: bool = False) -> DeviceMesh:
        """The part of the mesh with these names."""
        _no_experts(is_expert_parallel)
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        return part_of_mesh(self.get_root_mesh(), "mesh_dim_names", *names)

    def get_dp_group(self, is_expert_parallel: bool = False) -> ProcessGroup:
        """All ranks of the model."""
        _no_experts(is_expert_parallel)
        return self.hybrid_fsdp_group or self.get_fsdp_group()

    def get_fsdp_group(self, is_expert_parallel: bool = False, independent_all_gather: bool = False) -> ProcessGroup | None:
        """The ranks of the inner axis; with independent_all_gather the group that was given for gathers, or None."""
        _no_experts(is_expert_parallel)
        return self.fsdp_group_ag if independent_all_gather else self._group(self.dp_shard_dim, "dp_shard_dim")

    def get_outer_fsdp_group(self, is_expert_parallel: bool = False) -> ProcessGroup | None:
        """The ranks of the outer axis, or None."""
        _no_experts(is_expert_parallel)
        return self._group(self.dp_outer_dim, "dp_outer_dim") if self.use_hybrid_fsdp else None

    def get_root_mesh(self, is_expert_parallel: bool = False) -> DeviceMesh:
        """The mesh that was given."""
        _no_experts(is_expert_parallel)
        if self.device_mesh is None:
            raise _C.UsageError("the model was sharded without a DeviceMesh of torch; its ranks are those of fsdp_cpp.world()")
        return self.device_mesh

    def get_logical_hybrid_fsdp_rank(self, is_expert_parallel: bool = False) -> int:
        """Which part of the optimizer's state this rank has with HFSDP: parts are cut along the inner axis first."""
        _no_experts(is_expert_parallel)
        if not self.hsdp_outer_dp_shard:
            raise _C.UsageError("get_logical_hybrid_fsdp_rank() is for outer_dp_sharding_strategy=1")
        mesh = self.get_submesh((cast(str, self.dp_outer_dim), cast(str, self.dp_shard_dim)))
        outer, inner = cast(list[int], mesh.get_coordinate())
        return inner * mesh.size(0) + outer

    def _group(self, name, argument):
        mesh = self.get_root_mesh()
        if name is None:
            raise _C.UsageError(f"the model was sharded without {argument}; name the mesh's dimension there")
        return part_of_mesh(mesh, argument, name).get_group()


class DistributedDataParallelConfig:
    """Refused: its fields are arguments of fully_shard_model(). docs/from-megatron-fsdp.md has both names of each."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise _C.UsageError("DistributedDataParallelConfig() has no meaning here; give its fields to fully_shard_model(), under the "
                            "names in docs/from-megatron-fsdp.md")


def _no_experts(given):
    if given:
        raise _C.UsageError("groups of experts are asked for; here experts are shared out by fsdp_cpp.mesh(ep=...) and "
                            "fsdp_cpp.fully_shard(expert_parameters=...), and the group is fsdp_cpp's mesh.ep")


def part_of_mesh(mesh: DeviceMesh, argument: str, *names: str) -> DeviceMesh:
    """The part with these names, some of them of dimensions that DeviceMesh._flatten() has made."""
    try:
        return mesh[names if len(names) > 1 else names[0]]
    except KeyError as error:
        raise _C.UsageError(f"{argument} is {' and '.join(map(repr, names))}, which this mesh does not have: {error.args[0]}") from None


@dataclasses.dataclass
class Settings:
    """Settings of a model, beside those that the engine keeps."""

    policy: MixedPrecisionPolicy
    index: FSDPDistributedIndex
    checks_nan: bool
    auto_sync: bool
    is_last: bool
    depth: int = 0  # of no_sync() inside no_sync()


def settings_of(model: object) -> Settings:
    try:
        return model.__dict__[_SETTINGS]
    except KeyError:
        raise _C.UsageError(f"this {type(model).__name__} did not come from fsdp_cpp.megatron.fully_shard_model()") from None


def become_megatron_fsdp(model: nn.Module, settings: Settings) -> None:
    """Gives the model the methods; its class keeps its name."""
    cls = type(model)
    names: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    if not hasattr(model, "module"):  # else its own, which its forward may call
        names["module"] = property(lambda self: _inner(self, cls))
    model.__dict__[_SETTINGS] = settings
    model.__class__ = type(cls.__name__, (cls, MegatronFSDP), names)


def _inner(model, cls):
    """The model as an object of its own class, with the same attributes and no `module`: unwrapping loops end there."""
    known = model.__dict__.get(_INNER, lambda: None)()
    if known is not None:
        return known
    inner = object.__new__(cls)
    object.__setattr__(inner, "__dict__", model.__dict__)
    model.__dict__[_INNER] = weakref.ref(inner)  # weak: the dict would hold itself
    return inner


def _refused(name, fix):
    def method(self, *args, **kwargs) -> NoReturn:
        raise _C.UsageError(f"{name}() has no meaning here; {fix}")

    method.__name__ = name
    return method


class MegatronFSDP:
    """Methods of a model that fully_shard_model() has sharded. The model keeps its own names, and is no wrapper; `model.module` is
    the same model without these methods."""

    def __init__(self, *_: Any, **__: Any) -> None:
        if not isinstance(self, nn.Module):
            raise _C.UsageError("MegatronFSDP() wraps no modules here; fully_shard_model() makes a model one")

    # --- cycles of microbatches ---

    @property
    def model_auto_sync(self) -> bool:
        """Whether every backward is the last of its cycle."""
        return settings_of(self).auto_sync

    @model_auto_sync.setter
    def model_auto_sync(self, sync_model: bool) -> None:
        self.set_model_auto_sync(sync_model)

    @property
    def is_last_microbatch(self) -> bool:
        """Whether the next backward is the last of its cycle; no_sync() aside."""
        return settings_of(self).is_last

    @is_last_microbatch.setter
    def is_last_microbatch(self, is_last: bool) -> None:
        settings = settings_of(self)
        settings.is_last = is_last
        shard.microbatch(_model(self), last=is_last and settings.depth == 0)

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """True: every backward is the last of its cycle. False: backwards add up until step() or finish_grad_sync()."""
        settings_of(self).auto_sync = sync_model
        self.is_last_microbatch = sync_model

    @contextlib.contextmanager
    def sync(self) -> Iterator[None]:
        """Backwards inside are the last of their cycle."""
        before = self.model_auto_sync
        self.set_model_auto_sync(True)
        try:
            yield
        finally:
            self.set_model_auto_sync(before)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside are not the last of their cycle; the one after it is."""
        settings = settings_of(self)
        settings.depth += 1
        shard.microbatch(_model(self), last=False)
        try:
            yield
        finally:
            settings.depth -= 1
            self.is_last_microbatch = True

    # --- gradients ---

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Ends the cycle: reduces what is still partial, and waits. step() does it, too."""
        if force_all_reduce:
            raise _C.UsageError(f"force_all_reduce is {force_all_reduce}; the strategy says how gradients are reduced: leave it out, or "
                                "shard with zero_dp_strategy=0, whose gradients are whole on every rank")
        shard.end_cycle(_model(self))

    def start_grad_sync(self, *unused: Any) -> None:
        """Nothing: reductions start in the backward."""

    def synchronize_gradient_reduce(self) -> None:
        """Waits for the reductions that have started."""
        shard.handle(_model(self)).wait_gradients()

    def attach_grad_to_optimizer_state(self) -> None:
        """Nothing: step() takes the gradients from where they are."""

    def scale_gradients(self, scaling_factor: float) -> None:
        """Ends the cycle, and multiplies its gradients."""
        shard.end_cycle(_model(self))
        for gradient in shard.gradients(_model(self)).values():
            gradient.mul_(scaling_factor)

    def zero_grad_buffer(self) -> None:
        """Begins a new cycle; optimizer.zero_grad() does it, too."""
        shard.handle(_model(self)).zero_grad()

    # --- weights ---

    def install_optimized_model_weights(self) -> None:
        """Writes the weights again from the main weights; step() does it, too."""
        shard.handle(_model(self)).refresh_weights()

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Nothing: gathers start by themselves, and whoever computes waits for its own."""

    def synchronize_param_gather(self) -> None:
        """Nothing, as start_param_sync()."""

    def broadcast_params(self) -> None:
        """Nothing: fully_shard_model() has refused a model whose values differ between ranks."""

    all_gather_and_wait_parameters_ready = _refused("all_gather_and_wait_parameters_ready",
                                                    "fsdp_cpp.unshard(model) makes parameters whole while it is open")

    # --- precision and ranks ---

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        """The policy that holds now."""
        return settings_of(self).policy

    def reset_mixed_precision_policy(self, mixed_precision_policy: MixedPrecisionPolicy) -> None:
        """Changes grad_comm_dtype, between cycles. The other types are those of buffers that are there."""
        for field in ("main_params_dtype", "main_grads_dtype"):
            now, wanted = getattr(self.mp_policy, field), getattr(mixed_precision_policy, field)
            if now != wanted:
                raise _C.UsageError(f"{field} is {wanted}, and was {now} in fully_shard_model(); only grad_comm_dtype can change: use "
                                    "dataclasses.replace(model.mp_policy, grad_comm_dtype=...)")
        shard.set_precision(_model(self), grad_comm=mixed_precision_policy.grad_comm_dtype)
        settings_of(self).policy = mixed_precision_policy

    @contextlib.contextmanager
    def mixed_precision_context(self, mixed_precision_policy: MixedPrecisionPolicy) -> Iterator[None]:
        """reset_mixed_precision_policy() for whole cycles: it ends after a zero_grad()."""
        before = self.mp_policy
        self.reset_mixed_precision_policy(mixed_precision_policy)
        try:
            yield
        except BaseException:
            with contextlib.suppress(_C.Error):  # of a cycle that has not ended
                self.reset_mixed_precision_policy(before)
            raise
        self.reset_mixed_precision_policy(before)

    def get_distributed_index(self) -> FSDPDistributedIndex:
        """The mesh and the groups that fully_shard_model() was given."""
        return settings_of(self).index


def _model(self: MegatronFSDP) -> nn.Module:
    return cast(nn.Module, self)
