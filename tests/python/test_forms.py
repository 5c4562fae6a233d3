"""A sharded model is used like a plain one, whatever its modules look like."""

import pytest
import torch
from torch import nn

import fsdp_cpp as fsdp
import parity
import small_models as small
from conftest import each_value, every_strategy, STRATEGIES


def rows(generator):
    return torch.randn(4, small.WIDTH, generator=generator)


def loss_of(model, batch):
    return model(batch).square().mean()


@each_value(make=[small.Forms, small.Repeated, small.Stack], strategy=STRATEGIES)
def test_learns_the_same_sharded_and_plain(world, make, strategy):
    parity.check(world, make(), loss_of, rows, strategy=strategy)


@every_strategy
def test_tied_weights_are_one_weight(world, strategy):
    def tokens(generator):
        return torch.randint(16, (2, 5), generator=generator)

    sharded = parity.check(world, small.Tied(), lambda model, batch: model(batch).logsumexp(-1).mean(), tokens,
                           strategy=strategy)
    assert sharded.head.weight is sharded.embed.weight


@each_value(reentrant=[False, True], strategy=STRATEGIES, once=2)
def test_recomputation_by_torch_checkpoint(world, strategy, reentrant):
    parity.check(world, small.Checkpointed(reentrant), loss_of, rows, strategy=strategy)


def test_frozen_weights_stay(world):
    model = small.Stack()
    model.first.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.requires_grad_(False)
    before = model.blocks[1].up.weight.clone()
    sharded = parity.check(world, model, loss_of, rows)
    with fsdp.unshard(sharded):
        assert torch.equal(sharded.blocks[1].up.weight, before)


def test_buffers_are_as_in_the_plain_model(world):
    model = small.WithBuffers()
    # The plain model sees every rank's batch, and so do its running means; with one rank they are the same.
    # Gradients of weights before a normalisation nearly vanish, and AdamW divides what rounding leaves of them by itself.
    sharded = parity.check(world, model, loss_of, rows, steps=2, tolerance=dict(rtol=1e-3, atol=1e-3))
    if world.size == 1:
        for ours, theirs in zip(sharded.buffers(), model.buffers()):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_nested_units_and_units_by_name_class_and_function(world):
    for units in [["blocks.*", "blocks.*.up"], small.Block, [lambda module: isinstance(module, nn.Linear)], ["first", nn.LayerNorm]]:
        parity.check(world, small.Stack(), loss_of, rows, steps=2, units=units)


@every_strategy
def test_modules_inside_may_be_sharded_before(world, strategy):
    def from_inside(model):
        for block in model.blocks:
            fsdp.fully_shard(block, units=["up"])
        return model

    sharded = parity.check(world, small.Stack(), loss_of, rows, prepare=from_inside, strategy=strategy)
    assert fsdp.shard.handle(sharded).unit_names[:3] == ["model", "blocks.0", "blocks.0.up"]
    assert not fsdp.is_sharded(sharded.blocks[0])


def test_main_weights_of_modules_inside_are_not_rounded_silently(world):
    model = small.Stack()
    fsdp.fully_shard(model.blocks[0], params=torch.bfloat16)
    with pytest.raises(fsdp.UsageError, match="hold more than its weights"):
        fsdp.fully_shard(model)


def test_evaluation_without_gradients(world):
    model = small.Stack()
    batch = rows(torch.Generator().manual_seed(1))
    expected = model(batch).detach()
    fsdp.fully_shard(model)
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(batch), expected)
    with torch.inference_mode():
        assert torch.equal(model(batch), expected)
    model.train()
    assert torch.equal(model(batch), expected)


def test_forward_may_be_called_directly(world):
    model = small.Stack()
    batch = rows(torch.Generator().manual_seed(1))
    expected = model(batch).detach()
    fsdp.fully_shard(model)
    assert torch.equal(model.forward(batch), expected)


def test_autocast(world):
    def loss(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(batch).float().square().mean()

    # bf16 products: gradients of ranks are rounded before they are summed.
    parity.check(world, small.Stack(), loss, rows, tolerance=dict(rtol=2e-2, atol=2e-3))


def test_dropout_draws_the_same_numbers(world):
    model = nn.Sequential(small.Stack(), nn.Dropout(0.5))
    batch = rows(torch.Generator().manual_seed(1))
    torch.manual_seed(3)
    expected = model(batch).detach()
    fsdp.fully_shard(model)
    torch.manual_seed(3)
    assert torch.equal(model(batch), expected)


def test_microbatches_add_up(world):
    model = small.Stack()
    sharded = fsdp.fully_shard(small_copy(model))
    batches = [rows(torch.Generator().manual_seed(100 * step + rank)) for step in range(3) for rank in range(world.size)]
    for batch in batches:
        (loss_of(model, batch) / world.size).backward()
    for step in range(3):
        batch = batches[step * world.size + world.rank]
        if step < 2:
            with fsdp.no_sync(sharded):
                loss_of(sharded, batch).backward()
        else:
            loss_of(sharded, batch).backward()
    parity.compare_gradients(model, sharded)


def small_copy(model):
    import copy
    return copy.deepcopy(model)


def test_an_exception_in_a_forward_leaves_a_usable_model(world):
    model = fsdp.fully_shard(small.Stack())
    with pytest.raises(RuntimeError, match="mat1 and mat2|size"):
        model(torch.randn(2, small.WIDTH + 1))
    fsdp.reset(model)
    loss_of(model, torch.ones(2, small.WIDTH)).backward()


def test_reading_a_sharded_parameter_outside_its_unit_says_so(world):
    model = fsdp.fully_shard(small.Stack())
    if world.size == 1:
        assert model.blocks[0].up.weight.sum().isfinite()  # one rank has everything
        return
    with pytest.raises(RuntimeError, match="'blocks.0.up.weight' is touched while its unit 'blocks.0' is sharded"):
        model.blocks[0].up.weight.sum()


def test_unshard_reads_and_writes_whole_parameters(world):
    model = small.Stack()
    expected = model.blocks[1].down.weight.detach().clone()
    fsdp.fully_shard(model)
    with fsdp.unshard(model):
        assert torch.equal(model.blocks[1].down.weight, expected)
    with fsdp.unshard(model, write=True), torch.no_grad():
        model.blocks[1].down.weight.mul_(2)
    with fsdp.unshard(model):
        assert torch.equal(model.blocks[1].down.weight, 2 * expected)


def test_memory_says_what_is_there(world):
    model = fsdp.fully_shard(small.Stack())
    numel = sum(parameter.numel() for parameter in model.parameters())
    memory = fsdp.memory(model)
    assert memory.weights >= 4 * numel // world.size and memory.weights < 4 * numel // world.size + 4096
    assert memory.total >= memory.weights and "weight" in str(memory)


def test_meta_parameters_get_values_in_shards(world):
    with torch.device("meta"):
        model = small.Stack()
        model.scale = nn.Parameter(torch.ones(small.WIDTH))

    def init_weights(module):
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 0.25)

    fsdp.fully_shard(model, init_weights=init_weights)
    with fsdp.unshard(model):
        assert all((parameter == 0.25).all() for parameter in model.parameters())


def test_meta_parameters_are_initialised_by_reset_parameters(world):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    torch.manual_seed(5)
    fsdp.fully_shard(model, units=nn.Linear)
    torch.manual_seed(5)
    expected = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    with fsdp.unshard(model):
        for ours, theirs in zip(model.parameters(), expected.parameters()):
            assert torch.equal(ours, theirs)
