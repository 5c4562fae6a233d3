#!/usr/bin/env python3
"""Our Gated DeltaNet mixer against the transformers package's: the same weights, output and gradients in fp32.

    delta_net_test.py DELTA_NET_RUN      the program; ends with "skipped: ..." where packages are missing
"""

import os
import pathlib
import subprocess
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here needs a network

try:
    import safetensors.torch
    import torch
    import transformers
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet
except ImportError as error:
    print(f"skipped: {error}; make setup installs what requirements.txt names")
    sys.exit(0)

DELTA_NET_RUN = sys.argv[1]

# (key heads, value heads, key_dim, value_dim), ranks, chunk size. The package computes in chunks of 64.
CASES = [((2, 2, 8, 8), 1, 64), ((2, 4, 8, 12), 2, 16), ((3, 9, 16, 4), 1, 8), ((3, 9, 16, 4), 3, 64)]

# Both sides round products and sums of a few hundred terms to fp32, in different orders: 6e-8 each, a hundred of
# them in a row, of values up to the largest of a tensor.
TOLERANCE = 1e-5


def waves(shape, phase):
    """The program's inputs."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64) * 1.7 + phase).sin().float().reshape(shape)


def theirs(layer, hidden_size):
    x = waves((2, 37, hidden_size), 0.5).requires_grad_()
    output = layer(x)
    (output * waves(output.shape, 0.3)).sum().backward()
    result = {"output": output.detach(), "gradient.x": x.grad}
    for name, parameter in layer.named_parameters():
        result["gradient.linear_attn." + name] = parameter.grad
    return result


def ours(folder, ranks, chunk_size):
    target = folder / "out"
    subprocess.run([DELTA_NET_RUN, folder, str(ranks), str(chunk_size), target], check=True)
    result = {}
    for path in target.rglob("*.safetensors"):
        result.update(safetensors.torch.load_file(path))
    return result


def check(sizes, ranks, chunk_size, folder):
    key_heads, value_heads, key_dim, value_dim = sizes
    config = transformers.Qwen3NextConfig(
        hidden_size=48, num_hidden_layers=1, layer_types=["linear_attention"], linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads, linear_key_head_dim=key_dim, linear_value_head_dim=value_dim)
    layer = Qwen3NextGatedDeltaNet(config, 0).float()
    with torch.no_grad():
        for parameter in layer.parameters():  # norms and dt_bias are ones otherwise, and would hide being mixed up
            parameter.add_(torch.randn_like(parameter) * 0.3)
        # States that live for some positions: first values forget nearly all at each. There the package's differences
        # of fp32 sums also lose digits: its gradient of A_log is up to 1e-4 away from the one in fp64, ours 7e-6.
        layer.A_log.sub_(4.0)
    config.save_pretrained(folder)
    weights = {"linear_attn." + name: value for name, value in layer.state_dict().items()}
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    expected = theirs(layer, config.hidden_size)
    actual = ours(folder, ranks, chunk_size)
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    worst = 0.0
    for name, value in expected.items():
        assert actual[name].shape == value.shape, name
        error = ((actual[name] - value).abs().max() / value.abs().max().clamp_min(1e-6)).item()
        assert error < TOLERANCE, f"{sizes}: {name}: {error}"
        worst = max(worst, error)
    return worst


def main():
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as name:
        for index, (sizes, ranks, chunk_size) in enumerate(CASES):
            folder = pathlib.Path(name, str(index))
            folder.mkdir()
            worst = check(sizes, ranks, chunk_size, folder)
            print(f"{sizes}, {ranks} ranks, chunks of {chunk_size}: largest difference {worst:.1e} of the largest value")
    print(f"passed: transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
