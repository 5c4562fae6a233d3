"""python -m fsdp_cpp.convert writes checkpoints of ours that hold the bits of the DCP checkpoint, or writes nothing."""

import json
import os
import pathlib

import pytest
import torch

import dcp_checkpoints as saved
import fsdp_cpp as fsdp
from fsdp_cpp.convert import __main__ as convert

pytestmark = saved.ONE_RANK

TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}


def read_folder(folder):
    """{name: whole tensor} of safetensors files, each box at its saved_offsets; every element must be there."""
    boxes = {}
    for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8:8 + length])
        offsets = json.loads(header.pop("__metadata__")["DCP_SHARDING_INFO"])
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            dtype = TYPES[entry["dtype"]]
            values = bytearray(data[8 + length + begin:8 + length + end])
            flat = torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype)
            boxes.setdefault(name, []).append((offsets[name]["saved_offsets"], flat.view(entry["shape"])))
    whole = {}
    for name, parts in boxes.items():
        shape = [max(offsets[dim] + part.shape[dim] for offsets, part in parts) for dim in range(parts[0][1].ndim)]
        whole[name] = torch.zeros(shape, dtype=parts[0][1].dtype)
        assert sum(part.numel() for _, part in parts) == whole[name].numel(), name
        for offsets, part in parts:
            whole[name][tuple(slice(begin, begin + size) for begin, size in zip(offsets, part.shape))] = part
    return whole


def expect_written(target, model, moments=None):
    found = {"model": read_folder(target / "model"), "optimizer": read_folder(target / "optimizer")}
    for folder, expected in (("model", model), ("optimizer", moments or {})):
        assert set(found[folder]) == set(expected)
        for name, value in expected.items():
            assert found[folder][name].dtype == value.dtype and torch.equal(found[folder][name], value), name
    manifest = json.loads((target / "manifest.json").read_text())
    assert {entry["name"] for entry in manifest["model"]} == set(model)
    return manifest


def parted(expected):
    moments = {name: value for name, value in expected.items() if name.endswith((".exp_avg", ".exp_avg_sq"))}
    return {name: value for name, value in expected.items() if name not in moments}, moments


def test_weights_moments_and_step_are_written_bit_for_bit(tmp_path):
    ranks = 3
    model, optimizer = saved.trained(steps=3)
    saved.save(saved.states_of(model, optimizer)["torch"], tmp_path / "dcp")
    convert.convert(str(tmp_path / "dcp"), str(tmp_path / "ours"), ranks=ranks)
    manifest = expect_written(tmp_path / "ours", *saved.expected_of(model, optimizer))
    assert manifest["optimizer"] == {"name": "AdamW", "moments": ["exp_avg", "exp_avg_sq"], "step": 3, "skipped": 0,
                                     "loss_scale": 1.0, "good_steps": 0, "settings": "", "late_updates": {}}
    assert (manifest["step"], manifest["mesh"]) == (3, {"outer": 1, "inner": ranks})


@pytest.mark.parametrize("body", [saved.fsdp2_run, saved.megatron_run, saved.megatron_offloaded_run, saved.placed_tensors])
def test_shards_of_any_cut_are_written_bit_for_bit(tmp_path, body):
    directory, expected = saved.saved_on_ranks(body)
    convert.convert(directory, str(tmp_path / "ours"), ranks=2)
    expect_written(tmp_path / "ours", *parted(expected))


@pytest.mark.parametrize("shape", [(), (7,), (4, 3), (3, 1, 5), (2, 3, 2, 2)], ids=str)
def test_ranges_of_a_flat_tensor_become_boxes_of_its_shape(shape):
    numbers = torch.arange(torch.Size(shape).numel()) + 1
    for begin in range(len(numbers)):
        for count in range(1, len(numbers) - begin + 1):
            source = numbers[begin:begin + count].repeat_interleave(2)  # every second counts
            found = torch.zeros((shape[0] + 1, *shape[1:]) if shape else (), dtype=torch.int64)
            for skipped, offsets, sizes, strides in convert._boxes_of_range(begin, count, 1, shape, 2):
                box = tuple(slice(first, first + size) for first, size in zip(offsets, sizes))
                found[box] += source.as_strided(sizes, strides, 2 * skipped)
            expected = torch.zeros(len(numbers), dtype=torch.int64)
            expected[begin:begin + count] = numbers[begin:begin + count]
            assert torch.equal(found[1:] if shape else found, expected.view(shape))


