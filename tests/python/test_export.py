"""Whole weights leave a sharded model tensor by tensor: to a directory that transformers loads, or to a function."""

import copy
import os

import pytest
import torch

import fsdp_cpp as fsdp
import small_models as small
from conftest import every_strategy
from test_checkpoint import folder, train, trained, whole  # noqa: F401, a fixture is one of them


def given(model, **options):
    found = {}
    fsdp.export_weights(model, found.__setitem__, **options)
    return found


@every_strategy
def test_a_function_gets_every_tensor_as_the_model_computes(world, strategy):
    model, _ = trained(world, strategy=strategy)
    expected = whole(model)
    for on_all_ranks in (False, True):
        found = given(model, on_all_ranks=on_all_ranks, chunk_bytes=100)
        if world.rank > 0 and not on_all_ranks:
            assert found == {}
            continue
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


def test_narrow_weights_go_out_as_they_compute_or_as_they_are_updated(world):
    torch.manual_seed(7)
    model = fsdp.fully_shard(small.WithBuffers().bfloat16(), main_params=torch.float32)
    optimizer = fsdp.AdamW(model, lr=1e-3)
    for _ in range(2):
        model(torch.ones(2, small.WIDTH, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    computing, main = given(model, on_all_ranks=True), given(model, values="main", on_all_ranks=True)
    parameters = {name for name, _ in model.named_parameters()}
    for name, value in whole(model).items():
        assert torch.equal(computing[name], value), name
        if name in parameters:
            assert main[name].dtype == torch.float32
    assert any(not torch.equal(main[name], computing[name].float()) for name in parameters), "main weights are finer"
    rounded = given(model, values="main", dtype=torch.bfloat16, on_all_ranks=True)
    for name in parameters:
        assert torch.equal(rounded[name], main[name].bfloat16()), name


def test_transformers_loads_the_directory(world, folder):  # noqa: F811
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                                      tie_word_embeddings=True)
    torch.manual_seed(7)
    plain = transformers.LlamaForCausalLM(config)
    model = fsdp.fully_shard(copy.deepcopy(plain))
    directory = os.path.join(folder, "weights")
    fsdp.export_weights(model, directory, config=config, max_file_bytes=3000, chunk_bytes=500)
    with pytest.raises(fsdp.Error, match="is there already" if world.rank == 0 else "failed on rank 0"):
        fsdp.export_weights(model, directory)
    fsdp.export_weights(model, directory, config=config, max_file_bytes=3000, overwrite=True)
    assert os.path.exists(f"{directory}/model.safetensors.index.json")
    loaded = transformers.LlamaForCausalLM.from_pretrained(directory)
    for name, value in plain.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_an_exception_of_the_function_ends_all_ranks(world):
    model, optimizer = trained(world)

    def failing(name, value):
        raise KeyError("no such engine")

    with pytest.raises(KeyError if world.rank == 0 else fsdp.Error, match="no such engine" if world.rank == 0 else "failed on rank 0"):
        fsdp.export_weights(model, failing)
    train(world, model, optimizer, 1)
    assert given(model, on_all_ranks=True).keys() == whole(model).keys()


def test_wrong_options_are_refused(world):
    model = fsdp.fully_shard(small.Stack())
    with pytest.raises(fsdp.UsageError, match='values is \'old\'; use "compute" or "main"'):
        fsdp.export_weights(model, print, values="old")
    with pytest.raises(fsdp.UsageError, match="on_all_ranks is True, but one rank writes a directory"):
        fsdp.export_weights(model, "weights", on_all_ranks=True)
