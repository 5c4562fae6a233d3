#!/usr/bin/env python3
"""Loads an exported model with the transformers package and compares its loss with what `fsdp eval` says.

    compare.py MODEL TOKENS EVAL      a directory; a token file; what `fsdp eval --sequence 64 --batches 8 --json` wrote
"""

import json
import math
import os
import pathlib
import struct
import sys

os.environ["HF_HUB_OFFLINE"] = "1"  # everything is here

import torch
import transformers

SEQUENCE = 64
# Every token's loss is right to about 1e-6 in fp32, in both programs: they round the same products and sums in different
# orders. The mean of thousands is no worse.
TOLERANCE = 1e-5


def windows(path, count):
    """The first inputs and targets that `fsdp eval` reads: neighbouring windows share one token."""
    data = pathlib.Path(path).read_bytes()
    width = struct.unpack_from("<I", data, 12)[0]
    number = count * SEQUENCE + 1
    tokens = torch.tensor(struct.unpack_from(f"<{number}{'HI'[width == 4]}", data, 128))
    return tokens[:-1].reshape(count, SEQUENCE), tokens[1:].reshape(count, SEQUENCE)


def main(folder, tokens, report):
    ours = json.loads(pathlib.Path(report).read_text())
    model, faults = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True)
    assert not any(faults[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), faults
    inputs, targets = windows(tokens, ours["tokens"] // SEQUENCE)
    with torch.no_grad():
        logits = torch.cat([model.eval()(part).logits for part in inputs.split(16)])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    print(f"loss on {ours['tokens']:,} tokens: fsdp eval {ours['loss']:.6f}, transformers {loss:.6f}")
    if not math.isclose(loss, ours["loss"], abs_tol=TOLERANCE):
        sys.exit("they differ")


if __name__ == "__main__":
    main(*sys.argv[1:])
