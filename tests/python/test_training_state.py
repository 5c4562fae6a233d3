"""A model and its Adam state are found in DCP checkpoints under everybody's names, and nothing is lost in silence."""

import types

import pytest
import torch

import dcp_checkpoints as saved
from fsdp_cpp import Error, UsageError
from fsdp_cpp.convert import dcp
from fsdp_cpp.convert.training_state import find_training_state as state_of


pytestmark = saved.ONE_RANK

FORMS = list(saved.states_of(*saved.trained()))


def values(checkpoint, sources):
    """{name: whole tensor}, from the parts of each source."""
    found = {}
    for name, source in sources.items():
        pieces = [torch.atleast_1d(dcp.read_tensor(checkpoint, part.key)) for part in source.parts]
        found[name] = torch.cat(pieces).view(source.shape)
        rows = [part.first_row for part in source.parts]
        assert rows == sorted(rows) and rows[0] == 0
    return found


def expect_equal(found, expected):
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def found_in(directory, state, **options):
    saved.save(state, directory)
    checkpoint = dcp.read_metadata(str(directory))
    return checkpoint, state_of(checkpoint, **options)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_training_state_is_found(tmp_path, form):
    model, optimizer = saved.trained(steps=3)
    weights, moments = saved.expected_of(model, optimizer)
    checkpoint, state = found_in(tmp_path / "c", saved.states_of(model, optimizer)[form])
    expect_equal(values(checkpoint, state.model), weights)
    expect_equal(values(checkpoint, state.moments), dict(sorted(moments.items(), key=lambda item: item[0].endswith("_sq"))))
    assert state.step == 3
    if form != "wrapped":
        assert state.settings == {"lr": [0.01], "betas": [(0.9, 0.999)], "eps": [1e-08], "weight_decay": [0.01]}


def test_weights_alone_have_no_step(tmp_path):
    weights = saved.trained()[0].state_dict()
    checkpoint, state = found_in(tmp_path / "c", weights)
    expect_equal(values(checkpoint, state.model), weights)
    assert (state.moments, state.step, state.dropped, state.objects) == ({}, 0, {}, [])


def test_names_that_begin_with_model_are_not_a_section(tmp_path):
    weights = {"model.embed.weight": torch.ones(3), "lm_head.weight": torch.zeros(3)}
    assert list(found_in(tmp_path / "bare", weights)[1].model) == list(weights)
    assert list(found_in(tmp_path / "nested", {"model": weights})[1].model) == list(weights)


# --- Megatron --------------------------------------------------------------------------------------------------------------


def test_uneven_shards_and_split_parameters_of_megatron_are_joined():
    directory, expected = saved.saved_on_ranks(saved.megatron_run)
    checkpoint = dcp.read_metadata(directory)
    rows = [chunk.sizes[0] for chunk in checkpoint.tensors["model.module.embedding.word_embeddings.weight"].chunks]
    assert len(rows) == 2 and rows[0] != rows[1], "the shards are even: the test proves nothing"
    state = state_of(checkpoint)
    found = {**values(checkpoint, state.model), **values(checkpoint, state.moments)}
    expect_equal({name: found[name] for name in expected}, expected)
    assert set(found) == set(expected)
    assert (state.step, state.settings) == (12, {"lr": [0.5], "weight_decay": [0.1, 0.0]})
    assert list(state.dropped) == ["rng_state.(0, 0).0.torch_rng_state"]
    assert {"args", "iteration"} <= set(state.objects)


def test_flat_moments_of_an_offloaded_optimizer_get_their_parameters_shapes():
    directory, expected = saved.saved_on_ranks(saved.megatron_offloaded_run)
    checkpoint = dcp.read_metadata(directory)
    flat = [tensor for key, tensor in checkpoint.tensors.items() if key.endswith("embeddings.weight.exp_avg") or "fc2" in key]
    assert (33,) in [tensor.shape for tensor in flat]
    assert any(chunk.offsets[0] % 3 for tensor in flat for chunk in tensor.chunks), "all cuts are between rows"
    state = state_of(checkpoint)
    found = {**values(checkpoint, state.model), **values(checkpoint, state.moments)}
    expect_equal({name: found[name] for name in expected}, expected)
    assert set(found) == set(expected) and state.step == 12
    assert state.notes == ["moments of 15 parameters have one dimension, as Megatron writes those of an offloaded optimizer; they were "
                           "given their parameters' shapes"]


