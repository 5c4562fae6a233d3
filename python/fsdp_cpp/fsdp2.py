"""The door for programs written for PyTorch's FSDP2: its fully_shard() and the methods of its modules, on our engine.

    from fsdp_cpp.fsdp2 import fully_shard, MixedPrecisionPolicy       # instead of torch.distributed.fsdp

    for block in model.layers:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = fsdp_cpp.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-4))

Modules are marked from the inside out, and sharded together when the outermost one is first needed: at its first forward, or
when an optimizer is made. docs/from-fsdp2.md names every difference; what has no meaning here is refused.
"""

import copy
import functools
import weakref
from collections.abc import Iterable
from typing import NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed import fsdp as theirs
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from . import _C, calls, shard, tensors

__all__ = ["CPUOffloadPolicy", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy", "fully_shard"]

_MARK = "_fsdp_cpp_mark"


class _Mark:
    """The arguments that fully_shard() got for one module."""

    def __init__(self, module, mesh, reshard_after_forward, mp_policy, offload_policy, ignored_params):
        self.module = weakref.ref(module)
        self.mesh = mesh
        self.reshard_after_forward = reshard_after_forward
        self.mp_policy = mp_policy
        self.offload_policy = offload_policy
        self.ignored_params = ignored_params
        self.outer = None      # the mark of the module around it
        self.own_forward = module.__dict__.get("forward")  # set on the module itself, not by its class
        self.device = None     # of the shards, if to_empty() has said it
        self.expects_more: set[str] = set()  # the methods that said of the next backward that it is not the last of its cycle

    @property
    def outermost(self):
        return self if self.outer is None else self.outer.outermost

    def __deepcopy__(self, memo):
        """For the copy of the module, which the copy's marks must name."""
        module = memo[id(self.module())]
        copied = _Mark(module, self.mesh, self.reshard_after_forward, self.mp_policy, self.offload_policy,
                       {memo[id(each)] for each in self.ignored_params if id(each) in memo})
        memo[id(self)] = copied
        if self.outer is not None and id(self.outer.module()) in memo:
            copied.outer = copy.deepcopy(self.outer, memo)
        copied.own_forward = copy.deepcopy(self.own_forward, memo)
        return copied


def fully_shard(module: shard.M, *, mesh: DeviceMesh | _C.Mesh | None = None, reshard_after_forward: bool | None = None,
                shard_placement_fn: None = None, mp_policy: MixedPrecisionPolicy | None = None,
                offload_policy: OffloadPolicy | None = None, ignored_params: Iterable[nn.Parameter] | None = None,
                dp_mesh_dims: None = None) -> shard.M:
    """Marks a module as one that is gathered and reduced together; see above."""
    if isinstance(module, (list, tuple)):
        raise _C.UsageError("fully_shard() got a list of modules, which FSDP2 groups into one; here a group is a module: call it "
                            "with each of them, or with the module around them")
    if shard_placement_fn is not None:
        raise _C.UsageError("shard_placement_fn is set; parameters are cut as flat buffers here: use "
                            "fsdp_cpp.fully_shard(granularity='row') for cuts between rows")
    if dp_mesh_dims is not None:
        raise _C.UsageError("dp_mesh_dims is set; hand over the data-parallel part of the mesh instead, e.g. mesh['dp']")
    if isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool):
        raise _C.UsageError(f"reshard_after_forward is {reshard_after_forward}, a smaller group to gather from; use True or "
                            "False, or a mesh of two dimensions whose inner one is that group")
    if hasattr(module, _MARK) or shard.is_sharded(module):
        raise _C.UsageError(f"this {type(module).__name__} is marked already; a module can be marked once")
    mark = _Mark(module, mesh, reshard_after_forward, mp_policy or MixedPrecisionPolicy(), offload_policy or OffloadPolicy(),
                 set(ignored_params or ()))
    for inner in module.modules():
        other = getattr(inner, _MARK, None)
        if other is not None and other.outer is None:
            other.outer = mark
    _refuse_containers(module)
    _become_fsdp_module(module)
    _set_mark(module, mark)
    return module


