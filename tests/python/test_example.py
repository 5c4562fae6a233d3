"""The example that people copy, under torchrun: a small Llama made here learns a text, and transformers loads what is left."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.skipif(int(os.environ.get("WORLD_SIZE", "1")) > 1, reason="starts ranks itself")
FINETUNE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "python_finetune" / "finetune.py"
WORDS = "one rank gathers what another rank holds , and then it computes .".split()


def make_model(folder):
    vocabulary = {word: i for i, word in enumerate(["<unk>", *dict.fromkeys(WORDS)])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def loss_of(folder):
    """The loss of the text, by transformers alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16, model.dtype
    rows = torch.tensor([transformers.AutoTokenizer.from_pretrained(folder)(" ".join(WORDS))["input_ids"]])
    assert rows.min() > 0, "every word is known"
    with torch.no_grad():
        return model(input_ids=rows, labels=rows).loss.item()


def test_finetune_under_torchrun(tmp_path):
    make_model(tmp_path / "start")
    (tmp_path / "text.txt").write_text(" ".join(WORDS * 20))
    job = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", FINETUNE,
                          "--model", "start", "--text", "text.txt", "--output", "tuned", "--steps", "40", "--length", "24",
                          "--lr", "1e-2"], cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
                                                            "CUDA_VISIBLE_DEVICES": ""},  # one GPU is too few for two ranks
                         text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=250)
    assert job.returncode == 0, job.stdout
    losses = [float(loss) for loss in re.findall(r"^step \d+  loss ([\d.]+)  norm [\d.]+$", job.stdout, re.MULTILINE)]
    assert len(losses) == 5 and losses[-1] < 0.2 * losses[0], job.stdout
    assert abs(loss_of(tmp_path / "start") - losses[0]) < 0.2, "the first loss is that of the model that was given"
    assert loss_of(tmp_path / "tuned") < 0.2 * losses[0], "what was saved is what was trained"
