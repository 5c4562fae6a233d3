"""Programs written for Megatron-FSDP learn the same here; what has no meaning is refused."""

import copy
import dataclasses
import os
import pathlib
import subprocess
import sys

import pytest
import torch

import fsdp_cpp as fsdp
import fsdp_cpp.megatron
import parity
import small_models as small
from conftest import each_value, every_strategy, STRATEGIES
from fsdp_cpp.megatron import MegatronFSDP, MixedPrecisionPolicy, fully_shard, fully_shard_model, fully_shard_optimizer
from test_forms import loss_of, rows
from test_optim import train


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


@each_value(strategy=[0, 1, 2, "optim_grads", 3], once=2)
def test_trains_with_its_own_arguments(world, strategy):
    plain = small.Stack()
    copied = copy.deepcopy(plain)
    model, optimizer = fully_shard(copied, adamw(copied), fsdp_unit_modules=[small.Block], zero_dp_strategy=strategy,
                                   check_for_nan_in_grad=True, fsdp_double_buffer=True)
    assert model is copied
    train(world, plain, model, adamw(plain), optimizer)


def test_units_by_import_path_and_microbatches(world):
    plain = small.Stack()
    model = fully_shard_model(copy.deepcopy(plain), fsdp_unit_modules=["small_models.Block"], sync_model_each_microbatch=False)
    assert "blocks.1" in fsdp.shard.handle(model).unit_names
    for step, batch in enumerate(parity.batches_of(world, rows, 3)):
        model.set_model_auto_sync(step == 2)
        parity.plain_step(plain, loss_of, batch)
        loss_of(model, batch[world.rank]).backward()
    model.finish_grad_sync()
    parity.compare_gradients(plain, model)


def test_bf16_models_train_with_the_default_policy(world):
    """bf16 weights, fp32 main weights, bf16 gradients, an optimizer of torch."""
    plain = small.Stack()
    copied = copy.deepcopy(plain).bfloat16()
    model, optimizer = fully_shard(copied, adamw(copied, eps=1e-3), fsdp_unit_modules=[small.Block])
    theirs = adamw(plain, eps=1e-3)
    for batches in parity.batches_of(world, rows, 3):
        parity.plain_step(plain, loss_of, batches)
        loss_of(model, batches[world.rank].bfloat16()).backward()
        for each in (theirs, optimizer):
            each.step()
            each.zero_grad()
    assert all(each.main_weight.dtype == torch.float32 for each in fsdp.shard.handle(model).parameters())
    with fsdp.unshard(model):
        for (name, ours), expected in zip(model.named_parameters(), plain.parameters()):
            assert ours.dtype == torch.bfloat16
            torch.testing.assert_close(ours.float(), expected, rtol=2e-2, atol=1e-2, msg=lambda text, name=name: f"{name}: {text}")


def test_meta_models_are_made_by_either_name_of_reset_parameters(world):
    class Silent(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.empty(4))

    class Private(Silent):
        def _reset_parameters(self):
            self.scale.data.fill_(3)

    def made(*kinds):
        with torch.device("meta"):
            model = torch.nn.Sequential(torch.nn.LayerNorm(4), *(kind() for kind in kinds))
        return fully_shard_model(model, init_model_with_meta_device=True, device="cpu")

    model = made(Private)
    with fsdp.unshard(model):
        assert model[0].weight.tolist() == [1] * 4 and model[0].bias.tolist() == [0] * 4 and model[1].scale.tolist() == [3] * 4
    with pytest.raises(fsdp.Error, match=r"Silent has parameters on the meta device, and neither reset_parameters\(\)"):
        made(Private, Silent)