def _refuse_containers(module):
    if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
        raise _C.UsageError(f"fully_shard() got a {type(module).__name__}, which nothing calls; call it with the modules inside")


def _set_mark(module, mark):
    module.__dict__[_MARK] = mark
    module.__dict__[shard.PENDING] = functools.partial(_sharded_model, mark)
    for parameter in module.parameters():
        setattr(parameter, shard.MODEL, functools.partial(_sharded_model, mark))
    module.forward = _sharding_at_first_use(module, mark)


def _become_fsdp_module(module):
    """Gives the module FSDP2's methods; its class keeps its name."""
    cls = type(module)
    module.__class__ = type(cls.__name__, (FSDPModule, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def _sharding_at_first_use(module, mark):
    weak = mark.module

    def forward(*args, **kwargs):
        _sharded_model(mark)
        return weak().forward(*args, **kwargs)

    _put_own_forward(module, mark)
    return calls.named_like(forward, module)


def _put_own_forward(module, mark):
    module.__dict__.pop("forward", None)
    if mark.own_forward is not None:
        module.forward = mark.own_forward


def _sharded_model(mark):
    """The outermost module, sharded."""
    root = mark.outermost
    model = root.module()
    if not shard.is_sharded(model):
        _shard(model, root)
    return model


def _shard(model, root):
    marks = [getattr(module, _MARK) for module in model.modules() if hasattr(module, _MARK)]
    options = _options(root, marks)
    for mark in marks:
        _put_own_forward(mark.module(), mark)
        _put_casts(mark.module(), mark.mp_policy)
    try:
        shard.fully_shard(model, root.mesh, units=[mark.module() for mark in marks], **options, init_weights=_first_values(model, root),
                          ignored_params=set().union(*(mark.ignored_params for mark in marks)))
    except BaseException:  # the next forward tries again, and does not run unsharded
        for mark in marks:
            mark.module().forward = _sharding_at_first_use(mark.module(), mark)
        raise


def _first_values(model, root):
    """After to_empty(), which promises no values: those of the modules that know some, and zeros, which are the same on all ranks."""
    if root.device is None:
        return None

    @torch.no_grad()
    def initialize(module):
        known = shard.initialization(model, module, None)
        if known is not None:
            known()
        else:
            for parameter in module.parameters(recurse=False):
                parameter.zero_()

    return initialize


def _options(root, marks):
    """One set of options from those of all modules, which must agree where the engine has one for all."""
    # None: FSDP2 reshards all but the outermost module.
    reshards = {mark.reshard_after_forward is not False for mark in marks if mark is not root}
    if len(reshards) > 1:
        raise _C.UsageError("reshard_after_forward is True for some modules and False for others; the engine keeps the last "
                            "unit for the backward by itself: use one value for all")
    if not reshards:
        reshards = {root.reshard_after_forward is not False}
    for field in ("mesh", "offload_policy"):
        if any(getattr(mark, field) not in (None, getattr(root, field)) and getattr(mark, field) != getattr(root, field)
               for mark in marks):
            raise _C.UsageError(f"{field} differs between modules; use the outermost module's for all")
    options = dict(strategy="optim_grads_params" if reshards.pop() else "optim_grads", device=root.device or _device_of(root))
    options.update(_precision(root, marks))
    if root.device is not None:  # to_empty() promises no values, so ranks need not have made the same
        options.update(initial_values="of_rank_zero")
    if isinstance(root.offload_policy, CPUOffloadPolicy):
        options.update(offload=1.0, offload_pin=root.offload_policy.pin_memory)
    return options


def _device_of(root):
    """FSDP2 moves a module to the device of its mesh."""
    kind = getattr(root.mesh, "device_type", "cpu")
    return None if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def _precision(root, marks):
    policies = {(mark.mp_policy.param_dtype, mark.mp_policy.reduce_dtype) for mark in marks}
    if len(policies) > 1:
        raise _C.UsageError(f"mp_policy differs between modules, {sorted(map(str, policies))}; use one param_dtype and "
                            "reduce_dtype for all")
    param_dtype, reduce_dtype = policies.pop()
    built_as = {parameter.dtype for parameter in root.module().parameters() if parameter.is_floating_point()}
    if len(built_as) > 1:
        raise _C.UsageError(f"the model has parameters of several types, {sorted(map(str, built_as))}; FSDP2 keeps each as its "
                            "own main weight: make them one type, or use fsdp_cpp.fully_shard(main_params=...)")
    main = built_as.pop()
    # FSDP2's rule: main weights and gradients have the model's own type; gradients travel in reduce_dtype.
    return dict(params=param_dtype, main_params=main, main_grads=main, main_storage="separate",
                grad_comm=reduce_dtype or param_dtype or main)


def _put_casts(module, policy):
    """Casts floating-point inputs to param_dtype and outputs to output_dtype, as FSDP2 does around each marked module."""
    casts_inputs = policy.cast_forward_inputs and policy.param_dtype is not None
    if not casts_inputs and policy.output_dtype is None:
        return
    forward = module.__dict__.get("forward") or calls.without_holding(module, "forward")

    def cast_forward(*args, **kwargs):
        loan = tensors.Loan(args, kwargs)
        if casts_inputs:
            args, kwargs = loan.give(_cast(loan.tensors, policy.param_dtype))
        try:
            result = forward(*args, **kwargs)
        finally:
            loan.take_back()
        if policy.output_dtype is None:
            return result
        outputs: list[torch.Tensor] = []
        tensors.collect(result, outputs)
        return tensors.replaced(result, iter(_cast(outputs, policy.output_dtype)))

    module.forward = calls.named_like(cast_forward, module)


def _cast(found, dtype):
    return [each.to(dtype) if each.is_floating_point() else each for each in found]


def _refused(name, fix):
    def method(self, *args, **kwargs) -> NoReturn:
        raise _C.UsageError(f"{name}() has no meaning here; {fix}")

    method.__name__ = name
    return method


class Waited:
    """The result of unshard(async_op=True): the weights are there already."""

    def wait(self) -> None:
        pass


class FSDPModule(theirs.FSDPModule):
    """FSDP2's methods of a marked module. A subclass of torch's own class, for which programs ask (isinstance)."""

    def __new__(cls, *args, **kwargs):
        """An object of the class as it was: what indexing a Sequential makes is not marked."""
        return next(each for each in cls.__mro__ if not issubclass(each, theirs.FSDPModule))(*args, **kwargs)

    def unshard(self, async_op: bool = False) -> Waited | None:  # type: ignore[override]
        """Makes the module's parameters whole until its next forward or backward has ended, or reshard(). All ranks call it."""
        sharded = shard.handle(_sharded_model(getattr(self, _MARK)))
        if calls.unit_name(self) in sharded.unit_names:  # others own nothing
            sharded.unshard([calls.unit_name(self)])
        return Waited() if async_op else None

    def reshard(self) -> None:
        """Ends unshard()."""
        sharded = shard.handle(_sharded_model(getattr(self, _MARK)))
        if calls.unit_name(self) in sharded.unit_names:
            sharded.reshard([calls.unit_name(self)])

    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> "FSDPModule":
        """Shards a model of the meta device on this device. Every rank gets memory for its part alone, with the values of
        _init_weights(module) or reset_parameters(), or zeros; give others under fsdp_cpp.unshard(model, write=True)."""
        mark = getattr(self, _MARK)
        if shard.is_sharded(mark.outermost.module()) or not all(each.is_meta for each in self.parameters()):  # type: ignore[attr-defined]
            return super().to_empty(device=device, recurse=recurse)  # type: ignore[misc]
        if mark.outer is not None:
            raise _C.UsageError("to_empty() is called for a part of a marked model; call it for the outermost module")
        mark.device = torch.device(device)
        _sharded_model(mark)
        return self

    def __deepcopy__(self, memo):
        """The copy of a marked model is marked alike; that of a sharded one is refused."""
        mark = getattr(self, _MARK)
        if shard.is_sharded(mark.outermost.module()):
            raise _C.UsageError("the model is sharded, so a copy would have a part of it; copy it before its first forward, or see "
                                "fsdp_cpp.state_dict() and fsdp_cpp.EMA")
        copied = nn.Module.__new__(type(self))
        memo[id(self)] = copied
        hidden = (_MARK, shard.PENDING, "forward")
        copied.__dict__.update(copy.deepcopy({name: value for name, value in self.__dict__.items() if name not in hidden}, memo))
        _set_mark(copied, copy.deepcopy(mark, memo))
        return copied

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backwards are the last of their cycle. One is where none of these three methods says otherwise."""
        _set_last(self, "set_is_last_backward", is_last_backward)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: backwards are not the last of their cycle, and gradients add up."""
        _refuse_part(self, "set_requires_gradient_sync", recurse)
        _set_last(self, "set_requires_gradient_sync", requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """The same: here the outer axis is reduced once per cycle in any case."""
        _refuse_part(self, "set_requires_all_reduce", recurse)
        _set_last(self, "set_requires_all_reduce", requires_all_reduce)

    def set_modules_to_forward_prefetch(self, modules: Iterable[nn.Module]) -> None:
        """Which modules are gathered when this one's forward begins."""
        _set_prefetch(self, modules, in_backward=False)

    def set_modules_to_backward_prefetch(self, modules: Iterable[nn.Module]) -> None:
        """Which modules are gathered when this one's backward begins."""
        _set_prefetch(self, modules, in_backward=True)

    _strategy = "say reshard_after_forward in fully_shard(): the strategy is fixed when the model is sharded"
    _divide = "gradients are means over ranks: scale the loss, or use fsdp_cpp.fully_shard(gradient='sum')"
    _own_memory = "the engine's pools own this memory: see user_buffers and pool of fsdp_cpp.fully_shard()"
    _own_comm = "collectives are the engine's own"
    set_reshard_after_forward = _refused("set_reshard_after_forward", _strategy)
    set_reshard_after_backward = _refused("set_reshard_after_backward", _strategy)
    set_unshard_in_backward = _refused("set_unshard_in_backward", "a unit whose weights a backward does not read is not used in it")
    set_reduce_scatter_divide_factor = _refused("set_reduce_scatter_divide_factor", _divide)
    set_gradient_divide_factor = _refused("set_gradient_divide_factor", _divide)
    set_force_sum_reduction_for_comms = _refused("set_force_sum_reduction_for_comms", _divide)
    set_all_reduce_hook = _refused("set_all_reduce_hook", _own_comm)
    set_custom_all_gather = _refused("set_custom_all_gather", _own_comm)
    set_custom_reduce_scatter = _refused("set_custom_reduce_scatter", _own_comm)
    set_separate_reduce_scatter_group = _refused("set_separate_reduce_scatter_group",
                                                 "gathers and reductions have communicators of their own already")
    set_reduce_scatter_unused_params = _refused("set_reduce_scatter_unused_params",
                                                "missing gradients count as zero on every rank")
    set_reduce_scatter_max_input_buffers = _refused("set_reduce_scatter_max_input_buffers", _own_memory)
    set_post_optim_event = _refused("set_post_optim_event", "gathers wait for the updates of their unit already")
    set_allocate_memory_from_process_group_for_comm = _refused("set_allocate_memory_from_process_group_for_comm", _own_memory)
    set_symm_mem_for_comm = _refused("set_symm_mem_for_comm", _own_memory)

    def reset_iter_state(self) -> None:
        """After an exception in forward or backward: drops everything under way. All ranks call it."""
        shard.reset(_sharded_model(getattr(self, _MARK)))


def _refuse_part(module, name, recurse):
    if getattr(module, _MARK).outer is not None or not recurse:
        raise _C.UsageError(f"{name}() is for the outermost module and all inside it: gradients of a model are one cycle")


def _set_last(module, method, is_last):
    root = getattr(module, _MARK).outermost
    (root.expects_more.discard if is_last else root.expects_more.add)(method)
    shard.microbatch(_sharded_model(root), last=not root.expects_more)


def _set_prefetch(module, modules, in_backward):
    model = _sharded_model(getattr(module, _MARK))
    shard.handle(model).set_prefetch(calls.unit_name(module), [calls.unit_name(each) for each in modules], in_backward)
