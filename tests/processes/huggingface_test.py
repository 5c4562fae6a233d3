#!/usr/bin/env python3
"""Models of the transformers package through `fsdp convert` and back: the same logits.

    huggingface_test.py FSDP        FSDP is the command; ends with "skipped: ..." where packages are missing
"""

import json
import os
import pathlib
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here needs a network

try:
    import safetensors
    import torch
    import transformers
except ImportError as error:
    print(f"skipped: {error}; make setup installs what requirements.txt names")
    sys.exit(0)

import safetensors.torch

import small_runs

FSDP = sys.argv[1]
VOCABULARY = 96


def convert(source, target, *options):
    """Runs `fsdp convert`; the target must not be there yet."""
    small_runs.run([FSDP, "convert", source, target, *options], ".")


def save_llama(folder, tied, **options):
    """A random Llama with grouped keys and values and an odd size here and there."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=77, num_hidden_layers=3,
        num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=tied, max_position_embeddings=64,
        **options)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():  # norms are ones otherwise, and would hide being mixed up
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, max_shard_size="100KB")


def save_qwen3_next(folder):
    """Gated DeltaNet and attention, experts and a dense layer; tensors of which each expert has its own."""
    config = transformers.Qwen3NextConfig(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=77, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=12, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20,
        shared_expert_intermediate_size=24, mlp_only_layers=[1])
    transformers.Qwen3NextForCausalLM(config).save_pretrained(folder, max_shard_size="100KB")


def logits(folder, dtype=torch.float32):
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[fault], f"{folder}: {fault}: {report[fault]}"
    tokens = torch.arange(40).remainder(VOCABULARY).reshape(2, 20)
    with torch.no_grad():
        return model.eval()(tokens).logits.float()


def check_files(folder):
    """The safetensors package reads every file, and the index names what is in each."""
    files = sorted(pathlib.Path(folder).rglob("*.safetensors"))
    assert files, folder
    found = {}
    for path in files:
        with safetensors.safe_open(path, "pt") as file:
            assert file.metadata()["format"] == "pt", path
            for name in file.keys():
                assert file.get_tensor(name).shape == torch.Size(file.get_slice(name).get_shape())
                found[name] = path.name
    index = pathlib.Path(folder, "model.safetensors.index.json")
    if index.exists():
        assert json.loads(index.read_text())["weight_map"] == found, folder
    return found


def check_round_trip(folder, tied, ranks):
    """fp32 there and back is exact, in one file and in several."""
    expected = logits(folder / "hf")
    ours = folder / f"ours{ranks}"
    convert(folder / "hf", ours, "--to", "sharded", "--ranks", str(ranks))
    check_files(ours)
    for size in ("5GB", "50KB"):
        back = folder / f"back{ranks}-{size}"
        convert(ours, back, "--to", "hf", "--max-shard-size", size)
        names = check_files(back)
        assert ("lm_head.weight" in names) != tied, names
        assert len(set(names.values())) > 1 or size == "5GB"
        assert torch.equal(logits(back), expected), f"tied {tied}, {ranks} ranks, {size}"


def check_narrow(folder, name, dtype):
    """Weights are those that torch rounds, and the model loads in the type its config.json names."""
    target = folder / name
    convert(folder / "ours3", target, "--to", "hf", "--dtype", name)
    config = json.loads((target / "config.json").read_text())
    assert config["torch_dtype"] == config["dtype"] == str(dtype).removeprefix("torch."), config
    model = transformers.LlamaForCausalLM.from_pretrained(target, dtype="auto")
    exact = transformers.LlamaForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32).state_dict()
    for key, value in model.state_dict().items():
        assert value.dtype == dtype, (key, value.dtype)
        assert torch.equal(value, exact[key].to(dtype)), key
    # Each weight is off by at most 2^-9 (bf16) or 2^-12 (fp16) of itself; logits are sums of a few hundred
    # products, with errors of either sign.
    tolerance = 0.03 if dtype == torch.bfloat16 else 0.004
    expected = logits(folder / "hf")
    error = (logits(target) - expected).abs().max() / expected.abs().max()
    assert 0 < error < tolerance, f"{name}: {error}"


def check_old_config(folder):
    """The field that versions before 4.56 wrote: torch_dtype alone."""
    path = folder / "hf" / "config.json"
    config = json.loads(path.read_text())
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config))
    convert(folder / "hf", folder / "old", "--to", "sharded", "--dtype", "bf16")
    convert(folder / "old", folder / "old-back", "--to", "hf")
    model = transformers.LlamaForCausalLM.from_pretrained(folder / "old-back", dtype="auto")
    assert model.dtype == torch.bfloat16, model.dtype


def main():
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(1)
    for tied in (False, True):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            save_llama(folder / "hf", tied, attention_bias=tied, mlp_bias=tied)
            for ranks in (1, 3, 8):
                check_round_trip(folder, tied, ranks)
            check_narrow(folder, "bf16", torch.bfloat16)
            check_narrow(folder, "fp16", torch.float16)
            check_old_config(folder)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        save_qwen3_next(folder / "hf")
        check_round_trip(folder, tied=False, ranks=3)
    print(f"passed: transformers {transformers.__version__}, safetensors {safetensors.__version__}")


if __name__ == "__main__":
    main()
