"""EMA: the average of plain torch on every rank's shard, weights that come back bit for bit, and states of any number of ranks."""

import copy

import pytest
import torch

import fsdp_cpp as fsdp
import small_models as small
from conftest import every_strategy, STRATEGIES
from fsdp_cpp import shard
from fsdp_cpp.ema import EMA
from test_checkpoint import folder  # noqa: F401, a fixture
from test_forms import loss_of, rows

DECAY = 0.75


def trained(steps=3, model=None, **options):
    """A model, its EMA, and the average that plain torch makes of the model's whole weights."""
    model = fsdp.fully_shard(model or small.Stack(), **options)
    optimizer = fsdp.AdamW(model, lr=1e-2)
    ema = EMA(model, decay=DECAY)
    expected = whole_main_weights(model)
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        loss_of(model, rows(generator).to(model.scale.dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
        for name, weight in whole_main_weights(model).items():
            expected[name].lerp_(weight, 1 - DECAY)
    return model, ema, expected


def whole_main_weights(model):
    found = {}
    fsdp.export_weights(model, lambda name, value: found.update({name: value.clone()}), values="main", dtype=torch.float32,
                        on_all_ranks=True)
    return found


def check_equal(found, expected):
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("options", [*({"strategy": strategy} for strategy in STRATEGIES),
                                     {"params": torch.bfloat16, "main_storage": "separate"}, {"params": torch.bfloat16},
                                     {"params": torch.bfloat16, "offload": 0.5}],
                         ids=[*STRATEGIES, "bf16", "split", "offloaded"])
def test_the_model_has_the_average_inside_and_its_own_weights_after(world, options):
    model, ema, expected = trained(**options)
    before, computing = whole_main_weights(model), fsdp.state_dict(model, on_all_ranks=True)
    with ema.applied() as same:
        assert same is model
        check_equal(whole_main_weights(model), expected)
        plain = small.Stack()
        plain.load_state_dict(expected)
        x = rows(torch.Generator().manual_seed(4))
        with torch.no_grad():
            found, wanted = model(x.to(model.scale.dtype)).float(), plain(x)
        tolerance = dict(rtol=0, atol=0) if "params" not in options else dict(rtol=0.05, atol=0.05)  # bf16 has 8 bits
        torch.testing.assert_close(found, wanted, **tolerance)
    check_equal(whole_main_weights(model), before)
    check_equal(fsdp.state_dict(model, on_all_ranks=True), computing)
    assert any(not torch.equal(before[name], expected[name]) for name in before), "they differ, or the test proves nothing"


def test_each_rank_keeps_its_own_shard(world):
    model, ema, _ = trained(steps=1)
    parts = {each.name: each.main_weight.numel() for each in shard.handle(model).parameters()}
    assert {name: part.numel() for name, part in ema._average.items()} == parts
    assert all(part.dtype == torch.float32 for part in ema._average.values())
    whole = sum(parameter.numel() for parameter in small.Stack().parameters())
    assert sum(parts.values()) <= whole // world.size + 64 * world.size, "and not the others'"


def test_training_goes_on_as_if_nothing_had_been_applied(world):
    weights = []
    for applies in (False, True):
        torch.manual_seed(7)
        model = fsdp.fully_shard(small.Stack())
        optimizer, ema = fsdp.AdamW(model, lr=1e-2), EMA(model, decay=DECAY)
        generator = torch.Generator().manual_seed(3)
        for _ in range(3):
            loss_of(model, rows(generator)).backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update()
            if applies:
                with ema.applied(), torch.no_grad():
                    model(rows(torch.Generator().manual_seed(4)))
        weights.append(whole_main_weights(model))
    check_equal(weights[1], weights[0])


def test_frozen_parameters_are_left_alone(world):
    model = small.Stack()
    model.first.requires_grad_(False)
    before = copy.deepcopy(model.first.state_dict())
    model, ema, _ = trained(model=model)
    assert "first.weight" not in ema._average and "scale" in ema._average
    with ema.applied():
        check_equal({name: value for name, value in whole_main_weights(model).items() if name.startswith("first.")},
                    {f"first.{name}": value for name, value in before.items()})


@every_strategy
def test_a_state_dict_is_whole_and_every_rank_takes_its_part(world, folder, strategy):  # noqa: F811
    _, ema, expected = trained(strategy=strategy)
    state = ema.state_dict()
    if world.rank == 0:
        check_equal(state, expected)
        torch.save(state, f"{folder}/ema.pt")
    else:
        assert state == {}
    world.barrier()
    model = fsdp.fully_shard(small.Stack())  # another strategy, and other weights
    other = EMA(model)
    other.load_state_dict(torch.load(f"{folder}/ema.pt"))
    with other.applied():
        check_equal(whole_main_weights(model), expected)


def test_a_checkpoint_holds_the_average(world, folder):  # noqa: F811
    model, ema, expected = trained(model=small.Stack(), strategy="optim")
    before = whole_main_weights(model)
    ema.save(f"{folder}/ema", step=3)
    check_equal(whole_main_weights(model), before)
    model, other, _ = trained(steps=1)
    before = whole_main_weights(model)
    other.load(f"{folder}/ema")
    check_equal(whole_main_weights(model), before)
    with other.applied():
        check_equal(whole_main_weights(model), expected)


def test_a_loaded_average_leaves_buffers_alone(world, folder):  # noqa: F811
    model = fsdp.fully_shard(small.WithBuffers())
    ema = EMA(model)
    ema.save(f"{folder}/ema")
    model(rows(torch.Generator().manual_seed(3)))  # in training, so that running means move
    before = [buffer.clone() for buffer in model.buffers()]
    assert any(buffer.abs().sum() > 0 for buffer in before)
    ema.load(f"{folder}/ema")
    assert all(torch.equal(buffer, value) for buffer, value in zip(model.buffers(), before))


def test_weights_come_back_after_an_exception(world):
    model, ema, _ = trained()
    before = whole_main_weights(model)
    with pytest.raises(KeyError), ema.applied():
        raise KeyError
    check_equal(whole_main_weights(model), before)


def test_errors_say_what_to_do(world):
    model, ema, _ = trained(steps=1)
    with pytest.raises(fsdp.UsageError, match="decay is 1.5"):
        EMA(model, decay=1.5)
    with pytest.raises(fsdp.UsageError, match="state_dict has none"):
        ema.load_state_dict({})