@pytest.mark.more
def test_training_goes_on_where_torch_stopped(tmp_path):
    plain, optimizer = saved.trained(steps=3)
    saved.save(saved.states_of(plain, optimizer)["torch"], tmp_path / "dcp")
    convert.convert(str(tmp_path / "dcp"), str(tmp_path / "ours"))
    ours = fsdp.fully_shard(saved.trained(steps=0)[0], units=[torch.nn.Linear])
    updates = fsdp.AdamW(ours, lr=0.01, betas=(0.9, 0.999), weight_decay=0.01)
    assert fsdp.load(tmp_path / "ours", ours, updates).step == 3
    for _ in range(3):
        batch = torch.randn(4, 5)
        losses = []
        for model, each in ((plain, optimizer), (ours, updates)):
            losses.append(model(batch).square().sum())
            losses[-1].backward()
            each.step()
            each.zero_grad()
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)  # AdamW differs from torch's by an ulp per step


def test_tensors_of_any_strides_are_written_row_by_row(tmp_path):
    weights = {"turned": torch.randn(6, 4).t(), "deep": torch.randn(2, 3, 4).permute(2, 0, 1),
               "part": torch.randn(9, 9)[2:5, 3:7]}
    saved.save(weights, tmp_path / "dcp")
    convert.convert(str(tmp_path / "dcp"), str(tmp_path / "ours"), ranks=2)
    expect_written(tmp_path / "ours", weights)


def test_large_tensors_are_streamed_in_chunks(tmp_path):
    weights = {"large": torch.randn(1500, 4099), "small": torch.randn(7)}
    saved.save(weights, tmp_path / "dcp")
    heard = []
    convert.convert(str(tmp_path / "dcp"), str(tmp_path / "ours"), on_bytes=lambda done, total: heard.append((done, total)))
    expect_written(tmp_path / "ours", weights)
    assert len(heard) > 2 and heard[-1][0] == heard[-1][1] == 4 * (1500 * 4099 + 7)


def test_moments_become_fp32_and_weights_what_dtype_says(tmp_path):
    state = saved.states_of(*saved.trained())["torch"]
    for each in state["optimizer"]["state"].values():
        each.update({moment: each[moment].to(torch.bfloat16) for moment in ("exp_avg", "exp_avg_sq")})
    saved.save(state, tmp_path / "dcp")
    convert.convert(str(tmp_path / "dcp"), str(tmp_path / "ours"), dtype=torch.bfloat16)
    weights, moments = saved.expected_of(*saved.trained())
    expect_written(tmp_path / "ours", {name: value.to(torch.bfloat16) for name, value in weights.items()},
                   {name: value.to(torch.bfloat16).float() for name, value in moments.items()})


def test_a_number_too_large_is_an_error_and_nothing_is_left(tmp_path):
    saved.save({"w": torch.tensor([1.0, 1e6])}, tmp_path / "dcp")
    with pytest.raises(fsdp._C.Error, match="'w' has 1 numbers that are too large for fp16"):
        convert.convert(str(tmp_path / "dcp"), str(tmp_path / "ours"), dtype=torch.float16)
    assert sorted(os.listdir(tmp_path)) == ["dcp"]


def test_an_interrupted_conversion_leaves_nothing(tmp_path):
    saved.save({"w": torch.ones(3)}, tmp_path / "dcp")

    def stop(*_):
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        convert.convert(str(tmp_path / "dcp"), str(tmp_path / "ours"), on_bytes=stop)
    assert sorted(os.listdir(tmp_path)) == ["dcp"]


# --- the command -----------------------------------------------------------------------------------------------------------


