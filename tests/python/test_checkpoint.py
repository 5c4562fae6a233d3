"""Checkpoints from Python are those of the C++ trainer, and state dicts are the plain model's."""

import copy
import os
import pathlib
import shutil
import sys
import tempfile

import pytest
import torch

import fsdp_cpp as fsdp
import parity
import small_models as small
from test_forms import loss_of, rows

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "processes"))
import small_runs  # noqa: E402


@pytest.fixture
def folder(world, tmp_path_factory):
    """One folder for all ranks."""
    path = os.path.join(tempfile.gettempdir(), f"fsdp_cpp_{os.environ.get('MASTER_PORT', os.getpid())}")
    if world.rank == 0:
        os.makedirs(path, exist_ok=True)
    world.barrier()
    yield path
    world.barrier()
    if world.rank == 0:
        shutil.rmtree(path)


def trained(world, steps=2, **options):
    torch.manual_seed(7)
    model = fsdp.fully_shard(small.WithBuffers(), **options)
    optimizer = fsdp.AdamW(model, lr=1e-2)
    train(world, model, optimizer, steps)
    return model, optimizer


def train(world, model, optimizer, steps, seed=3):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        loss_of(model, rows(generator)).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model):
    return fsdp.state_dict(model, on_all_ranks=True)


def test_a_run_goes_on_where_it_stopped(world, folder):
    model, optimizer = trained(world)
    fsdp.save(folder, model, optimizer, step=2, schedule={"lr": 0.5}, data=[world.rank])
    train(world, model, optimizer, 2, seed=5)
    again, its_optimizer = trained(world, steps=0)
    loaded = fsdp.load(folder, again, its_optimizer)
    assert loaded.step == 2 and loaded.schedule == {"lr": 0.5} and loaded.data == [world.rank]
    train(world, again, its_optimizer, 2, seed=5)
    expected = whole(model)
    for name, value in whole(again).items():
        assert torch.equal(value, expected[name]), name


def test_the_checkpointer_saves_beside_training_and_keeps_the_last(world, folder):
    model, optimizer = trained(world)
    checkpointer = fsdp.Checkpointer(folder, model, optimizer, keep_last=1)
    assert checkpointer.load_latest() is None
    checkpointer.save(2)
    expected = whole(model)
    train(world, model, optimizer, 1)
    checkpointer.wait()
    assert checkpointer.load_latest().step == 2
    for name, value in whole(model).items():
        assert torch.equal(value, expected[name]), name


def test_a_state_dict_is_the_plain_models(world):
    plain = small.Tied()
    sharded = fsdp.fully_shard(copy.deepcopy(plain))
    found = fsdp.state_dict(sharded)
    if world.rank > 0:
        assert found is None
        return
    assert list(found) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(found[name], value), name
    copy.deepcopy(plain).load_state_dict(found)


@pytest.mark.skipif("FSDP_BINARY" not in os.environ, reason="needs the command fsdp (FSDP_BINARY)")
def test_checkpoints_go_from_the_command_to_python_and_back(world, folder):
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.torch")
    command = os.environ["FSDP_BINARY"]
    run = os.path.join(folder, "run")
    if world.rank == 0:
        small_runs.write_model(f"{folder}/model/config.json")
        small_runs.write_text(f"{folder}/text.txt")
        small_runs.run([command, "train", "--model", "model/config.json", "--data", "text.txt", "--steps", "4", "--checkpoint-dir",
                        "run", *small_runs.SHAPE], cwd=folder)
    world.barrier()
    config = transformers.LlamaConfig(**{name: value for name, value in small_runs.LLAMA.items() if name != "model_type"})
    torch.manual_seed(world.size)
    model = fsdp.fully_shard(transformers.LlamaForCausalLM(config))
    optimizer = fsdp.AdamW(model, lr=1e-3)
    loaded = fsdp.load(run, model, optimizer)
    assert loaded.step == 4 and isinstance(loaded.schedule, dict | str)
    stored = safetensors.load_file(f"{run}/step-00000004/model/00000-0.safetensors")
    for name, value in whole(model).items():
        assert torch.equal(value, stored[name]), name
    tokens = torch.arange(16).reshape(1, 16)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    fsdp.save(f"{folder}/again", model, optimizer, step=5, config=config)
    if world.rank == 0:
        small_runs.run([command, "train", "--model", "model/config.json", "--data", "text.txt", "--steps", "7", "--resume",
                        f"{folder}/again", "--restart-data", "--checkpoint-dir", "third", *small_runs.SHAPE], cwd=folder)
        assert os.path.isdir(f"{folder}/third/step-00000007")
    world.barrier()