OPTIONS = [
    (dict(zero_dp_strategy=2), dict(strategy="optim_grads")),
    (dict(zero_dp_strategy="optim", outer_dp_sharding_strategy=1), dict(strategy="optim+hfsdp")),
    (dict(), dict(prefetch=1, gradient="mean", report_nan="off", main_params=torch.float32, main_grads=None, grad_comm=None)),
    (dict(overlap_param_gather=False), dict(prefetch=0)), (dict(calculate_per_token_loss=True), dict(gradient="sum")),
    (dict(report_nan_in_param_grad=True), dict(report_nan="per_parameter")), (dict(device="cpu"), dict(device="cpu")),
    (dict(fsdp_double_buffer=True), dict(pool="double_buffer")),
    (dict(fsdp_double_buffer=True, maxpool_double_buffer=True), dict(pool="max_pool")),
    (dict(maxpool_double_buffer=True), dict(pool="max_pool")),
    (dict(fsdp_db_use_persist_buf_on_alloc_fail=True), dict(other_units="persistent")),
    (dict(nccl_ub=True), dict(user_buffers="symmetric")),
    (dict(nccl_ub=True, disable_symmetric_registration=True), dict(user_buffers="registered")),
    (dict(mixed_precision_policy=MixedPrecisionPolicy(None, torch.float32, torch.bfloat16)),
     dict(main_params=None, main_grads=torch.float32, grad_comm=torch.bfloat16)),
    (dict(main_params_dtype=None, grad_comm_dtype=torch.bfloat16), dict(main_params=None, grad_comm=torch.bfloat16)),
    (dict(preserve_fp32_weights=False), dict(main_params=None)),
    (dict(grad_reduce_in_fp32=True), dict(main_grads=torch.float32, grad_comm=torch.float32)),
]


@pytest.mark.parametrize("theirs,ours", OPTIONS, ids=[" ".join(each[0]) or "defaults" for each in OPTIONS])
def test_arguments_become_our_options(world, monkeypatch, theirs, ours):
    class Seen(Exception):
        pass

    def seen(*_, **options):
        assert {name: options[name] for name in ours} == ours
        raise Seen

    monkeypatch.setattr(fsdp.shard, "fully_shard", seen)
    with pytest.raises(Seen):
        fully_shard_model(small.Stack(), **theirs)


# --- the model -------------------------------------------------------------------------------------------------------------


def test_a_model_is_a_megatron_fsdp_and_what_it_was(world):
    plain = small.Stack()
    model = fully_shard_model(copy.deepcopy(plain), fsdp_unit_modules=[small.Block])
    assert isinstance(model, MegatronFSDP) and isinstance(model, small.Stack) and type(model).__name__ == "Stack"
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert not isinstance(model.blocks[0], MegatronFSDP)


def test_unwrapping_a_model_ends_at_the_model_itself(world):
    plain = small.Stack()
    model = fully_shard_model(copy.deepcopy(plain), fsdp_unit_modules=[small.Block])
    inner = model
    for _ in range(10):
        if not hasattr(inner, "module"):
            break
        inner = inner.module
    assert type(inner) is small.Stack and inner is model.module and not hasattr(inner, "finish_grad_sync")
    assert [name for name, _ in inner.named_modules()] == [name for name, _ in plain.named_modules()]
    assert inner.first is model.first and fsdp.is_sharded(inner)
    inner.eval()
    assert not model.training
    batch = parity.batches_of(world, rows, 1)[0]
    parity.plain_step(plain, loss_of, batch)
    loss_of(inner, batch[world.rank]).backward()
    parity.compare_gradients(plain, model)