def test_split_parameters_can_stay_as_they_are(tmp_path):
    checkpoint, state = found_in(tmp_path / "c", saved.megatron_state(lambda piece: piece)[0], keep_split=True)
    assert sum(len(parts) for parts in saved.MEGATRON.values()) == len(state.model) == len(state.moments) // 2
    assert "decoder.layers.0.mlp.linear_fc1.weight_w.exp_avg" in state.moments


def test_several_optimizers_of_megatron_are_one(tmp_path):
    whole = saved.megatron_state(lambda piece: piece)[0]
    optimizer = whole["optimizer"]
    split = [{part: {key: value for key, value in entries.items() if ("experts" in key) == has_experts}
              for part, entries in optimizer.items()} for has_experts in (False, True)]
    checkpoint, state = found_in(tmp_path / "c", {**whole, "optimizer": dict(enumerate(split))})
    assert len(state.moments) == 2 * len(saved.MEGATRON) and state.step == 12


FC1 = "module.decoder.layers.0.mlp.linear_fc1.weight"


@pytest.mark.parametrize("name,value,words", [
    (f"{FC1}_v", None, ["linear_fc1.weight_v' is missing", "--keep-split"]),
    ("module.decoder.layers.2.self_attention.in_proj.weight.z", None, ["in_proj.weight.z' is missing"]),
    (FC1, torch.ones(12, 3), ["in one piece and as"]),
    (f"{FC1}_v", torch.ones(5, 3), ["[5, 3]", "[6, 3]", "no parts of one"]),
    (f"{FC1}_v", torch.ones(6, 2), ["no parts of one"]),
], ids=["half", "gdn", "twice", "rows", "columns"])
def test_parts_that_do_not_fit_are_named(tmp_path, name, value, words):
    model = saved.megatron_state(lambda piece: piece)[0]["model"]
    model[name] = value
    model = {key: each for key, each in model.items() if each is not None}
    with pytest.raises(Error) as caught:
        found_in(tmp_path / "c", {"model": model})
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_parts_of_other_models_stay(tmp_path):
    names = ("a.linear.weight_w", "b.weight_v", "c.in_proj.weight", "d.conv1d.weight")
    weights = {name: torch.ones(2) for name in names}
    assert list(found_in(tmp_path / "c", weights)[1].model) == list(weights)


# --- strictness ------------------------------------------------------------------------------------------------------------


def training(**more):
    model, optimizer = saved.trained()
    return {**saved.states_of(model, optimizer)["torch"], **more}


def expect_error(directory, state, *words, kind=Error, **options):
    with pytest.raises(kind) as caught:
        found_in(directory, state, **options)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_a_tensor_that_nothing_knows_is_an_error_until_it_is_allowed(tmp_path):
    state = training(ema={"0.weight": torch.ones(2), "0.bias": torch.ones(1)})
    expect_error(tmp_path / "a", state, "nothing here knows 'ema.0.weight', 'ema.0.bias'", "--allow-extra")
    _, found = found_in(tmp_path / "b", state, allow_extra=["ema.*"])
    assert list(found.dropped) == ["ema.0.weight", "ema.0.bias"] and len(found.model) == 7


def changed(change):
    state = training()
    change(state, state["optimizer"]["state"])
    return state


def of_another_size(state, moments):
    for moment in ("exp_avg", "exp_avg_sq"):
        moments["0.weight"][moment] = torch.ones(34)