def run(capsys, *arguments):
    try:
        code = convert.main(list(map(str, arguments)))
    except SystemExit as end:
        code = end.code
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_the_command_lists_what_it_wrote_and_dropped(tmp_path, capsys):
    state = {**saved.states_of(*saved.trained())["torch"], "rng_state": torch.get_rng_state(), "ema": {"w": torch.ones(1)},
             "epoch": 4}
    saved.save(state, tmp_path / "dcp")
    code, out, _ = run(capsys, tmp_path / "dcp", tmp_path / "ours", "--allow-extra", "ema.*")
    assert code == 0
    assert "model      7 tensors, 81 parameters, float32" in out
    assert "optimizer  exp_avg and exp_avg_sq of 7 parameters after 3 steps" in out
    assert "settings   lr 0.01; betas (0.9, 0.999); eps 1e-08; weight_decay 0.01" in out
    assert "dropped    1 tensor (allowed by --allow-extra): ema.w" in out
    assert "dropped    1 tensor (not of the model): rng_state" in out
    assert f"wrote {tmp_path / 'ours'}" in out


def test_a_dry_run_checks_everything_and_writes_nothing(tmp_path, capsys):
    saved.save({"w": torch.ones(3)}, tmp_path / "dcp")
    code, out, _ = run(capsys, tmp_path / "dcp", "--dry-run")
    assert code == 0 and "wrote nothing" in out and sorted(os.listdir(tmp_path)) == ["dcp"]
    path, begin, length = saved.stream_of(tmp_path / "dcp", "w")
    path.write_bytes(bytes(begin + length))
    code, out, err = run(capsys, tmp_path / "dcp", "--dry-run")
    assert code == 1 and "'w' at byte" in err and out == ""


def test_an_existing_target_is_replaced_only_where_that_is_asked_for(tmp_path, capsys):
    saved.save({"w": torch.ones(3)}, tmp_path / "dcp")
    assert run(capsys, tmp_path / "dcp", tmp_path / "ours")[0] == 0
    code, _, err = run(capsys, tmp_path / "dcp", tmp_path / "ours")
    assert code == 1 and "is there already" in err
    assert run(capsys, tmp_path / "dcp", tmp_path / "ours", "--overwrite", "--rename", "w=v")[0] == 0
    expect_written(tmp_path / "ours", {"v": torch.ones(3)})


def test_files_the_model_was_published_with_come_along(tmp_path, capsys):
    saved.save({"w": torch.ones(3)}, tmp_path / "dcp")
    published = tmp_path / "published"
    published.mkdir()
    (published / "config.json").write_text('{"model_type": "own"}')
    (published / "tokenizer.json").write_text("{}")
    assert run(capsys, tmp_path / "dcp", tmp_path / "ours", "--model-files", published)[0] == 0
    assert (tmp_path / "ours" / "config.json").read_text() == '{"model_type": "own"}'
    assert (tmp_path / "ours" / "tokenizer.json").exists()


def test_names_of_the_optimizers_parameters_come_from_a_file(tmp_path, capsys):
    model, optimizer = saved.trained()
    saved.save(saved.states_of(model, optimizer)["by numbers"], tmp_path / "dcp")
    (tmp_path / "names").write_text("\n".join(name for name, _ in model.named_parameters()))
    assert run(capsys, tmp_path / "dcp", tmp_path / "ours", "--parameters", tmp_path / "names")[0] == 0
    expect_written(tmp_path / "ours", *saved.expected_of(model, optimizer))
    code, _, err = run(capsys, tmp_path / "dcp", tmp_path / "more", "--parameters", tmp_path / "nowhere")
    assert code == 1 and "nowhere" in err


@pytest.mark.parametrize("arguments,words", [
    ("dcp", "DST is missing"), ("dcp o --ranks 0", "ranks is 0"), ("dcp o --ranks two", "--ranks"),
    ("dcp o --dtype fp8", "--dtype"), ("dcp o --rename w", "FROM=TO"), ("dcp o --rename x=y", "matches"),
    ("dcp o --step -1", "--step is -1"), ("dcp o --strict", "--strict")])
def test_wrong_arguments_are_named_and_end_with_2(tmp_path, capsys, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    saved.save({"w": torch.ones(3)}, tmp_path / "dcp")
    code, _, err = run(capsys, *arguments.split())
    assert code == 2 and words in err, err
    assert sorted(os.listdir(tmp_path)) == ["dcp"]
