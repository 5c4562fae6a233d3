"""The ranks of this job: how they meet, and how they part."""

import atexit
import datetime
import os
import socket
import sys
from typing import TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh

from . import _C

Over: TypeAlias = "_C.Mesh | DeviceMesh | torch.distributed.ProcessGroup | None"

_world: _C.World | None = None                  # of all ranks of the job
_worlds: dict[tuple[int, ...], _C.World] = {}   # ranks of torch.distributed -> the world they made
_default_mesh: _C.Mesh | None = None
_is_rank = True                                 # not in children of os.fork()
_local_rank: int | None = None                  # of this process on its host, where torch.distributed is initialised


def world() -> _C.World:
    """All ranks of the job: those of torch.distributed where it is initialised, else those of the launcher.

    Joins them at the first call, which all ranks make. `world().rank`, `.size`, `.local_rank`, `.barrier()`.
    """
    global _world
    if _world is None:
        if _distributed_is_initialised():
            _world = _world_of(list(range(torch.distributed.get_world_size())))
        else:
            _world = _C.World.from_environment()
            _watch_exceptions(_world)
    return _world


def mesh(over: Over = None, *, outer: int = 1, ep: int = 1, tp: int = 1) -> _C.Mesh:
    """The ranks as a grid of `outer` x inner ranks, for fully_shard().

    `over`: None for all ranks; a torch DeviceMesh of one dimension (inner) or two (outer, inner); or a ProcessGroup.
    `ep`: neighbours that share out experts; `tp`: neighbours that compute one batch together. Modules that do so talk to each
    other by the axes `mesh.ep` and `mesh.tp`; `mesh.data_parallel_rank` of `mesh.data_parallel_size` is the batch of this rank.
    """
    if isinstance(over, _C.Mesh):
        if (outer, ep, tp) != (1, 1, 1):
            raise _C.UsageError("the mesh is made already; give outer, ep and tp when it is made")
        return over
    if over is None:
        return world().mesh(outer, ep, tp)
    if outer != 1:
        raise _C.UsageError("outer is for all ranks of a job; a DeviceMesh of two dimensions has its own outer one")
    if hasattr(over, "mesh_dim_names") and hasattr(over, "mesh"):
        if over.mesh.ndim > 2:
            raise _C.UsageError(f"the mesh has {over.mesh.ndim} dimensions; it takes one (inner) or two (outer, inner): "
                                "hand over a part of it, e.g. mesh['dp']")
        return _world_of(over.mesh.flatten().tolist()).mesh(over.mesh.shape[0] if over.mesh.ndim == 2 else 1, ep, tp)
    if isinstance(over, torch.distributed.ProcessGroup):
        return _world_of(torch.distributed.get_process_group_ranks(over)).mesh(1, ep, tp)
    raise _C.UsageError(f"mesh is {over!r} ({type(over).__name__}); it takes None, fsdp_cpp.mesh(...), a torch DeviceMesh or "
                        "a ProcessGroup")


def device() -> torch.device:
    """The device of this rank: the GPU of its local rank, the only GPU where it sees one, or the CPU. Joins the ranks as world() does."""
    num_gpus = torch.cuda.device_count()
    return torch.device("cuda", world().local_rank % num_gpus) if num_gpus else torch.device("cpu")


def default_mesh() -> _C.Mesh:
    """The mesh of fully_shard() where none is given: all ranks, made once."""
    global _default_mesh
    if _default_mesh is None:
        _default_mesh = mesh()
    return _default_mesh


def _distributed_is_initialised():
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _world_of(ranks):
    """Our communicators over these ranks of torch.distributed, which meet through its store."""
    if not _distributed_is_initialised():
        raise _C.UsageError("a DeviceMesh or ProcessGroup needs torch.distributed.init_process_group() before it")
    key = tuple(ranks)
    if key in _worlds:
        return _worlds[key]
    own = torch.distributed.get_rank()
    if own not in ranks:
        raise _C.UsageError(f"rank {own} is not among the ranks of the mesh, {ranks}; only those may shard over it")
    store = torch.distributed.distributed_c10d._get_default_store()
    meeting = f"fsdp_cpp/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{','.join(map(str, ranks))}"
    host = _this_host()
    store.set(_host_key(own), host)
    hosts = [store.get(_host_key(rank)).decode() for rank in ranks]
    position = ranks.index(own)
    made = _C.World.from_store(store, position, len(ranks), _own_local_rank(store, host), hosts.count(host),
                               _address(hosts, host), f"{meeting}/address")
    _worlds[key] = made
    _watch_exceptions(made)
    return made


def _host_key(rank):
    return f"fsdp_cpp/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/host/{rank}"


def _this_host():
    """Its name, and the id of its boot: hosts may have one name."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{socket.gethostname()} {file.read().strip()}"
    except OSError:
        return socket.gethostname()


def _own_local_rank(store, host):
    """This process's place among all processes of its host, whoever is in the mesh: it chooses the GPU. Found once.

    LOCAL_RANK, or counted over the ranks of torch.distributed. Ranks that make no mesh do not say where they are, so then it is
    what mpirun or srun says; these come last, because a process of theirs may have started others, which see its variables.
    """
    global _local_rank
    if _local_rank is None:
        _local_rank = _number("LOCAL_RANK")
    if _local_rank is None:
        _local_rank = _counted_local_rank(store, host)
    if _local_rank is None:
        told = [_number(name) for name in ("OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")]
        if told == [None, None] and torch.cuda.device_count() > 1:
            raise _C.UsageError("LOCAL_RANK is not set, and not all ranks of torch.distributed make a mesh, so this one cannot count "
                                "those of its host; set LOCAL_RANK, which chooses the GPU")
        _local_rank = next((number for number in told if number is not None), 0)
    return _local_rank


def _number(name):
    return int(os.environ[name]) if os.environ.get(name, "").isdigit() else None


def _counted_local_rank(store, host):
    """None where a rank before this one has not told its host after ten seconds."""
    before = [_host_key(rank) for rank in range(torch.distributed.get_rank())]
    try:
        if before:
            store.wait(before, datetime.timedelta(seconds=10))
    except RuntimeError:
        return None
    return [store.get(key).decode() for key in before].count(host)


def _address(hosts, host):
    if all(each == host for each in hosts):
        return "127.0.0.1"
    return os.environ.get("MASTER_ADDR") or socket.gethostname()


def _watch_exceptions(made):
    """When this rank ends by an exception, the others hear of it instead of waiting for this one."""
    if made.size == 1:
        return
    before = sys.excepthook

    def tell_others(kind, value, trace):
        try:
            if _is_rank and made.is_open:
                # The words of a RemoteError name the rank that failed, which is not this one.
                made.abort(str(value) if issubclass(kind, _C.RemoteError) else f"rank {made.rank} failed: {kind.__name__}: {value}")
        finally:
            before(kind, value, trace)

    sys.excepthook = tell_others


def _leave_to_parent():
    """A child of os.fork() is no rank: it neither closes the connections that it shares with its parent nor speaks for it."""
    global _is_rank
    _is_rank = False
    _C.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


@atexit.register
def _close():
    global _world, _default_mesh
    _world = _default_mesh = None
    _worlds.clear()
    _C.close_all()
