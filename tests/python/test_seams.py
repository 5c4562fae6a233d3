"""Everything that programs do around a sharded model is right, or refused in words: parameters, hooks, containers, wrappers, copies."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.testing._internal.two_tensor import TwoTensor

import fsdp_cpp as fsdp
from fsdp_cpp import fsdp2
import parity
import small_models as small
from conftest import each_value, every_strategy, STRATEGIES
from test_checkpoint import folder  # noqa: F401, a fixture
from test_forms import loss_of, rows


def whole(model):
    return fsdp.state_dict(model, on_all_ranks=True)


def other_values():
    torch.manual_seed(5)
    return small.Stack().state_dict()


def assign(model, values):
    model.load_state_dict(values, assign=True)


def set_data(model, values):
    for name, parameter in model.named_parameters():
        parameter.data = values[name].to(parameter.dtype)


def set_storage(model, values):
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.set_(values[name].to(parameter.dtype))


def from_vector(model, values):
    vector = torch.cat([values[name].flatten() for name, _ in model.named_parameters()])
    nn.utils.vector_to_parameters(vector.to(next(model.parameters()).dtype), model.parameters())


REPLACES = {"assign": assign, "data": set_data, "set_": set_storage, "vector_to_parameters": from_vector}


@each_value(storage=["separate", "split"], strategy=STRATEGIES, how=REPLACES)
def test_parameters_replaced_under_write_have_the_new_values(world, how, strategy, storage):
    model = fsdp.fully_shard(small.Stack().bfloat16(), strategy=strategy, main_storage=storage)
    before = list(model.parameters())
    values = {name: value.bfloat16() for name, value in other_values().items()}
    with fsdp.unshard(model, write=True):
        REPLACES[how](model, values)
    assert all(a is b for a, b in zip(before, model.parameters())), "parameters keep their identity"
    optimizer = fsdp.SGD(model, lr=0.0)
    loss_of(model, torch.ones(2, small.WIDTH, dtype=torch.bfloat16)).backward()
    optimizer.step()
    found = whole(model)
    assert all(torch.equal(found[name], values[name]) for name in values)


@each_value(strategy=STRATEGIES, how=REPLACES)
def test_parameters_replaced_elsewhere_are_named(world, how, strategy):
    model = fsdp.fully_shard(small.Stack(), strategy=strategy)
    try:
        REPLACES[how](model, other_values())
    except RuntimeError as error:  # what is not whole cannot even be touched
        assert "is touched while its unit" in str(error)
        return
    with pytest.raises(fsdp.UsageError, match="parameter '.*' (was given other memory|is no longer the one that was sharded)"):
        loss_of(model, torch.ones(2, small.WIDTH))


@each_value(storage=["separate", "split"], strategy=STRATEGIES)
def test_changes_in_place_elsewhere_are_named(world, strategy, storage, folder):  # noqa: F811
    model = fsdp.fully_shard(small.Stack().bfloat16(), strategy=strategy, main_storage=storage)
    values = {name: value.bfloat16() for name, value in other_values().items()}
    try:
        model.load_state_dict(values)
    except RuntimeError as error:
        assert "is touched while its unit" in str(error)
        return
    for reads in (lambda: loss_of(model, torch.ones(2, small.WIDTH, dtype=torch.bfloat16)), lambda: whole(model),
                  lambda: fsdp.save(folder, model)):
        with pytest.raises(fsdp.UsageError, match="was changed in place outside of .*write=True"):
            reads()
    with fsdp.unshard(model, write=True):
        pass  # takes them over
    found = whole(model)
    assert all(torch.equal(found[name], values[name]) for name in values)


def test_other_shapes_are_refused(world):
    model = fsdp.fully_shard(small.Stack())
    with pytest.raises(fsdp.UsageError, match="'scale' was given memory of another shape"):
        with fsdp.unshard(model, write=True):
            model.scale.data = torch.ones(3)


INSIDE = {"forward": lambda model: model(torch.ones(2, small.WIDTH)), "state_dict": whole,
          "training": lambda model: loss_of(model, torch.ones(2, small.WIDTH)).backward(), "unshard": lambda model: unshard_inside(model)}


def unshard_inside(model):
    with fsdp.unshard(model):
        assert model.first.weight.norm() > 0


@each_value(strategy=STRATEGIES, what=INSIDE)
def test_what_runs_inside_unshard_sees_the_changes_and_keeps_them(world, what, strategy):
    model = fsdp.fully_shard(small.Stack(), strategy=strategy)
    before = whole(model)
    with fsdp.unshard(model, write=True), torch.no_grad():
        model.first.weight.mul_(2)
        with torch.enable_grad():
            INSIDE[what](model)
        model.first.bias.add_(1)  # still whole
    after = whole(model)
    assert torch.equal(after["first.weight"], 2 * before["first.weight"]) and torch.equal(after["first.bias"], before["first.bias"] + 1)


def test_updates_wait_until_parameters_are_no_longer_whole(world):
    model = fsdp.fully_shard(small.Stack())
    optimizers = [fsdp.SGD(model, lr=0.1)]
    loss_of(model, torch.ones(2, small.WIDTH)).backward()
    with fsdp.unshard(model), pytest.raises(fsdp.UsageError, match=r"step\(\) is called while all parameters are whole; leave fsdp_cpp.unshard"):
        optimizers[0].step()
    optimizers[0].step()


def test_a_reset_inside_unshard_is_no_crash(world):
    model = fsdp.fully_shard(small.Stack(), strategy="optim_grads_params")
    with pytest.raises(fsdp.Error, match="was sharded again by reset"):
        with fsdp.unshard(model, write=True):
            fsdp.reset(model)
    loss_of(model, torch.ones(2, small.WIDTH)).backward()


def reads_weight(module, *_):
    assert module.weight.norm() > 0


HOOKS = {"pre": lambda m: m.register_forward_pre_hook(reads_weight), "post": lambda m: m.register_forward_hook(reads_weight),
         "weight_norm": nn.utils.parametrizations.weight_norm}


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_of_a_unit_see_whole_weights(world, hook):
    plain = small.Stack()
    HOOKS[hook](plain.first)
    parity.check(world, plain, loss_of, rows, units=nn.Linear)


def test_weights_that_a_pre_hook_makes_are_made_of_whole_ones(world):
    plain = small.Stack()
    nn.utils.spectral_norm(plain.first)
    sharded = fsdp.fully_shard(copy.deepcopy(plain), units=nn.Linear)
    batch = rows(torch.Generator().manual_seed(world.rank))
    for _ in range(2):  # each forward improves its estimate, so other data would not do
        assert torch.equal(loss_of(sharded, batch), loss_of(plain, batch))
    loss_of(sharded, batch).backward()


def test_hooks_that_would_see_unreduced_gradients_are_refused(world):
    model = fsdp.fully_shard(small.Stack())
    model.blocks[1].up.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(fsdp.UsageError, match="parameter 'blocks.1.up.weight' has a post-accumulate-grad hook"):
        loss_of(model, torch.ones(2, small.WIDTH))


class Filling(small.Block):
    def forward(self, x, aux, stats, nested):
        x = super().forward(x)
        aux.append(self.up(x).square().mean())  # its gradient reaches the weights by this way alone
        stats["calls"] = stats.get("calls", 0) + 1
        nested["lists"][0].insert(0, x.mean())
        return x


class Filled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(small.WIDTH, small.WIDTH)
        self.blocks = nn.ModuleList(Filling() for _ in range(3))

    def forward(self, x):
        aux, stats, nested = [], {}, {"lists": ([],)}
        inner = nested["lists"][0]
        x = self.first(x)
        for block in self.blocks:
            x = block(x, aux, stats, nested)
        assert len(aux) == 3 and stats == {"calls": 3} and nested["lists"][0] is inner and len(inner) == 3
        return x + sum(aux) + sum(inner)


@every_strategy
def test_containers_that_a_unit_fills_keep_what_it_put_there(world, strategy):
    parity.check(world, Filled(), loss_of, rows, strategy=strategy)


class Extra(small.Block):
    def get_extra_state(self):
        return {"version": 3}

    def set_extra_state(self, state):
        pass


def test_extra_state_is_in_the_state_dict(world):
    plain = nn.Sequential(Extra(), Extra())
    sharded = fsdp.fully_shard(copy.deepcopy(plain))
    found, expected = whole(sharded), plain.state_dict()
    assert list(found) == list(expected) and found["0._extra_state"] == {"version": 3}


@pytest.mark.parametrize("checkpointed", [False, True])
def test_wrappers_that_come_after_sharding_change_nothing(world, checkpointed):
    plain = small.Stack()
    model = fsdp.fully_shard(copy.deepcopy(plain))
    if checkpointed:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, small.Block))
        used = model
    else:
        used = torch.compile(model, backend="eager")
    assert fsdp.is_sharded(used)
    theirs, ours = torch.optim.SGD(plain.parameters(), lr=0.1), fsdp.SGD(used, lr=0.1)
    for batches in parity.batches_of(world, rows, 2):
        parity.plain_step(plain, loss_of, batches)
        loss_of(used, batches[world.rank]).backward()
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
    found, expected = whole(used), plain.state_dict()
    assert {name.replace("_checkpoint_wrapped_module.", "") for name in found} == set(expected)
    for name in found:
        torch.testing.assert_close(found[name], expected[name.replace("_checkpoint_wrapped_module.", "")], **parity.TOLERANCE)


@pytest.mark.parametrize("door", ["fsdp", "fsdp2"])
def test_a_deleted_model_is_gone_without_the_collector(world, door):
    gc.collect()
    gc.disable()
    try:
        model = small.Stack()
        if door == "fsdp2":
            for module in (*model.blocks, model):
                fsdp2.fully_shard(module)
        else:
            fsdp.fully_shard(model)
        loss_of(model, torch.ones(2, small.WIDTH)).backward()
        optimizer = fsdp.AdamW(model)
        optimizer.step()
        there = weakref.ref(model)
        del model, optimizer
        module = None  # noqa: F841
        assert there() is None
    finally:
        gc.enable()


def test_containers_that_nobody_calls_are_no_units(world):
    with pytest.raises(fsdp.UsageError, match="units has 'blocks', which is a ModuleList: nothing calls it"):
        fsdp.fully_shard(small.Stack(), units="blocks")
    with pytest.raises(fsdp.UsageError, match="got a ModuleList, which nothing calls"):
        fsdp2.fully_shard(small.Stack().blocks)


def test_a_refused_model_is_as_it_was(world):
    torch.manual_seed(world.rank)
    model = small.Stack()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    if world.size > 1:
        with pytest.raises(fsdp.Error, match="has different values on different ranks.*set initial_values to 'of_rank_zero'"):
            fsdp.fully_shard(model)
        assert all(torch.equal(values[name], value) for name, value in model.state_dict().items())
    fsdp.fully_shard(model, initial_values="of_rank_zero")
    loss_of(model, torch.ones(2, small.WIDTH)).backward()
    torch.manual_seed(0)
    first = small.Stack().state_dict()
    assert all(torch.equal(first[name], value) for name, value in whole(model).items())


def test_views_that_outlive_unshard_are_no_crash(world):
    model = fsdp.fully_shard(small.Stack(), strategy="optim_grads_params")
    with fsdp.unshard(model):
        weights = model.state_dict()
    try:
        total = sum(value.sum().item() for value in weights.values())
    except RuntimeError as error:  # torch 2.13 and later
        assert "is touched while its unit" in str(error)
    else:
        assert (total != total) == (world.size > 1), "NaN, where the parameters are sharded"
    loss_of(model, torch.ones(2, small.WIDTH)).backward()
    assert all(torch.isfinite(value).all() for value in whole(model).values())


def test_errors_of_a_backward_are_ours(world):
    model = fsdp.fully_shard(small.Stack(), fsdp.mesh(), strategy="optim")
    loss = loss_of(model, torch.ones(2, small.WIDTH))
    with pytest.raises(fsdp.Error, match="cannot be differentiated again"):
        loss.backward(create_graph=True)
    del loss
    hook = model.blocks[1].up.weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, torch.ones(2, small.WIDTH)).backward()
    with pytest.raises(fsdp.Error, match=r"after a backward that did not end.*call fsdp_cpp.reset\(model\) first"):
        model(torch.ones(2, small.WIDTH))
    hook.remove()
    fsdp.reset(model)
    loss_of(model, torch.ones(2, small.WIDTH)).backward()


def test_parameters_without_memory_of_their_own_are_refused(world):
    model = small.Stack()
    model.first.weight = nn.Parameter(TwoTensor(model.first.weight.detach(), model.first.weight.detach()))  # as DTensors are
    with pytest.raises(fsdp.UsageError, match="parameter 'first.weight' is a TwoTensor, which has no memory of its own"):
        fsdp.fully_shard(model)


def marked(model):
    for module in (*model.blocks, model):
        fsdp2.fully_shard(module)
    return model


def test_a_copy_of_a_marked_model_is_a_model_of_its_own(world):
    plain = small.Stack()
    model = marked(copy.deepcopy(plain))
    copied = copy.deepcopy(model)
    batches = parity.batches_of(world, rows, 1)[0]
    assert isinstance(copied, torch.distributed.fsdp.FSDPModule) and not fsdp.is_sharded(model)
    optimizer = fsdp.SGD(copied.parameters(), lr=0.1)
    parity.plain_step(plain, loss_of, batches)
    loss_of(copied, batches[world.rank]).backward()
    assert fsdp.is_sharded(copied) and not fsdp.is_sharded(model)
    parity.compare_gradients(plain, copied)
    optimizer.step()
    with pytest.raises(fsdp.UsageError, match="is sharded, so a copy would have a part of it"):
        copy.deepcopy(copied)
    loss_of(model, batches[world.rank])


def test_fsdp2s_unshard_holds_until_the_next_use(world):
    model = marked(small.Stack())
    for _ in range(2):
        model.blocks[1].unshard()
        assert model.blocks[1].up.weight.norm() > 0
        loss_of(model, torch.ones(2, small.WIDTH)).backward()
        model.zero_grad()
    model.blocks[1].unshard(async_op=True).wait()
    model.blocks[1].reshard()
    if world.size > 1:
        with pytest.raises(RuntimeError, match="is touched while its unit"):
            model.blocks[1].up.weight.norm()


def test_fsdp2s_meta_models_become_real_in_parts(world):
    with torch.device("meta"):
        model = small.Stack(width=64)
    numel = sum(parameter.numel() for parameter in model.parameters())
    marked(model).to_empty(device="cpu")
    assert fsdp.is_sharded(model)
    assert fsdp.memory(model).weights <= 4 * (numel // world.size + 1024), "each rank has its part alone"
    torch.manual_seed(3)
    values = small.Stack(width=64).state_dict()
    with fsdp.unshard(model, write=True):
        model.load_state_dict(values)
    found = whole(model)
    assert all(torch.equal(found[name], values[name]) for name in values)


def test_patterns_of_missing_names_are_one_pattern_if_they_are_one_string(world, folder):  # noqa: F811
    fsdp.save(folder, fsdp.fully_shard(nn.Sequential(small.Block())), step=1)
    model = fsdp.fully_shard(nn.Sequential(small.Block(), small.Block()))
    with pytest.raises(fsdp.Error, match="does not fit this model"):
        fsdp.load(folder, model, allow_missing="*.no_such_name")
    loaded = fsdp.load(folder, model, allow_missing="1.*")
    assert len(loaded.missing) == 6
