"""Every wrong use is answered with one sentence that names it and the fix."""

import pytest
import torch

import fsdp_cpp as fsdp
import small_models as small

WRONG = [
    (dict(strategy="zero4"), "zero4"),
    (dict(strategy=3), "strategy is 3 (int); it must be a string"),
    (dict(main_params="float32"), "main_params is 'float32' (str); it must be a torch.dtype such as torch.float32 or None"),
    (dict(main_storage="splitt"), "main_storage is 'splitt'"),
    (dict(main_grads=32), "main_grads is 32 (int); it must be a torch.dtype"),
    (dict(grad_comm=torch.int32), "grad_comm"),
    (dict(pool="maxpool"), "pool is 'maxpool'"),
    (dict(prefetch=1.5), "prefetch is 1.5 (float); it must be a whole number"),
    (dict(prefetch=-1), "prefetch"),
    (dict(pool_budget_bytes="1GB"), "pool_budget_bytes is '1GB' (str); it must be a whole number"),
    (dict(on_move="stay"), "on_move is 'stay'"),
    (dict(other_units="never"), "other_units is 'never'"),
    (dict(user_buffers=True), "user_buffers is True (bool); it must be one of 'off', 'registered', 'symmetric'"),
    (dict(gradient="avg"), "gradient is 'avg'"),
    (dict(gradient_lifetime="stepp"), "gradient_lifetime is 'stepp'"),
    (dict(offload=2), "offload"),
    (dict(offload="all"), "offload is 'all' (str); it must be a number"),
    (dict(offload_pin=1), "offload_pin is 1 (int); it must be True or False"),
    (dict(offload_overlap=None), "offload_overlap is None (NoneType); it must be True or False"),
    (dict(offload_chunk_numel=0), "chunk_numel"),
    (dict(report_nan=True), "report_nan is True (bool)"),
    (dict(collectives="sometimes"), "collectives is 'sometimes'"),
    (dict(granularity="half"), "half"),
    (dict(initial_values="mine"), "initial_values is 'mine'"),
    (dict(device="gpu"), "device is 'gpu' (str)"),
    (dict(units="layers.*"), "units has 'layers.*', which matches no module; there are 'first'"),
    (dict(units=torch.nn.Conv2d), "units has the class Conv2d, of which the model has no module"),
    (dict(units=[3]), "units has 3 (int); it takes classes"),
    (dict(mesh=4), "mesh is 4 (int)"),
]


@pytest.mark.parametrize("options,sentence", WRONG, ids=[" ".join(map(str, w[0].items())) for w in WRONG])
def test_wrong_options_are_named(world, options, sentence):
    with pytest.raises(fsdp.UsageError) as caught:
        fsdp.fully_shard(small.Stack(), **options)
    assert sentence in str(caught.value), str(caught.value)
    assert isinstance(caught.value, ValueError)


WRONG_ADAMW = [
    (dict(lr=-1.0), "lr"), (dict(lr="fast"), "lr"), (dict(betas=(0.9, 1.5)), "beta2"), (dict(eps=-1.0), "eps"),
    (dict(weight_decay=-1.0), "weight_decay"), (dict(max_norm=-1.0), "max_norm"), (dict(first_moment=torch.int8), "moment"),
    (dict(on_nonfinite="stop"), "on_nonfinite is 'stop'"), (dict(loss_scale="dynamo"), "loss_scale is 'dynamo'"),
    (dict(updates="later"), "updates is 'later'"), (dict(rounding="up"), "rounding is 'up'"), (dict(seed=1.5), "seed is 1.5"),
]


@pytest.mark.parametrize("options,sentence", WRONG_ADAMW, ids=[" ".join(map(str, w[0].items())) for w in WRONG_ADAMW])
def test_wrong_optimizer_options_are_named(world, options, sentence):
    model = fsdp.fully_shard(small.Stack())
    with pytest.raises((fsdp.UsageError, ValueError)) as caught:
        fsdp.AdamW(model, **options)
    assert sentence in str(caught.value), str(caught.value)


