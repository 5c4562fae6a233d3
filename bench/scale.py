"""Tables for docs/scale.md, the cost of a step on clusters: python bench/scale.py [--fsdp PROGRAM]

Everything is `fsdp plan`, so no GPU is needed; bytes, collectives and launches are those that a simulated world records
(tests/parity/collectives_test.cpp).
"""

import argparse
import json
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
RANKS = (8, 64, 512, 4096)
HOST_RANKS = 8
MODELS = {
    "llama3-70b": [],
    "deepseek-v3": ["--ep", "{ep}"],
}
# The shapes of Llama-3 70B, for what FSDP2 pads: it cuts each tensor along its first dim.
LLAMA_LAYER = [[8192, 8192]] * 2 + [[1024, 8192]] * 2 + [[28672, 8192]] * 2 + [[8192, 28672]] + [[8192]] * 2
LLAMA = LLAMA_LAYER * 80 + [[128256, 8192]] * 2 + [[8192]]


def plan(fsdp, model, ranks, *options):
    words = [option.format(ep=min(ranks, 64)) for option in MODELS[model]]
    command = [fsdp, "plan", "--model", model, "--ranks", str(ranks), "--host-ranks", str(min(HOST_RANKS, ranks)), "--json",
               "--main-grads", "fp32", *words, *options]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def in_gb(number):
    return f"{number / 1e9:.2f}" if number < 10e9 else f"{number / 1e9:.1f}"


def fsdp2_padding(ranks):
    """Elements that FSDP2 adds to Llama-3 70B, relative to it: every first dim is filled up to a multiple of the ranks."""
    rows = [(-(-shape[0] // ranks) * ranks - shape[0], shape) for shape in LLAMA]
    added = sum(extra * (shape[1] if len(shape) > 1 else 1) for extra, shape in rows)
    return added / sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in LLAMA)


def table(fsdp, model):
    print(f"\n{model}\n")
    print("| ranks | hosts | gathered: in a host | through a card | reduced, bf16 wire: in a host | through a card | by rings | "
          "fp32 wire: through a card | by rings | launches | connections | NCCL's GB | staging GB | padding | planned in s |")
    print("|---:|" * 1 + "---:|" * 14)
    for ranks in RANKS:
        bf16 = plan(fsdp, model, ranks, "--grad-comm", "bf16")
        fp32 = plan(fsdp, model, ranks, "--grad-comm", "fp32")["network"]["reductions"]
        network = bf16["network"]
        gathers, reductions = network["gathers"], network["reductions"]
        print("| " + " | ".join([
            f"{ranks:,}", f"{network['hosts']:,}", in_gb(gathers["near_bytes"]), in_gb(gathers["far_bytes"]),
            in_gb(reductions["near_bytes"]), in_gb(reductions["far_bytes"]), in_gb(reductions["ring_far_bytes"]),
            in_gb(fp32["far_bytes"]), in_gb(fp32["ring_far_bytes"]), f"{network['launches']:,}", f"{network['connections']:,}",
            in_gb(network["nccl_bytes"]), in_gb(network["staging_bytes"]), f"{100 * bf16['padding_fraction']:.3f} %",
            f"{bf16['plan_seconds']:.2f}"]) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fsdp", default=ROOT / "build/release/bin/fsdp", help="the command (build/release/bin/fsdp)")
    fsdp = parser.parse_args().fsdp
    for model in MODELS:
        table(fsdp, model)
    print("\nFSDP2's padding of llama3-70b: " + ", ".join(f"{ranks:,} ranks {100 * fsdp2_padding(ranks):.2f} %" for ranks in RANKS))


if __name__ == "__main__":
    main()
