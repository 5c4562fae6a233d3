"""Programs written for FSDP2 learn the same here; what has no meaning is refused."""

import copy

import pytest
import torch

import fsdp_cpp as fsdp
import fsdp_cpp.fsdp2
import parity
import small_models as small
from test_forms import loss_of, rows
from test_optim import train


def marked(model, **options):
    for block in model.blocks:
        fsdp.fsdp2.fully_shard(block, **options)
    return fsdp.fsdp2.fully_shard(model, **options)


def test_fsdp2_from_the_inside_out(world):
    plain = small.Stack()
    model = marked(copy.deepcopy(plain))
    assert isinstance(model, fsdp.fsdp2.FSDPModule) and isinstance(model, small.Stack) and type(model).__name__ == "Stack"
    optimizer = fsdp.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    assert fsdp.shard.handle(model).unit_names == ["model", "blocks.0", "blocks.1", "blocks.2"]
    train(world, plain, model, torch.optim.AdamW(plain.parameters(), lr=1e-2), optimizer)


def test_fsdp2_shards_at_the_first_forward(world):
    model = marked(small.Stack())
    assert not fsdp.is_sharded(model)
    loss_of(model, torch.ones(2, small.WIDTH)).backward()
    assert fsdp.is_sharded(model)
    optimizer = fsdp.AdamW(model)
    optimizer.step()


def test_fsdp2_mixed_precision_keeps_main_weights_and_casts(world):
    policy = fsdp.fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32,
                                             output_dtype=torch.float32)
    plain = small.Stack()
    model = marked(copy.deepcopy(plain), mp_policy=policy)
    seen = []
    model.blocks[0].up.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0].dtype, output.dtype)))
    output = model(torch.ones(2, small.WIDTH))
    assert seen == [(torch.bfloat16, torch.bfloat16)] and output.dtype == torch.float32
    output.sum().backward()
    for each in fsdp.shard.handle(model).parameters():
        assert each.main_weight.dtype == each.gradient.dtype == torch.float32
        whole = dict(plain.named_parameters())[each.name].flatten()
        assert torch.equal(each.main_weight, whole[each.begin:each.begin + each.main_weight.numel()])


def test_fsdp2_methods(world):
    plain = small.Stack()
    model = marked(copy.deepcopy(plain), reshard_after_forward=True)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
    model.blocks[2].set_modules_to_backward_prefetch([model.blocks[1]])
    model.blocks[1].unshard()
    assert torch.equal(model.blocks[1].up.weight, plain.blocks[1].up.weight)
    model.blocks[1].reshard()
    for step in range(2):
        model.set_requires_gradient_sync(step == 1)
        for batch in parity.batches_of(world, rows, 2)[step:step + 1]:
            parity.plain_step(plain, loss_of, batch)
            loss_of(model, batch[world.rank]).backward()
    parity.compare_gradients(plain, model)


REFUSED_BY_FSDP2 = [
    (dict(shard_placement_fn=lambda parameter: None), "shard_placement_fn is set"),
    (dict(reshard_after_forward=2), "reshard_after_forward is 2"),
    (dict(dp_mesh_dims=object()), "dp_mesh_dims is set"),
]


@pytest.mark.parametrize("options,sentence", REFUSED_BY_FSDP2, ids=[list(w[0])[0] for w in REFUSED_BY_FSDP2])
def test_fsdp2_refuses_what_has_no_meaning(world, options, sentence):
    with pytest.raises(fsdp.UsageError, match=sentence):
        fsdp.fsdp2.fully_shard(small.Stack(), **options)


def test_fsdp2_refused_models_do_not_run_unsharded(world):
    model = small.Stack()
    fsdp.fsdp2.fully_shard(model.blocks[0], reshard_after_forward=True)
    fsdp.fsdp2.fully_shard(model.blocks[1], reshard_after_forward=False)
    fsdp.fsdp2.fully_shard(model)
    for _ in range(2):
        with pytest.raises(fsdp.UsageError, match="True for some modules and False for others"):
            model(torch.ones(2, small.WIDTH))


def test_fsdp2_modules_that_own_nothing_are_whole_already(world):
    model = torch.nn.Sequential(small.Block(), small.Block())
    for module in (*model, model):
        fsdp.fsdp2.fully_shard(module)
    model.unshard()
    model.reshard()
    model(torch.ones(2, small.WIDTH))


def test_fsdp2_knows_every_method_and_argument_of_torch(world):
    from torch.distributed import fsdp as theirs
    methods = {name for name in vars(theirs.FSDPModule) if not name.startswith("_")}
    assert methods <= set(dir(fsdp.fsdp2.FSDPModule)), methods - set(dir(fsdp.fsdp2.FSDPModule))
    import inspect
    arguments = set(inspect.signature(theirs.fully_shard).parameters)
    assert arguments <= set(inspect.signature(fsdp.fsdp2.fully_shard).parameters)
