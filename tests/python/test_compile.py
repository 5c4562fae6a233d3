"""Compiled blocks inside units give the same numbers, and nothing is compiled again after the third step."""

import copy

import pytest
import torch

import fsdp_cpp as fsdp
import parity
import small_models as small
from conftest import each_value
from test_forms import loss_of, rows

torch._dynamo.config.suppress_errors = False


def compile_blocks(model, backend):
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def compile_forwards(model, backend):
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=backend)
    return model


def compile_whole(model, backend):
    return torch.compile(model, backend=backend)


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def check(world, before, after, backend, strategy="optim_grads_params", steps=6):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain = small.Stack()
    sharded = fsdp.fully_shard(before(copy.deepcopy(plain), backend), strategy=strategy)
    called = after(sharded, backend)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    ours = fsdp.SGD(sharded, lr=0.1)
    compiled_after = []
    for batches in parity.batches_of(world, rows, steps):
        parity.plain_step(plain, loss_of, batches)
        loss_of(called, batches[world.rank]).backward()
        parity.compare_gradients(plain, sharded)
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
        compiled_after.append(graphs())
    assert compiled_after[0] > 0, "something was compiled"
    assert compiled_after[-1] == compiled_after[2], f"graphs after each step: {compiled_after}"
    if compile_blocks in (before, after):
        assert not torch._dynamo.utils.counters["graph_break"], "a compiled block is one graph inside its unit"
    parity.compare_weights(plain, sharded)


def nothing(model, backend):
    return model


WAYS = {"blocks_after": (nothing, compile_blocks), "forwards_before": (compile_forwards, nothing),
        "forwards_after": (nothing, compile_forwards), "whole_after": (nothing, compile_whole), "blocks_before": (compile_blocks, nothing)}


@each_value(way=WAYS, once=1)
def test_graphs_of_dynamo_and_aot_autograd(world, way):
    check(world, *WAYS[way], "aot_eager")


@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
@pytest.mark.more
def test_code_of_inductor(world, strategy):
    check(world, *WAYS["blocks_before"], "inductor", strategy)


def test_a_compiled_block_can_be_called_by_its_forward(world):
    torch._dynamo.reset()
    plain = small.Stack()
    sharded = compile_blocks(fsdp.fully_shard(copy.deepcopy(plain)), "aot_eager")
    x = torch.randn(4, small.WIDTH)
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(sharded.blocks[1].forward(x), plain.blocks[1](x))
            torch.testing.assert_close(sharded.blocks[1](x), plain.blocks[1](x))


def test_a_failing_compiled_block_leaves_a_model_that_works(world):
    torch._dynamo.reset()
    model = compile_blocks(fsdp.fully_shard(small.Stack()), "aot_eager")
    with pytest.raises(Exception, match="shape|size"):
        model.blocks[0](torch.randn(4, small.WIDTH + 1))
    fsdp.reset(model)
    loss_of(model, torch.randn(4, small.WIDTH)).backward()
