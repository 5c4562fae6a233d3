"""Checkpoints of torch.distributed.checkpoint for tests: real ones, written by one process or by gloo ranks, and broken ones.

Beside a checkpoint comes what whoever reads it must find: {name: whole tensor}.
"""

import atexit
import functools
import os
import pathlib
import pickle
import shutil
import tempfile
import types
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

ONE_RANK = pytest.mark.skipif(int(os.environ.get("WORLD_SIZE", "1")) > 1, reason="needs one rank: it starts others itself")


# --- one process -----------------------------------------------------------------------------------------------------------


def save(state, directory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch.distributed is not initialised
        dcp.save(state, checkpoint_id=str(directory), no_dist=True)


def trained(steps=3):
    """A model with odd shapes, and its AdamW after some steps."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3, bias=False),
                                torch.nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def expected_of(model, optimizer):
    """({parameter: weight}, {"parameter.exp_avg": moment, ...})."""
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    moments = {f"{name}.{moment}": optimizer.state[parameter][moment].clone() for name, parameter in model.named_parameters()
               for moment in ("exp_avg", "exp_avg_sq")}
    return weights, moments


def states_of(model, optimizer):
    """The forms in which programs save one training state: name -> dict."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, state = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    return {
        "torch": {"model": weights, "optimizer": state},
        "flattened": {"model": weights, "optim": get_optimizer_state_dict(model, optimizer, options=flat)},
        "app": {"app": {"model": weights, "optim": state}},
        "names without a section": {**weights, "optimizer": state, "train_state": {"step": torch.tensor(3)}},
        "state_dict": {"state_dict": weights, "optimizer_states": [state], "epoch": 1},
        "by numbers": {"model": weights, "optimizer": optimizer.state_dict()},
        "wrapped": {"model": {f"module._orig_mod.{name}": value for name, value in weights.items()},
                    "optimizer": {"state": {f"module.module.{name}": value for name, value in state["state"].items()}},
                    "rng_state": {"(0, 0)": [{"torch_rng_state": torch.get_rng_state()}]}, "iteration": 3},
    }


# --- ranks -----------------------------------------------------------------------------------------------------------------


RANKS = 3


def saved_on_ranks(body):
    """(path of a checkpoint, what is in it) that gloo ranks made by body(rank, ranks, folder); only to be read."""
    folder = os.path.join(_folder_of_ranks(), body.__name__)
    return os.path.join(folder, "checkpoint"), torch.load(os.path.join(folder, "expected.pt"))


@functools.cache
def _folder_of_ranks():
    """One job of gloo ranks writes what all tests need, because ranks take seconds to start."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    torch.multiprocessing.spawn(_rank, args=(folder,), nprocs=RANKS)
    return folder


def _rank(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    for body in (fsdp2_run, placed_tensors, megatron_run, megatron_offloaded_run):
        os.makedirs(os.path.join(folder, body.__name__), exist_ok=True)
        body(rank, RANKS, os.path.join(folder, body.__name__))
        dist.barrier()
    dist.destroy_process_group()


def _save_all(state, expected, rank, folder):
    dcp.save(state, checkpoint_id=os.path.join(folder, "checkpoint"))
    if rank == 0:
        torch.save(expected, os.path.join(folder, "expected.pt"))


def fsdp2_run(rank, ranks, folder):
    """FSDP2 with parameters of 7, 3 and 1 rows, so that ranks have uneven and empty parts."""
    from torch.distributed.fsdp import fully_shard
    model, _ = trained(steps=0)
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: value.full_tensor() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            expected[f"{name}.{moment}"] = optimizer.state[parameter][moment].full_tensor()
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    _save_all(state, expected, rank, folder)


def placed_tensors(rank, ranks, folder):
    """Cut between columns, along both dims' meshes, replicated, without elements, and of several types."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    pairs = dist.device_mesh.init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("replicas", "shards"))
    whole = {"columns": torch.arange(35.).view(5, 7), "deep": torch.arange(60).view(3, 4, 5),
             "half": torch.arange(9).to(torch.bfloat16), "replicated": torch.arange(4.),
             "hybrid": torch.arange(12.).view(6, 2), "scalar": torch.tensor(4.5), "empty": torch.empty(0, 3)}
    places = {"columns": (mesh, [Shard(1)]), "deep": (mesh, [Shard(2)]), "half": (mesh, [Shard(0)]),
              "replicated": (mesh, [Replicate()]), "hybrid": (pairs, [Replicate(), Shard(0)])}
    state = {name: distribute_tensor(value, *places[name]) if name in places else value for name, value in whole.items()}
    _save_all(state, whole, rank, folder)


# --- as Megatron's fsdp_dtensor does ----------------------------------------------------------------------------------------