def test_misuses_are_named(world):
    model = small.Stack()
    with pytest.raises(fsdp.UsageError, match="this Stack is not sharded; call fully_shard"):
        fsdp.AdamW(model)
    with pytest.raises(fsdp.UsageError, match="takes a torch.nn.Module"):
        fsdp.fully_shard(list(model.parameters()))
    with pytest.raises(TypeError, match="stratgy"):
        fsdp.fully_shard(model, stratgy="optim")
    fsdp.fully_shard(model)
    with pytest.raises(fsdp.UsageError, match="sharded already"):
        fsdp.fully_shard(model)
    optimizer = fsdp.AdamW(model)
    with pytest.raises(fsdp.UsageError, match=r"step\(\) finds no gradients in this cycle"):
        optimizer.step()
    with pytest.raises(fsdp.UsageError, match="has moments, and those of a sharded model are cut"):
        optimizer.load_state_dict({"state": {0: {"exp_avg": torch.ones(1)}}, "param_groups": []})


def test_optimizers_and_clipping_of_torch_do_not_skip_sharded_gradients_silently(world):
    model = fsdp.fully_shard(small.Stack())
    model(torch.ones(2, small.WIDTH)).sum().backward()
    gradient = r"^\.grad of parameter '.*' is touched.* of shard_optimizer\(\) .* and read fsdp_cpp.gradients\(model\)$"
    with pytest.raises(RuntimeError, match=gradient):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    weight = r"is touched while its unit .* \(one of the units of fully_shard\(\)\), or under fsdp_cpp.unshard\(model\)$"
    with pytest.raises(RuntimeError, match=f"{gradient}|{weight}"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_gradients_that_nobody_reads_are_a_warning_in_pythons_words(world, capfd):
    model = fsdp.fully_shard(small.Stack())
    for _ in range(2):
        model(torch.ones(2, small.WIDTH)).sum().backward()
        fsdp.shard.handle(model).zero_grad()
    said = capfd.readouterr().err
    assert ("nothing is trained without step() of an optimizer of fsdp_cpp or of shard_optimizer()" in said) == (world.rank == 0), said


def test_a_sharded_model_is_not_converted_silently(world):
    model = fsdp.fully_shard(small.Stack())
    assert model.to("cpu") is model and model.float() is model
    for convert in (lambda: model.half(), lambda: model.blocks[0].to(torch.bfloat16), lambda: model.to("meta")):
        with pytest.raises(fsdp.UsageError, match="convert or move it before fully_shard"):
            convert()


def test_parameters_that_changed_since_are_not_left_out_silently(world):
    model = fsdp.fully_shard(small.Stack())
    model.head = torch.nn.Linear(2, 2)
    with pytest.raises(fsdp.UsageError, match="parameter 'head.weight' is not sharded: it came after fully_shard"):
        fsdp.AdamW(model)
    model = small.Stack()
    fsdp.fully_shard(model, ignored_params=[model.scale])
    with pytest.raises(fsdp.UsageError, match="parameter 'scale' is not sharded"):
        fsdp.AdamW(model)
    fsdp.AdamW([p for name, p in model.named_parameters() if name != "scale"])
    model = fsdp.fully_shard(small.Stack())
    model.first.requires_grad_(False)
    with pytest.raises(fsdp.UsageError, match="requires_grad of parameter 'first.weight' has changed since fully_shard"):
        fsdp.AdamW(model)


def test_groups_cover_the_model(world):
    model = fsdp.fully_shard(small.Stack())
    with pytest.raises(fsdp.UsageError, match="'blocks.0.down.bias' is in no group"):
        fsdp.AdamW([model.scale, *model.first.parameters()])
    with pytest.raises(fsdp.UsageError, match="eps of a parameter group is 0.1, but 1e-08 for the others"):
        fsdp.AdamW([{"params": [model.scale], "eps": 0.1}, {"params": [p for p in model.parameters() if p is not model.scale]}])