MISTAKES = {
    "kind": (lambda state, moments: moments["0.weight"].update(max_exp_avg_sq=torch.ones(7, 5)),
             ["nothing here knows 'optimizer.state.0.weight.max_exp_avg_sq'"]),
    "parameter": (lambda state, moments: state["model"].pop("0.bias"), ["nothing here knows", "'optimizer.state.0.bias.exp_avg'"]),
    "half": (lambda state, moments: moments["0.bias"].pop("exp_avg_sq"), ["'0.bias' have exp_avg and no exp_avg_sq"]),
    "shape": (lambda state, moments: moments["0.bias"].update(exp_avg=torch.ones(7, 1)),
              ["'optimizer.state.0.bias.exp_avg' has the shape [7, 1], and its parameter [7]"]),
    "flat": (of_another_size, ["has the shape [34], and its parameter [7, 5]"]),
    "two optimizers": (lambda state, moments: state.update(
        optimizer=dict.fromkeys((0, 1), saved.states_of(*saved.trained())["by numbers"]["optimizer"])), ["same state of two optimizers"]),
}


@pytest.mark.parametrize("change,words", MISTAKES.values(), ids=MISTAKES)
def test_a_state_that_is_not_adams_is_named(tmp_path, change, words):
    expect_error(tmp_path / "c", changed(change), *words)


@pytest.mark.parametrize("state,words", [
    ({"policy": {"w": torch.ones(2)}}, ["no tensor of a model", "'policy.w'", "--prefix"]),
    ({"model0": {"w": torch.ones(2)}, "model1": {"w": torch.ones(2)}}, ["are both 'w'"])], ids=["none", "two"])
def test_a_checkpoint_without_one_model_is_an_error(tmp_path, state, words):
    expect_error(tmp_path / "a", state, *words)


def test_weights_without_adam_state_are_fine_because_they_may_be_frozen(tmp_path):
    state = training()
    del state["optimizer"]["state"]["0.bias"]
    assert len(found_in(tmp_path / "a", state)[1].moments) == 2 * 6


def test_different_steps_are_named_until_one_is_given(tmp_path):
    state = training()
    state["optimizer"]["state"]["0.bias"]["step"] = torch.tensor(2.)
    expect_error(tmp_path / "a", state, "different numbers of steps", "2 ('optimizer.state.0.bias.step')", "3 (", "--step")
    assert found_in(tmp_path / "b", state, step=3)[1].step == 3
    for each in state["optimizer"]["state"].values():
        del each["step"]
    expect_error(tmp_path / "c", state, "not how many steps", "--step")


def test_master_weights_of_the_optimizer_are_the_weights(tmp_path):
    state = training()
    state["model"] = {name: value.to(torch.bfloat16) for name, value in state["model"].items()}
    masters = {name: value for name, value in saved.trained()[0].state_dict().items()}
    for name, each in state["optimizer"]["state"].items():
        each["master_param"] = masters[name]
    checkpoint, found = found_in(tmp_path / "a", state)
    expect_equal(values(checkpoint, found.model), masters)
    assert "model.0.weight" in found.dropped


def test_state_by_numbers_needs_names_where_the_order_is_unclear(tmp_path):
    model, _ = saved.trained(steps=0)
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}])
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    expect_error(tmp_path / "a", state, "by numbers, 7 of them up to 6 in 2 groups", "--parameters")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [names[id(parameter)] for parameter in decayed + others]
    checkpoint, found = found_in(tmp_path / "b", state, parameters=order)
    moments = saved.expected_of(model, optimizer)[1]
    expect_equal({name: values(checkpoint, found.moments)[name] for name in moments}, moments)
    expect_error(tmp_path / "c", state, "and its parameter", parameters=order[::-1])
    expect_error(tmp_path / "d", state, "--parameters names 'nobody'", kind=UsageError, parameters=[*order[:-1], "nobody"])
    state["model"]["buffer"] = torch.ones(2)
    one_group = {**state, "optimizer": saved.states_of(*saved.trained())["by numbers"]["optimizer"]}
    expect_error(tmp_path / "e", one_group, "there are 8 names")


