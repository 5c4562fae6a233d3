#!/usr/bin/env python3
"""A Llama of the transformers package, fine-tuned sharded by `fsdp train` and exported: the package computes what we do.

    finetune_test.py FSDP MODEL_RUN FINETUNE     the command, our models as a program, the example's script

Ends with "skipped: ..." where packages are missing.
"""

import json
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
except ImportError as error:
    print(f"skipped: {error}; make setup installs what requirements.txt names")
    sys.exit(0)

FSDP, MODEL_RUN, FINETUNE = sys.argv[1:4]
STEPS = 20
# Both sides round products and sums of a few hundred terms to fp32, in different orders: 6e-8 each, a hundred of
# them in a row, of values up to the largest logit.
TOLERANCE = 1e-5
PROMPT = "The rank "


def load(folder):
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model):
    with torch.no_grad():
        return model(torch.arange(40).reshape(2, 20)).logits


def our_logits(checkpoint, ranks, folder):
    """What our model computes from a checkpoint of ours, for the tokens of logits()."""
    out = folder / f"computed{ranks}"
    subprocess.run([MODEL_RUN, "compute", checkpoint, str(ranks), out], check=True)
    (file,) = out.rglob("*.safetensors")
    return safetensors.torch.load_file(file)["logits"]


def their_text(model):
    prompt = torch.tensor([list(PROMPT.encode())])
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False,
                            pad_token_id=0)[0]
    return bytes(token for token in tokens.tolist() if token < 256)


def main(folder):
    environment = {**os.environ, "FSDP": FSDP, "PYTHON": sys.executable, "STEPS": str(STEPS)}
    subprocess.run([FINETUNE, folder], check=True, env=environment)  # compares losses of both programs itself

    log = [json.loads(line) for line in (folder / "run/log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in log if line["kind"] == "step"]
    assert len(losses) == STEPS and losses[-1] < losses[0] - 1, losses

    start, tuned = load(folder / "start"), load(folder / "tuned")
    theirs = logits(tuned)
    largest = theirs.abs().max().item()
    assert (theirs - logits(start)).abs().max() > 0.1 * largest, "what was exported is not what was trained"
    for ranks in (1, 2):
        ours = our_logits(folder / f"run/step-{STEPS:08}", ranks, folder)
        difference = (ours - theirs).abs().max().item() / largest
        print(f"logits of the fine-tuned model on {ranks} ranks: largest difference {difference:.1e} of the largest")
        assert difference < TOLERANCE

    ours = subprocess.run([FSDP, "generate", "--checkpoint", folder / "run", "--prompt", PROMPT, "--tokens", "24"],
                          check=True, stdout=subprocess.PIPE).stdout
    assert ours == their_text(tuned) + b"\n", (ours, their_text(tuned))


with tempfile.TemporaryDirectory() as place:
    main(pathlib.Path(place))
print("passed")