def test_models_that_have_a_module_of_their_own_keep_it(world):
    class Wrapper(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.module = small.Stack()

        def forward(self, x):
            return self.module(x)

    plain = Wrapper()
    model = fully_shard_model(copy.deepcopy(plain))
    assert type(model.module) is small.Stack and not hasattr(model.module, "module")
    batch = parity.batches_of(world, rows, 1)[0]
    parity.plain_step(plain, loss_of, batch)
    loss_of(model, batch[world.rank]).backward()
    parity.compare_gradients(plain, model)


# --- microbatches ----------------------------------------------------------------------------------------------------------


def by_sync(model, is_last, backward):
    if is_last:
        with model.sync():
            backward()
        assert not model.model_auto_sync
    else:
        backward()


def by_no_sync(model, is_last, backward):
    if is_last:
        assert model.is_last_microbatch
        backward()
    else:
        with model.no_sync():
            backward()


def by_nested_no_sync(model, is_last, backward):
    if is_last:
        return backward()
    with model.no_sync():
        with model.no_sync():
            pass
        backward()


def by_auto_sync(model, is_last, backward):
    model.set_model_auto_sync(is_last)
    assert model.model_auto_sync == is_last
    backward()


def by_attribute(model, is_last, backward):
    model.is_last_microbatch = is_last
    backward()


def by_nothing(model, is_last, backward):
    """No backward is the last: finish_grad_sync() or step() ends the cycle."""
    backward()


# Whether finish_grad_sync() is called before step().
WAYS = [(by_sync, True), (by_no_sync, False), (by_nested_no_sync, True), (by_auto_sync, False), (by_attribute, True),
        (by_nothing, True), (by_nothing, False)]


@each_value(outer=[2, 1], strategy=STRATEGIES, how=WAYS)
def test_microbatches_add_up_however_the_last_is_named(world, how, strategy, outer):
    way, finishes = how
    if world.size % outer:
        pytest.skip(f"{world.size} ranks have no outer axis of {outer}")
    plain = small.Stack()
    copied = copy.deepcopy(plain)
    model, optimizer = fully_shard(copied, torch.optim.SGD(copied.parameters(), lr=0.1), fsdp.mesh(outer=outer),
                                   fsdp_unit_modules=[small.Block], zero_dp_strategy=strategy, sync_model_each_microbatch=False)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        for index, batch in enumerate(parity.batches_of(world, rows, 3)):
            parity.plain_step(plain, loss_of, batch)
            way(model, index == 2, lambda: loss_of(model, batch[world.rank]).backward())
        if finishes:
            model.finish_grad_sync()
            parity.compare_gradients(plain, model)
        for each in (theirs, optimizer):
            each.step()
            each.zero_grad()
    parity.compare_weights(plain, model)


def test_hfsdp_shards_the_outer_axis_with_every_inner_strategy(world):
    if world.size % 2:
        pytest.skip("needs an even number of ranks")
    for strategy in STRATEGIES[1:]:
        plain = small.Stack()
        copied = copy.deepcopy(plain)
        model, optimizer = fully_shard(copied, adamw(copied), fsdp.mesh(outer=2), zero_dp_strategy=strategy,
                                       outer_dp_sharding_strategy="optim")
        sizes = sum(each.main_weight.numel() for each in fsdp.shard.handle(model).parameters())
        assert sizes < 0.7 * sum(parameter.numel() for parameter in plain.parameters())
        train(world, plain, model, adamw(plain), optimizer)


# --- methods ---------------------------------------------------------------------------------------------------------------


def backward_of(world, model, plain=None):
    batch = parity.batches_of(world, rows, 1)[0]
    if plain is not None:
        parity.plain_step(plain, loss_of, batch)
    loss_of(model, batch[world.rank]).backward()


@every_strategy
def test_loops_that_call_every_method_learn_the_same(world, strategy):
    plain = small.Stack()
    copied = copy.deepcopy(plain)
    model, optimizer = fully_shard(copied, adamw(copied), zero_dp_strategy=strategy, sync_model_each_microbatch=False)
    model.broadcast_params()
    theirs = adamw(plain)
    for _ in range(3):
        model.zero_grad_buffer()
        model.start_param_sync(force_sync=True)
        model.synchronize_param_gather()
        model.is_last_microbatch = True
        backward_of(world, model, plain)
        model.start_grad_sync()
        model.synchronize_gradient_reduce()
        model.attach_grad_to_optimizer_state()
        model.finish_grad_sync(force_all_reduce=False)
        theirs.step()
        theirs.zero_grad()
        optimizer.step(sync_grad_before_optimizer_step=False, install_optimized_model_weights=True)
        model.install_optimized_model_weights()
    parity.compare_weights(plain, model)


@every_strategy
def test_gradients_are_scaled_where_they_are(world, strategy):
    plain = small.Stack()
    model = fully_shard_model(copy.deepcopy(plain), zero_dp_strategy=strategy, calculate_per_token_loss=True,
                              sync_model_each_microbatch=False)
    backward_of(world, model, plain)
    model.scale_gradients(0.5 / world.size)  # of a sum over ranks
    for parameter in plain.parameters():
        parameter.grad.mul_(0.5)
    parity.compare_gradients(plain, model)


def test_weights_follow_main_weights_that_a_program_has_changed(world):
    model = fully_shard_model(small.Stack().bfloat16())
    for each in fsdp.shard.handle(model).parameters():
        each.main_weight.fill_(0.5)
    model.install_optimized_model_weights()
    with fsdp.unshard(model):
        assert all(torch.equal(parameter, torch.full_like(parameter, 0.5)) for parameter in model.parameters())


def test_zero_grad_drops_the_gradients_unless_they_are_to_stay(world):
    model = small.Stack()
    model, optimizer = fully_shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    backward_of(world, model)
    before = {name: gradient.clone() for name, gradient in fsdp.gradients(model).items()}
    optimizer.zero_grad(zero_grad_buffer=False)
    assert all(torch.equal(gradient, before[name]) for name, gradient in fsdp.gradients(model).items())
    plain = small.Stack()
    with fsdp.unshard(model):
        plain.load_state_dict({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    optimizer.zero_grad(set_to_none=False)
    backward_of(world, model, plain)
    parity.compare_gradients(plain, model)


def test_the_wire_changes_for_the_cycles_of_a_context(world):
    plain = small.Stack()
    model = fully_shard_model(copy.deepcopy(plain))
    narrow = dataclasses.replace(model.mp_policy, grad_comm_dtype=torch.bfloat16)
    with model.mixed_precision_context(narrow):
        assert model.mp_policy == narrow
        backward_of(world, model, plain)
        if world.size > 1:  # a single rank has no wire
            with pytest.raises(AssertionError):
                parity.compare_gradients(plain, model)
        parity.compare_gradients(plain, model, dict(rtol=1e-2, atol=1e-3))
        model.zero_grad_buffer()
    assert model.mp_policy == MixedPrecisionPolicy()
    plain.zero_grad()
    backward_of(world, model, plain)
    parity.compare_gradients(plain, model)
    with pytest.raises(fsdp.Error, match="only between cycles"):
        model.reset_mixed_precision_policy(narrow)
    with pytest.raises(fsdp.UsageError, match="main_grads_dtype is torch.bfloat16, and was None"):
        model.reset_mixed_precision_policy(MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16))


def test_an_error_inside_a_context_of_precision_is_the_one_that_is_seen(world):
    model = fully_shard_model(small.Stack())
    with pytest.raises(ZeroDivisionError):
        with model.mixed_precision_context(MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)):
            backward_of(world, model)
            1 / 0
    fsdp.reset(model)


# --- what is refused -------------------------------------------------------------------------------------------------------


def test_finds_nan(world):
    model = small.Stack()
    model, optimizer = fully_shard(model, torch.optim.SGD(model.parameters(), lr=0.1), check_for_nan_in_grad=True)
    batch = torch.ones(2, small.WIDTH)
    batch[0, 0] = float("nan") if world.rank == world.size - 1 else 1.0
    loss_of(model, batch).backward()
    with pytest.raises(fsdp.Error, match="holds a NaN or Inf"):
        optimizer.step()


REFUSED = [
    (dict(zero_dp_strategy=4), "zero_dp_strategy is 4"), (dict(zero_dp_strategy="zero3"), "zero_dp_strategy is 'zero3'"),
    (dict(outer_dp_sharding_strategy=2), "outer_dp_sharding_strategy is 2"),
    (dict(zero_dp_strategy=0, outer_dp_sharding_strategy=1), "outer_dp_sharding_strategy is 1"),
    (dict(disable_bucketing=True), "disable_bucketing is True"),
    (dict(keep_fp8_transpose_cache=True), "keep_fp8_transpose_cache is True"),
    (dict(use_decoupled_grad=True), "use_decoupled_grad is True"),
    (dict(enable_fine_grained_param_gather=True), "enable_fine_grained_param_gather is True"),
    (dict(overlap_grad_reduce=False), "overlap_grad_reduce is False"),
    (dict(preproc_state_dict_for_dcp_ckpt=False), "preproc_state_dict_for_dcp_ckpt is False"),
    (dict(disable_symmetric_registration=True), "disable_symmetric_registration is True"),
    (dict(init_model_with_meta_device=True), "no parameter is on the meta device"), (dict(dp_outer_dim="outer"), "belong together"),
    (dict(dp_shard_dim="fsdp"), "dp_shard_dim is 'fsdp', without a device_mesh"), (dict(tp_dim="tp"), "tp_dim is 'tp', without"),
    (dict(expt_device_mesh=object()), "expt_device_mesh"), (dict(hybrid_fsdp_expt_group=object()), "hybrid_fsdp_expt_group"),
    (dict(expt_fsdp_group_ag=object()), "expt_fsdp_group_ag"),
    (dict(fsdp_unit_modules=["nowhere.Block"]), "cannot be imported"), (dict(cuda_graph_mode=True), "cuda_graph_mode"),
]


@pytest.mark.parametrize("options,sentence", REFUSED, ids=[list(each[0])[-1] for each in REFUSED])
def test_arguments_without_a_meaning_are_refused(world, options, sentence):
    if "cuda_graph_mode" in options and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(fsdp.UsageError, match=sentence):
        fully_shard_model(small.Stack(), **options)


def test_calls_without_a_meaning_are_refused(world):
    model = small.Stack()
    model, optimizer = fully_shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    other = fsdp.fully_shard(small.Stack())
    for call, sentence in [
        (lambda: model.finish_grad_sync(force_all_reduce=True), "force_all_reduce is True"),
        (lambda: model.all_gather_and_wait_parameters_ready([model.scale]), r"all_gather_and_wait_parameters_ready\(\).*unshard"),
        (lambda: optimizer.step(install_optimized_model_weights=False), "install_optimized_model_weights is False"),
        (lambda: model.get_distributed_index().get_dp_group(), "without a DeviceMesh"),
        (lambda: model.get_distributed_index().get_dp_group(is_expert_parallel=True), "mesh.ep"),
        (lambda: MegatronFSDP(model, None), r"fully_shard_model\(\) makes"),
        (lambda: fsdp.megatron.DistributedDataParallelConfig(nccl_ub=True), "give its fields to fully_shard_model"),
        (lambda: fully_shard_optimizer(adamw(other)), r"did not come from fsdp_cpp.megatron"),
    ]:
        with pytest.raises(fsdp.UsageError, match=sentence):
            call()


# --- meshes of torch -------------------------------------------------------------------------------------------------------


def names_the_parts_of_a_mesh():
    """Four ranks, of which dp_shard x cp are flattened to the inner axis, as Megatron-FSDP's readers do it."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 1, 2, 1), mesh_dim_names=("dp_outer", "dp_shard", "cp", "tp"))
    mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    group = mesh["dp_outer", "dp_shard", "cp"]._flatten("hsdp").get_group()
    torch.manual_seed(0)
    model = fully_shard_model(small.Stack(), mesh, "dp_shard_cp", "dp_outer", "tp", group, outer_dp_sharding_strategy=1)
    found = fsdp.shard.handle(model).mesh
    assert (found.outer_size, found.inner_size, found.outer_rank, found.inner_rank) == (2, 2, rank // 2, rank % 2)
    index = model.get_distributed_index()
    assert index.get_dp_group() is group and index.get_root_mesh() is mesh and index.use_hybrid_fsdp
    assert torch.distributed.get_process_group_ranks(index.get_fsdp_group()) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert torch.distributed.get_process_group_ranks(index.get_outer_fsdp_group()) == [rank % 2, rank % 2 + 2]
    assert index.get_logical_hybrid_fsdp_rank() == [0, 2, 1, 3][rank]
    loss_of(model, torch.ones(2, small.WIDTH)).backward()
    for options, sentence in [(dict(dp_shard_dim="dp"), "dp_shard_dim is 'dp', which this mesh does not have"),
                              (dict(dp_shard_dim="dp_shard", tp_dim="cp"), "tp_dim is 'cp' with 2 ranks"),
                              (dict(dp_outer_dim="dp_outer", hybrid_fsdp_group=group), "without dp_shard_dim"),
                              (dict(dp_shard_dim="cp", dp_outer_dim="dp_shard", hybrid_fsdp_group=group), "has 4 ranks, but")]:
        with pytest.raises(fsdp.UsageError, match=sentence):
            fully_shard_model(small.Stack(), mesh, **options)
    print(f"rank {rank} done", flush=True)


@pytest.mark.skipif(int(os.environ.get("WORLD_SIZE", "1")) > 1, reason="starts ranks itself")
def test_ranks_are_the_named_parts_of_a_mesh():
    starter = pathlib.Path(__file__).parents[1] / "processes/start_ranks.py"
    done = subprocess.run([sys.executable, starter, "4", sys.executable, __file__], text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=120, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0 and all(f"rank {rank} done" in done.stdout for rank in range(4)), done.stdout


if __name__ == "__main__":
    names_the_parts_of_a_mesh()
