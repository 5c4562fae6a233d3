"""Programs written for FSDP2 and Megatron-FSDP learn the same here; what has no meaning is refused."""

import copy

import pytest
import torch

import fsdp_cpp as fsdp
import fsdp_cpp.fsdp2
import fsdp_cpp.megatron
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


@pytest.mark.parametrize("strategy", [0, 1, 2, 3, "optim_grads"])
def test_megatron_trains_with_its_own_arguments(world, strategy):
    plain = small.Stack()
    copied = copy.deepcopy(plain)
    model, optimizer = fsdp.megatron.fully_shard(copied, torch.optim.AdamW(copied.parameters(), lr=1e-2),
                                                 fsdp_unit_modules=[small.Block], zero_dp_strategy=strategy,
                                                 check_for_nan_in_grad=True, fsdp_double_buffer=True)
    assert model is copied and model.module is model
    train(world, plain, model, torch.optim.AdamW(plain.parameters(), lr=1e-2), optimizer)


def test_megatron_units_by_import_path_and_microbatches(world):
    plain = small.Stack()
    model = fsdp.megatron.fully_shard_model(copy.deepcopy(plain), fsdp_unit_modules=["small_models.Block"],
                                            sync_model_each_microbatch=False)
    assert "blocks.1" in fsdp.shard.handle(model).unit_names
    for step, batch in enumerate(parity.batches_of(world, rows, 3)):
        model.set_model_auto_sync(step == 2)
        parity.plain_step(plain, loss_of, batch)
        loss_of(model, batch[world.rank]).backward()
    model.finish_grad_sync()
    parity.compare_gradients(plain, model)


def test_megatron_finds_nan(world):
    model = small.Stack()
    model, optimizer = fsdp.megatron.fully_shard(model, torch.optim.SGD(model.parameters(), lr=0.1), check_for_nan_in_grad=True)
    batch = torch.ones(2, small.WIDTH)
    batch[0, 0] = float("nan") if world.rank == world.size - 1 else 1.0
    loss_of(model, batch).backward()
    with pytest.raises(fsdp.Error, match="holds a NaN or Inf"):
        optimizer.step()


REFUSED_BY_MEGATRON = [
    (dict(zero_dp_strategy=4), "zero_dp_strategy is 4"), (dict(zero_dp_strategy="zero3"), "zero_dp_strategy is 'zero3'"),
    (dict(outer_dp_sharding_strategy=2), "outer_dp_sharding_strategy is 2"), (dict(disable_bucketing=True), "disable_bucketing"),
    (dict(keep_fp8_transpose_cache=True), "keep_fp8_transpose_cache"), (dict(use_decoupled_grad=True), "use_decoupled_grad"),
    (dict(enable_fine_grained_param_gather=True), "enable_fine_grained"), (dict(overlap_grad_reduce=False), "overlap_grad_reduce is False"),
    (dict(preproc_state_dict_for_dcp_ckpt=False), "preproc_state_dict_for_dcp_ckpt is False"),
    (dict(init_model_with_meta_device=True), "no parameter is on the meta device"), (dict(dp_outer_dim="outer"), "belong together"),
    (dict(dp_shard_dim="fsdp"), "without a device_mesh"), (dict(expt_device_mesh=object()), "expt_device_mesh"),
    (dict(fsdp_unit_modules=["nowhere.Block"]), "cannot be imported"), (dict(cuda_graph_mode=True), "cuda_graph_mode"),
]


@pytest.mark.parametrize("options,sentence", REFUSED_BY_MEGATRON, ids=[f"{k}" for w in REFUSED_BY_MEGATRON for k in w[0]])
def test_megatron_refuses_what_has_no_meaning(world, options, sentence):
    if "cuda_graph_mode" in options and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(fsdp.UsageError, match=sentence):
        fsdp.megatron.fully_shard_model(small.Stack(), **options)