def uneven(whole, rows, mesh):
    """A DTensor whose ranks have the given rows, any number each, and which tells DCP so by hooks on its local tensor."""
    rank = mesh.get_local_rank()
    begin = sum(rows[:rank])
    local = whole[begin:begin + rows[rank]].clone()
    offsets, sizes = torch.Size([begin, *[0] * (whole.ndim - 1)]), local.shape
    chunk = ChunkStorageMetadata(offsets=offsets, sizes=sizes)

    def write_items(name, _):
        data = TensorWriteData(chunk=chunk, properties=TensorProperties.create_from_tensor(local), size=whole.shape)
        item = WriteItem(index=MetadataIndex(name, offsets), type=WriteItemType.SHARD, tensor_data=data)
        return [item] if local.numel() else []

    local.__create_chunk_list__ = lambda: [chunk]
    local.__create_write_items__ = write_items
    result = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
    result._local_tensor = local  # from_local() makes a view, without the hooks
    return result


MEGATRON = {  # parameter -> rows of its stored parts
    "embedding.word_embeddings.weight": [("", 11)],
    "decoder.layers.0.mlp.linear_fc1.weight": [("_w", 6), ("_v", 6)],
    "decoder.layers.0.mlp.linear_fc1.bias": [("_w", 5), ("_v", 5)],
    "decoder.layers.1.mlp.experts.linear_fc1.weight3": [("_w", 4), ("_v", 4)],
    "decoder.layers.1.mlp.experts.linear_fc2.weight3": [("", 3)],
    "decoder.layers.2.self_attention.in_proj.weight": [(".query", 4), (".key", 4), (".value", 6), (".z", 6), (".beta", 2),
                                                       (".alpha", 2)],
    "decoder.layers.2.self_attention.conv1d.weight": [(".query", 4), (".key", 4), (".value", 6)],
}


def megatron_state(place, place_moment=None):
    """(the dict that Megatron saves, {parameter or moment: whole tensor}); place(tensor) shards a tensor."""
    place_moment = place_moment or place
    generator = torch.Generator().manual_seed(5)
    model, state, groups, whole = {}, {}, {}, {}
    for name, parts in MEGATRON.items():
        columns = () if name.endswith("bias") else (3,)
        for kind in ("", "exp_avg", "exp_avg_sq"):
            pieces = [torch.randn(rows, *columns, generator=generator) for _, rows in parts]
            whole[f"{name}.{kind}" if kind else name] = torch.cat(pieces)
            for (suffix, _), piece in zip(parts, pieces):
                if kind:
                    state.setdefault(f"module.module.{name}{suffix}", {})[kind] = place_moment(piece)
                else:
                    model[f"module.{name}{suffix}"] = place(piece)
                decay = 0.0 if name.endswith("bias") else 0.1
                groups[f"module.module.{name}{suffix}"] = {"lr": 0.5, "weight_decay": decay, "step": 12}
    saved = {"args": types.SimpleNamespace(swiglu=True), "checkpoint_version": 3.0, "iteration": 12, "model": model,
             "optimizer": {"state": state, "param_to_group_meta": groups}, "opt_param_scheduler": {"num_steps": 12},
             "rng_state": {"(0, 0)": [{"torch_rng_state": torch.get_rng_state(), "random_rng_state": (3, (1, 2), None)}]}}
    return saved, whole


def megatron_run(rank, ranks, folder, has_flat_moments=False):
    """Two ranks have uneven parts of a tensor, and the others none; which ones changes from tensor to tensor."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    turn = 0

    def place(piece):
        nonlocal turn
        turn += 1
        rows = [0] * ranks
        rows[turn % ranks] = min(1 + turn % 4, piece.shape[0])
        rows[(turn + 1) % ranks] = piece.shape[0] - rows[turn % ranks]
        return uneven(piece, rows, mesh)

    state, whole = megatron_state(place, (lambda piece: place(piece.flatten())) if has_flat_moments else None)
    _save_all(state, whole, rank, folder)


def megatron_offloaded_run(rank, ranks, folder):
    """The moments of an optimizer on the CPU have one dimension, and are cut anywhere in a row."""
    megatron_run(rank, ranks, folder, has_flat_moments=True)


# --- broken ----------------------------------------------------------------------------------------------------------------


def edit_metadata(directory, change):
    """Changes .metadata: change(metadata) may return another object to pickle."""
    path = pathlib.Path(directory) / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    changed = change(metadata)
    path.write_bytes(pickle.dumps(metadata if changed is None else changed))


def stream_of(directory, key):
    """(path of the file, begin, length) of the first chunk of a tensor."""
    metadata = pickle.loads((pathlib.Path(directory) / ".metadata").read_bytes())
    info = next(info for index, info in metadata.storage_data.items() if index.fqn == key)
    return pathlib.Path(directory) / info.relative_path, info.offset, info.length
