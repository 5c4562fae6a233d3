"""Patches from Python bring the trainer's bits, as tensors and as files."""

import json
import os

import pytest
import torch

import fsdp_cpp as fsdp
import small_models as small
from test_checkpoint import folder, train, whole  # noqa: F401


def stream_of(world, **options):
    torch.manual_seed(7)
    model = fsdp.fully_shard(small.WithBuffers())
    optimizer = fsdp.AdamW(model, lr=1e-5, marks_changes=True)
    return model, optimizer, fsdp.PatchStream(model, optimizer, **options)


def gathered(world, patch):
    """The tensors of all ranks, in their order: (name, shape, positions, values)."""
    return [(each.name, each.shape, each.positions, each.values) for each in patch.tensors]


def test_one_rank_brings_every_bit(world):
    if world.size > 1:
        pytest.skip("ranks have a part each; patches_test joins them")
    model, optimizer, stream = stream_of(world)
    received = {}
    for step in range(4):
        patch = stream.take(step)
        assert (patch.begin, patch.end) == (None if step == 0 else step - 1, step)
        for name, shape, positions, values in gathered(world, patch):
            flat = received.setdefault(name, torch.zeros(shape, dtype=values.dtype)).view(-1)
            flat[positions] = values
        for name, value in whole(model).items():
            assert torch.equal(received[name], value), name
        train(world, model, optimizer, 1, seed=step)


def test_written_patches_follow_each_other(world, folder):  # noqa: F811
    model, optimizer, stream = stream_of(world)
    paths = [stream.write(folder, 0)]
    train(world, model, optimizer, 2)
    paths.append(stream.write(folder, 2))
    assert [os.path.basename(path) for path in paths] == ["patch-full-00000000", "patch-00000000-00000002"]
    records = [json.load(open(os.path.join(path, "patch.json"))) for path in paths]
    assert [(each["from"], each["to"], each["names"]) for each in records] == [(None, 0, "hf"), (0, 2, "hf")]
    assert records[0]["base"] == records[1]["base"]
    assert len(records[0]["files"]) == world.size
    assert set(records[0]["tensors"]) == set(whole(model))
    world.barrier()


def test_mistakes_are_refused(world):
    model = fsdp.fully_shard(small.WithBuffers())
    optimizer = fsdp.AdamW(model, lr=1e-5)
    with pytest.raises(fsdp.UsageError, match="marks_changes"):
        fsdp.PatchStream(model, optimizer)
    del optimizer
    optimizer = fsdp.AdamW(model, lr=1e-5, marks_changes=True)
    with pytest.raises(fsdp.UsageError, match="use 'hf' or 'vllm'"):
        fsdp.PatchStream(model, optimizer, names="torch")
    stream = fsdp.PatchStream(model, optimizer)
    stream.take(3)
    with pytest.raises(fsdp.UsageError, match="step is 3; a patch leads to a step after 3"):
        stream.take(3)
