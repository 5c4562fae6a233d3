#!/usr/bin/env python3
"""The first hour of somebody with a model of HuggingFace's and some chats: every format of chats gives the same tokens, a
full and a LoRA fine-tuning learn them, stop, go on, and are exported, and transformers computes what `fsdp` does.

    first_hour_test.py FSDP
"""

import json
import os
import pathlib
import re
import sys
import tempfile
import unittest

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here needs a network
os.environ["FSDP_PYTHON"] = sys.executable

try:
    import pyarrow
    import pyarrow.parquet
    import tokenizer_files
    import torch
    import transformers
except ImportError as error:
    print(f"skipped: {error}; make setup installs what requirements.txt names")
    sys.exit(0)

import small_runs

FSDP = sys.argv[1]
NUM_CHATS = 500
QUESTION = "one two"
# Each format as a function of a question and its answer.
FORMATS = {
    "openai": lambda asked, said: {"messages": [{"role": "user", "content": asked},
                                                {"role": "assistant", "content": said}]},
    "openai_parts": lambda asked, said: {"messages": [{"role": "user", "content": [{"type": "text", "text": asked}]},
                                                      {"role": "assistant", "content": [{"type": "text", "text": said}]}]},
    "sharegpt": lambda asked, said: {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": said}]},
    "alpaca": lambda asked, said: {"instruction": asked, "input": "", "output": said},
    "trl": lambda asked, said: {"prompt": [{"role": "user", "content": asked}],
                                "completion": [{"role": "assistant", "content": said}]},
}


def chats():
    """Questions and answers that a small model can learn: the answer repeats the words."""
    words = tokenizer_files.WORDS
    for i in range(NUM_CHATS):
        asked = f"{words[i % 7]} {words[i * 5 % 11]} {i % 10}"
        yield asked, f"{asked} and {words[i % 7]}"


def write_rows(path, rows):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class FirstHour(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.root = pathlib.Path(cls.folder.name)
        tokenizer = tokenizer_files.make_chat_tokenizer(cls.root / "model", "qwen2.5")
        torch.manual_seed(3)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None,
            eos_token_id=tokenizer.token_to_id("<|im_end|>"))).save_pretrained(cls.root / "model")
        (cls.root / "chats").mkdir()
        for name, form in FORMATS.items():
            for suffix in (".jsonl", ".json", ".parquet"):
                write_rows(cls.root / "chats" / (name + suffix), [form(*chat) for chat in chats()])

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    @classmethod
    def fsdp(cls, *words, code=0):
        return small_runs.run([FSDP, *words], cls.root, code=code, timeout=300)

    def train(self, run, steps, *words):
        """Learns the chats; returns the losses of all its steps."""
        self.fsdp("train", "--model", "model", "--data", "chats/sharegpt.jsonl", "--steps", steps, "--batch", 4, "--lr", 0.01,
                  "--warmup", 0, "--schedule", "constant", "--checkpoint-dir", run, "--sample", "", "--quiet", *words)
        return list(small_runs.losses(self.root / run / "log.jsonl").values())

    def check_exported(self, run, exported):
        """transformers reads the files, and answers as the run does."""
        theirs = transformers.AutoModelForCausalLM.from_pretrained(self.root / exported, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.root / exported)
        asked = tokenizer(tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], tokenize=False,
                                                        add_generation_prompt=True), add_special_tokens=False,
                          return_tensors="pt")
        answer = theirs.generate(**asked, max_new_tokens=12, do_sample=False)[0, asked["input_ids"].shape[1]:]
        ours = self.fsdp("generate", "--checkpoint", run, "--chat", "--prompt", QUESTION, "--tokens", 12).stdout
        self.assertEqual(ours.rstrip("\n"), tokenizer.decode(answer, skip_special_tokens=True).rstrip("\ufffd"))

    def test_every_format_has_the_same_tokens(self):
        found = {path.name: json.loads(self.fsdp("data", "info", path, "--tokenizer", "model", "--json").stdout)
                 for path in sorted((self.root / "chats").iterdir())}
        self.assertEqual(len(found), 3 * len(FORMATS))
        self.assertEqual(found["openai.jsonl"]["documents"], NUM_CHATS)
        self.assertLess(0, found["openai.jsonl"]["learnt"])
        for name, info in found.items():
            self.assertEqual(info["fingerprint"], found["openai.jsonl"]["fingerprint"], name)

    def test_text_beside_chats_is_learnt_whole(self):
        (self.root / "book.txt").write_text(tokenizer_files.sentences(4000))
        chats, book = (json.loads(self.fsdp("data", "info", path, "--tokenizer", "model", "--json").stdout)["tokens"]
                       for path in ("chats/openai.json", "book.txt"))
        said = self.fsdp("train", "--model", "model", "--data", "chats/openai.json", "book.txt", "--epochs", 1, "--batch", 1,
                         "--sequence", 64, "--check").stdout
        steps = int(re.search(r"([\d,]+) steps of 64 tokens", said)[1].replace(",", ""))
        # Validation has 2 %, and windows of chats a little room.
        self.assertLess(0.95 * (chats + book) / 64, steps)

    def test_rows_that_are_cut_are_told_of_packed_files(self):
        write_rows(self.root / "long.jsonl", [FORMATS["openai"](asked, f"{said} " * 30) for asked, said in chats()])
        self.fsdp("data", "pack", "long.jsonl", "--tokenizer", "model", "--output", "long.bin")
        for path in ("long.jsonl", "long.bin"):
            done = self.fsdp("train", "--model", "model", "--data", path, "--sequence", 64, "--steps", 1, "--check")
            self.assertRegex(done.stderr, r"\d+ rows are longer than --sequence 64 and cut; the longest has \d+ tokens")

    def test_full_fine_tuning(self):
        whole = self.train("whole", 12)
        self.assertLess(sum(whole[-3:]), 0.9 * sum(whole[:3]))
        self.train("stopped", 6)
        self.assertEqual(self.train("stopped", 12), whole)  # in one log, bit by bit
        self.fsdp("convert", "stopped", "tuned", "--to", "hf")
        self.check_exported("stopped", "tuned")

    def test_adapters(self):
        losses = self.train("adapters", 6, "--lora", 4, "--ranks", 2)
        self.assertLess(losses[-1], losses[0])
        self.assertEqual(self.train("adapters", 12, "--lora", 4, "--ranks", 2)[:6], losses)
        self.fsdp("convert", "adapters", "merged", "--to", "hf", "--merge")
        self.check_exported("adapters", "merged")
        before, after = (small_runs.stored_tensors((self.root / each / "model.safetensors").read_bytes())
                         for each in ("model", "merged"))
        name = "model.embed_tokens.weight"
        self.assertEqual(before[name], after[name])  # adapters leave it alone


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
