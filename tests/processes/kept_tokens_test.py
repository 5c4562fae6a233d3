#!/usr/bin/env python3
"""Chats are tokenised once: by one of a run's processes, and not again when it goes on; and tuned whole in windows.

    kept_tokens_test.py FSDP START_RANKS
"""

import json
import os
import pathlib
import re
import shutil
import sys
import tempfile
import unittest

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here needs a network
os.environ["FSDP_PYTHON"] = sys.executable

try:
    import tokenizer_files
    import torch
    import transformers
except ImportError as error:
    print(f"skipped: {error}; make setup installs what requirements.txt names")
    sys.exit(0)

import small_runs

FSDP, START_RANKS = sys.argv[1:3]


def write_chats(path, count, words=6):
    text = tokenizer_files.WORDS
    path.write_text("".join(json.dumps({"messages": [
        {"role": "user", "content": f"{i} " + " ".join(text[(i + j) % 11] for j in range(i % words))},
        {"role": "assistant", "content": text[i % 7]}]}) + "\n" for i in range(count)))


class KeptTokens(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.root = pathlib.Path(self.folder.name)
        tokenizer = tokenizer_files.make_chat_tokenizer(self.root / "model", "qwen2.5")
        torch.manual_seed(3)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=192)).save_pretrained(self.root / "model")
        write_chats(self.root / "chats.jsonl", 200)

    def train(self, *words, ranks=0, batch=4, code=0, run="run"):
        start = [sys.executable, START_RANKS, ranks] if ranks else []
        return small_runs.run([*start, FSDP, "train", "--model", "model", "--data", "chats.jsonl", "--batch", batch,
                               "--schedule", "constant", "--checkpoint-dir", run, "--sample", "", *words], self.root, code=code, timeout=300,
                              FSDP_PYTHON=sys.executable)

    def kept(self, run="run"):
        return {path.name: path.stat().st_mtime_ns for path in (self.root / run / "tokens").iterdir()}

    def losses(self, run="run"):
        return list(small_runs.losses(self.root / run / "log.jsonl").values())

    def test_a_run_that_goes_on_takes_its_tokens(self):
        said = self.train("--steps", 2).stdout
        first = self.kept()
        self.assertEqual(sorted(pathlib.Path(name).suffix for name in first), [".json", ".tokens"])
        self.assertTrue(all(name.startswith("chats.jsonl-") for name in first), first)
        self.assertIn("--sequence 64 (of 99 % of the rows), --documents packed, because weights are loaded", said)
        self.train("--steps", 4)
        self.assertEqual(self.kept(), first)
        self.train("--steps", 4, run="straight")
        self.assertEqual(self.losses(), self.losses("straight"))
        # Rows that were odd are told again, though nobody reads them.
        for said in (self.train("--steps", 1, "--sequence", 32, run="short").stderr,
                     self.train("--steps", 2, "--sequence", 32, run="short").stderr):
            self.assertRegex(said, r"rows are longer than --sequence 32 and cut; the longest has \d+ tokens "
                                   r"\(chats.jsonl: line \d+\)")

    def test_damaged_tokens_and_other_files_are_tokenised_again(self):
        self.train("--steps", 1)
        first = self.kept()
        [tokens] = (self.root / "run" / "tokens").glob("*.tokens")
        whole = tokens.read_bytes()
        for broken in (whole[:-2], whole[:200] + bytes([whole[200] ^ 1]) + whole[201:], b""):
            tokens.write_bytes(broken)
            self.train("--steps", 1)
            self.assertEqual(tokens.read_bytes(), whole)
        shutil.copy(tokens, self.root / "mine")
        write_chats(self.root / "chats.jsonl", 180)
        self.train("--steps", 1, "--restart-data")
        self.assertEqual(len(self.kept()), 2)  # the old ones are gone
        self.assertFalse(set(first) & set(self.kept()))
        second = self.kept()
        config = json.loads((self.root / "model" / "tokenizer_config.json").read_text())
        config["chat_template"] = config["chat_template"].replace("You help.", "You know.")
        (self.root / "model" / "tokenizer_config.json").write_text(json.dumps(config))
        self.train("--steps", 1, "--restart-data")  # with the tokenizer that its checkpoint has
        self.assertEqual(second, self.kept())
        self.train("--steps", 1, "--restart-data", "--tokenizer", "model")
        self.assertFalse(set(second) & set(self.kept()))

    def test_processes_share_them(self):
        self.train("--steps", 2, ranks=3, batch=6, run="three")
        self.assertEqual(len(self.kept("three")), 2)
        self.train("--steps", 2, "--ranks", 3, batch=6, run="threads")
        self.assertEqual(self.losses("three"), self.losses("threads"))
        self.train("--steps", 2, "--ranks", 1, batch=6, run="one")
        for mine, theirs in zip(self.losses("three"), self.losses("one")):  # another order of sums
            self.assertAlmostEqual(mine, theirs, delta=1e-5)

    def test_all_learn_why_the_one_that_tokenises_fails(self):
        with (self.root / "chats.jsonl").open("a") as file:
            file.write("{\n")
        said = self.train("--steps", 1, ranks=2, code=None)
        self.assertNotEqual(said.returncode, 0)
        self.assertIn("chats.jsonl: line 201 is no JSON object", said.stderr)

    def test_nothing_is_kept_where_nothing_is_saved(self):
        small_runs.run([FSDP, "train", "--model", "model", "--data", "chats.jsonl", "--steps", 1, "--batch", 4, "--no-save",
                        "--sample", ""], self.root, FSDP_PYTHON=sys.executable)
        self.train("--steps", 1, "--check")
        self.assertEqual([path.name for path in self.root.iterdir() if "tokens" in path.name or path.name == "run"], [])

    def test_a_long_tokenising_is_seen_unless_quiet(self):
        write_chats(self.root / "chats.jsonl", 15000, words=60)
        lines = [line for line in self.train("--steps", 1).stderr.splitlines() if line.startswith("tokenising")]
        for line in lines:  # none on a machine that takes no second
            self.assertTrue(re.fullmatch(r"tokenising chats\.jsonl: \d+\.\d of \d+\.\d MB, \d+\.\d MB/s", line), line)
        self.assertNotIn("tokenising", self.train("--steps", 1, "--quiet", run="quiet").stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