def test_state_by_numbers_may_have_gaps_where_names_are_given_and_is_noted_where_not(tmp_path):
    model, optimizer = saved.trained()
    names = [name for name, _ in model.named_parameters()]
    state = saved.states_of(model, optimizer)["by numbers"]
    assert "by numbers" in found_in(tmp_path / "a", state)[1].notes[0]
    del state["optimizer"]["state"][2]  # never had a gradient
    expect_error(tmp_path / "b", state, "6 of them up to 6", "--parameters")
    checkpoint, found = found_in(tmp_path / "c", state, parameters=names)
    moments = {name: value for name, value in saved.expected_of(model, optimizer)[1].items() if not name.startswith(names[2])}
    expect_equal({name: values(checkpoint, found.moments)[name] for name in moments}, moments)
    assert len(found.moments) == len(moments) == 12 and found.notes == []


def test_settings_that_cannot_be_opened_do_not_matter(tmp_path):
    state = training()
    state["optimizer"]["param_groups"][0]["lr"] = types.SimpleNamespace()
    assert found_in(tmp_path / "a", state)[1].settings["lr"] == ["(unreadable)"]


def test_types_that_our_format_has_not_are_named(tmp_path):
    weights = {"a": torch.ones(2), "mask": torch.ones(2, dtype=torch.bool)}
    expect_error(tmp_path / "a", weights, "no type for 'mask (bool)'", "--allow-extra")
    assert list(found_in(tmp_path / "b", weights, allow_extra=["mask"])[1].model) == ["a"]


# --- names -----------------------------------------------------------------------------------------------------------------


def test_a_prefix_says_which_tensors_are_the_model(tmp_path):
    state = {"policy": {"net.w": torch.ones(2), "net.b": torch.ones(1)}, "optimizer": {"state": {}}}
    assert list(found_in(tmp_path / "a", state, prefix="policy.net.")[1].model) == ["w", "b"]
    state["policy"]["value"] = torch.ones(1)
    expect_error(tmp_path / "b", state, "nothing here knows 'policy.value'", prefix="policy.net.")


def test_the_optimizers_state_follows_prefixes_and_renames(tmp_path):
    model, optimizer = saved.trained()
    weights, moments = saved.expected_of(model, optimizer)
    nested = {"model": {f"inner.{name}": value for name, value in weights.items()},
              "optimizer": {"state": {f"inner.{name}": value for name, value in training()["optimizer"]["state"].items()}}}
    checkpoint, found = found_in(tmp_path / "a", nested, prefix="model.inner.", renames=[("0", "first"), ("*.weight", "*.w")])
    new = {name: name.replace("0.", "first.").replace("weight", "w") for name in weights}
    expect_equal(values(checkpoint, found.model), {new[name]: value for name, value in weights.items()})
    renamed = values(checkpoint, found.moments)
    for name, value in moments.items():
        parameter, moment = name.rsplit(".", 1)
        assert torch.equal(renamed[f"{new[parameter]}.{moment}"], value)


def test_renames_that_match_nothing_or_collide_are_named(tmp_path):
    weights = {"a.w": torch.ones(2), "b.w": torch.ones(2), "ab.w": torch.ones(2)}
    assert list(found_in(tmp_path / "a", weights, renames=[("a", "x")])[1].model) == ["x.w", "b.w", "ab.w"]
    expect_error(tmp_path / "b", weights, "no name of the model matches", "'a.w'", kind=UsageError, renames=[("c", "x")])
    expect_error(tmp_path / "c", weights, "'b.w' and 'a.w' would both be 'b.w'", kind=UsageError, renames=[("a", "b")])
    expect_error(tmp_path / "d", weights, "same number of *", kind=UsageError, renames=[("*.w", "x")])


def test_objects_of_any_class_are_left_unopened(tmp_path):
    _, found = found_in(tmp_path / "a", {"model": {"w": torch.ones(2)}, "args": types.SimpleNamespace(seed=1)})
    assert found.objects == ["args"]
