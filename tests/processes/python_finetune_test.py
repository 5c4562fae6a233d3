#!/usr/bin/env python3
"""The example that people copy, under torchrun: a small Llama made here learns a text, and transformers loads what is left.

    python_finetune_test.py FINETUNE

Ends with "skipped: ..." where packages are missing.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here needs a network

try:
    import tokenizers
    import torch
    import transformers
except ImportError as error:
    print(f"skipped: {error}; make setup installs what requirements.txt names")
    sys.exit(0)

transformers.utils.logging.disable_progress_bar()
FINETUNE = sys.argv[1]
RANKS = 2
WORDS = "one rank gathers what another rank holds , and then it computes .".split()


def make_tokenizer():
    vocabulary = {word: i for i, word in enumerate(["<unk>", *dict.fromkeys(WORDS)])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def make_model(folder):
    torch.manual_seed(1)
    tokenizer = make_tokenizer()
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def loss_of(folder):
    """Of the text, by transformers alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16, model.dtype
    rows = torch.tensor([transformers.AutoTokenizer.from_pretrained(folder)(" ".join(WORDS))["input_ids"]])
    assert rows.min() > 0, "every word is known"
    with torch.no_grad():
        return model(input_ids=rows, labels=rows).loss.item()


def main(folder):
    make_model(folder / "start")
    (folder / "text.txt").write_text(" ".join(WORDS * 20))
    job = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", FINETUNE,
                          "--model", "start", "--text", "text.txt", "--output", "tuned", "--steps", "40", "--length", "24",
                          "--lr", "1e-2"], cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=250)
    assert job.returncode == 0, job.stdout
    losses = [float(loss) for loss in re.findall(r"^step \d+  loss ([\d.]+)  norm [\d.]+$", job.stdout, re.MULTILINE)]
    start, tuned = loss_of(folder / "start"), loss_of(folder / "tuned")
    print(f"losses {losses}; by transformers {start:.4f} before and {tuned:.4f} after")
    assert len(losses) == 5 and losses[-1] < 0.2 * losses[0], job.stdout
    assert abs(start - losses[0]) < 0.2, "the first loss is that of the model that was given"
    assert tuned < 0.2 * losses[0], "what was saved is what was trained"


with tempfile.TemporaryDirectory() as place:
    main(pathlib.Path(place))
print("passed")
