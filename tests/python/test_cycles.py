"""A cycle of backwards has one end: whoever reads gradients finds them there and complete, or hears in words that they are not."""

import copy

import pytest
import torch

import fsdp_cpp as fsdp
from fsdp_cpp import fsdp2
import parity
import small_models as small
from conftest import each_value, STRATEGIES
from test_forms import loss_of, rows

# Meshes of the ranks: one axis, and replicas.
MESHES = {"outer": lambda world: fsdp.mesh(outer=world.size), "inner": lambda world: fsdp.mesh()}
OTHERS = {"fsdp.SGD": lambda model: fsdp.SGD(model, lr=0.1),
          "torch.optim.SGD": lambda model: fsdp.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))}

every_mesh = each_value(over=MESHES, strategy=STRATEGIES)
every_mesh_and_optimizer = each_value(over=MESHES, strategy=STRATEGIES, make=OTHERS)


def pair(world, over, strategy, **options):
    plain = small.Stack()
    return plain, fsdp.fully_shard(copy.deepcopy(plain), MESHES[over](world), strategy=strategy, **options)


def accumulate(world, plain, sharded, backward):
    """Three microbatches of data of each rank's own; `backward(index, loss)` is called for those of the sharded model."""
    for index, batches in enumerate(parity.batches_of(world, rows, 3)):
        parity.plain_step(plain, loss_of, batches)
        backward(index, loss_of(sharded, batches[world.rank]))


def under_no_sync(sharded):
    def backward(index, loss):
        with fsdp.no_sync(sharded):
            loss.backward()
    return backward


@every_mesh_and_optimizer
def test_step_ends_a_cycle_of_which_no_backward_was_the_last(world, over, strategy, make):
    plain, sharded = pair(world, over, strategy)
    theirs, ours = torch.optim.SGD(plain.parameters(), lr=0.1), OTHERS[make](sharded)
    for _ in range(2):
        accumulate(world, plain, sharded, under_no_sync(sharded))
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
    parity.compare_weights(plain, sharded)


@every_mesh
def test_end_cycle_and_clipping_complete_gradients(world, over, strategy):
    plain, sharded = pair(world, over, strategy)
    accumulate(world, plain, sharded, under_no_sync(sharded))
    fsdp.end_cycle(sharded)
    parity.compare_gradients(plain, sharded)
    plain, sharded = pair(world, over, strategy)
    accumulate(world, plain, sharded, under_no_sync(sharded))
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    torch.testing.assert_close(fsdp.clip_grad_norm_(sharded, 0.01), expected)
    parity.compare_gradients(plain, sharded)


@every_mesh
def test_nested_no_sync_does_not_end_the_outer_one(world, over, strategy):
    plain, sharded = pair(world, over, strategy)

    def backward(index, loss):
        if index == 2:
            return loss.backward()
        with fsdp.no_sync(sharded):
            with fsdp.no_sync(sharded):
                pass
            loss.backward()

    accumulate(world, plain, sharded, backward)
    fsdp.microbatch(sharded, last=False)
    with fsdp.no_sync(sharded):
        pass
    assert not fsdp.shard.handle(sharded).is_last_microbatch, "as it was before"
    parity.compare_gradients(plain, sharded)


READERS = {"step of ours": lambda model, optimizer: fsdp.SGD(model, lr=0.1).step(), "step of others": lambda model, optimizer: optimizer.step(),
           "clip_grad_norm_": lambda model, optimizer: fsdp.clip_grad_norm_(model, 1.0), "gradients": lambda model, optimizer: fsdp.gradients(model),
           "end_cycle": lambda model, optimizer: fsdp.end_cycle(model)}


@each_value(strategy=STRATEGIES, reader=READERS)
def test_readers_of_an_empty_cycle_are_told(world, reader, strategy):
    model = fsdp.fully_shard(small.Stack(), strategy=strategy)
    optimizer = fsdp.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(fsdp.UsageError, match="finds no gradients in this cycle"):
        READERS[reader](model, optimizer)
    loss_of(model, torch.ones(2, small.WIDTH)).backward()
    optimizer.zero_grad()
    before = fsdp.state_dict(model, on_all_ranks=True)
    with pytest.raises(fsdp.UsageError, match="finds no gradients in this cycle"):
        READERS[reader](model, optimizer)
    after = fsdp.state_dict(model, on_all_ranks=True)
    assert all(torch.equal(before[name], after[name]) for name in before), "the gradients of the last cycle are not applied again"


@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_incomplete_gradients_are_not_given_out(world, strategy):
    model = fsdp.fully_shard(small.Stack(), fsdp.mesh(), strategy=strategy)
    with fsdp.no_sync(model):
        loss_of(model, torch.ones(2, small.WIDTH)).backward()
    with pytest.raises(fsdp.UsageError, match=r"gradients\(\) finds incomplete gradients of unit"):
        fsdp.gradients(model)
    fsdp.end_cycle(model)
    assert len(fsdp.gradients(model)) == len(list(model.parameters()))


def syncs(model, is_last):
    model.set_requires_gradient_sync(is_last)


def never_syncs(model, is_last):
    model.set_requires_gradient_sync(False)


def sums_over_replicas_once(model, is_last):
    model.set_requires_all_reduce(is_last)
    model.set_requires_gradient_sync(True)  # which does not make it the last


def names_the_last(model, is_last):
    model.set_is_last_backward(is_last)
    model.set_requires_gradient_sync(True)


@each_value(over=MESHES, reshards=[True, False], say=[syncs, never_syncs, sums_over_replicas_once, names_the_last])
def test_fsdp2s_words_for_microbatches(world, over, reshards, say):
    plain = small.Stack()
    model = copy.deepcopy(plain)
    mesh = MESHES[over](world)
    for module in (*model.blocks, model):
        fsdp2.fully_shard(module, mesh=mesh, reshard_after_forward=reshards)
    theirs, ours = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model))
    fsdp.shard_optimizer(ours)

    def backward(index, loss):
        say(model, index == 2)
        loss.backward()

    for _ in range(2):
        accumulate(world, plain, model, backward)
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
    parity.compare_weights(plain, model)


@every_mesh_and_optimizer
def test_closures_compute_the_gradients_of_their_step(world, over, strategy, make):
    plain, sharded = pair(world, over, strategy)
    theirs, ours = torch.optim.SGD(plain.parameters(), lr=0.1), OTHERS[make](sharded)
    for batches in parity.batches_of(world, rows, 3):
        parity.plain_step(plain, loss_of, batches)
        theirs.step()
        theirs.zero_grad()

        def closure(batch=batches[world.rank]):
            ours.zero_grad()
            loss = loss_of(sharded, batch)
            loss.backward()
            return loss

        assert ours.step(closure).item() > 0.0
    parity.compare_weights(plain, sharded)
