"""Checks what `fsdp train` and `eval` make of their data: loss masks, separate documents, sources with weights, epochs.

Usage: train_data_test.py FSDP
"""

import json
import math
import pathlib
import struct
import sys
import tempfile
import unittest

import small_runs

FSDP = sys.argv[1]
STEPS = 6
SEQUENCE, BATCH = 16, 8
# Ranks and microbatches add the same gradients in another order; see train_runs_test.py. Six steps of a hybrid with tp 2 grow that to 1.5e-5 of
# the loss on x86_64.
ORDER = 3e-5


def write_masked(path, tokens, learnt):
    """A token file of bytes with a loss mask, as docs/data.md describes it."""
    stored = b"".join(struct.pack("<H", token if is_learnt else token | 0x8000) for token, is_learnt in zip(tokens, learnt))
    header = b"fsdptok\n" + struct.pack("<IIqqqq", 2, 2, 257, len(tokens), tokens.count(256), 256)
    header += b"bytes".ljust(64, b"\0") + struct.pack("<Iq", small_runs.crc32c(stored), sum(learnt))
    path.write_bytes(header + struct.pack("<I", small_runs.crc32c(header)) + stored)


class Data(unittest.TestCase):
    """A directory with the small model and its text."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        small_runs.write_model(self.root / "model" / "config.json", num_key_value_heads=2)
        small_runs.write_text(self.root / "text.txt")

    def fsdp(self, *arguments, code=0):
        return small_runs.run([FSDP, *map(str, arguments)], cwd=self.root, code=code)

    def train(self, name, *options, steps=STEPS):
        """Losses by step; the run's log is NAME.jsonl."""
        more = [] if steps is None else ["--steps", steps]
        for option, value in (("--validate-every", 0), ("--model", "model")):
            if option not in options:
                more += [option, value]
        self.fsdp("train", *small_runs.SHAPE, *more, "--sample", "", "--quiet", "--schedule",
                  "constant", "--warmup", "0", "--log", f"{name}.jsonl", *options)
        return small_runs.losses(self.root / f"{name}.jsonl")

    def assert_near(self, losses, expected):
        self.assertEqual(losses.keys(), expected.keys())
        for step, loss in losses.items():
            self.assertLess(abs(loss - expected[step]), ORDER * expected[step], f"step {step}")


class LossMasks(Data):
    def setUp(self):
        super().setUp()
        self.tokens = [*(self.root / "text.txt").read_bytes(), 256]
        # Stretches that are learnt and others that are not, of lengths that give windows from none to all of their
        # targets: microbatches and ranks have unlike numbers of them.
        self.learnt = [place // 37 % 3 == 0 or place % 11 == 0 for place in range(len(self.tokens))]
        for begin in range(0, len(self.learnt), 200):
            self.learnt[begin:begin + 60] = [False] * len(self.learnt[begin:begin + 60])
        write_masked(self.root / "masked.bin", self.tokens, self.learnt)
        write_masked(self.root / "rest.bin", self.tokens, [not each for each in self.learnt])

    def test_a_steps_loss_is_the_mean_over_its_targets_however_they_are_divided(self):
        alone = self.train("alone", "--data", "masked.bin")
        self.assertNotEqual(alone, self.train("plain", "--data", "text.txt"))
        for name, options in {
                "microbatches": ["--microbatches", 4], "ranks": ["--ranks", 4],
                "both": ["--ranks", 2, "--microbatches", 4], "tp": ["--ranks", 4, "--tp", 2, "--microbatches", 2],
        }.items():
            with self.subTest(name):
                self.assert_near(self.train(name, "--data", "masked.bin", *options), alone)

    def test_data_without_any_target_are_refused(self):
        write_masked(self.root / "none.bin", self.tokens, [False] * len(self.tokens))
        for options, words in ((["--data", "none.bin"], "not one token to learn (its loss mask leaves out all)"),
                               (["--data", "text.txt", "--validation-data", "none.bin"], "not one token to learn"),
                               (["--data", "none.bin", "--steps", 1, "--check"], "not one token to learn")):
            done = self.fsdp("train", "--model", "model", *small_runs.SHAPE, *options, code=2)
            self.assertIn(words, done.stderr)
            self.assertEqual(done.stdout, "")

    def test_a_step_without_any_target_changes_nothing(self):
        learnt = [place // SEQUENCE % 60 == 0 for place in range(len(self.tokens))]  # in one of thirty windows
        write_masked(self.root / "rare.bin", self.tokens, learnt)
        skipped = {}
        for name, options in (("alone", []), ("two", ["--ranks", 2, "--microbatches", 2])):
            losses = self.train(name, "--data", "rare.bin", "--checkpoint-dir", name, "--checkpoint-every", 1, "--keep-last", 0, *options)
            skipped[name] = [record.get("skipped", False) for record in small_runs.log_records(self.root / f"{name}.jsonl", "step")]
            self.assertEqual([loss is None for loss in losses.values()], skipped[name])
            weights = [b"".join(path.read_bytes() for path in sorted((self.root / name / f"step-0000000{step}/model").iterdir()))
                       for step in range(1, STEPS + 1)]
            self.assertEqual([now == before for before, now in zip(weights, weights[1:])], skipped[name][1:])
        self.assertEqual(set(skipped["alone"][1:]), {True, False})
        self.assertEqual(skipped["two"], skipped["alone"])

    def test_windows_without_any_target_are_refused_or_told(self):
        end = [place > len(self.tokens) - 20 for place in range(len(self.tokens))]
        write_masked(self.root / "end.bin", self.tokens, end)  # what is kept for validation
        done = self.fsdp("train", "--model", "model", *small_runs.SHAPE, "--data", "end.bin", code=2)
        self.assertEqual(done.stderr, "fsdp: no window of --sequence 16 has a token to learn: rows are cut before their answers begin; "
                                      "raise --sequence.\n")
        write_masked(self.root / "begin.bin", self.tokens, [place < 2000 for place in range(len(self.tokens))])
        done = self.fsdp("train", "--model", "model", *small_runs.SHAPE, "--data", "begin.bin", "--steps", 2, "--validate-every", 1,
                         "--sample", "", "--quiet")
        self.assertIn("warning: there will be no validation loss: no window of the validation data has a token to learn", done.stderr)

    def test_rows_that_are_cut_are_told_once(self):
        rows = [{"prompt": "a prompt", "completion": " and what follows, which is longer than a window"}] * 40
        (self.root / "rows.json").write_text(json.dumps(rows))
        done = self.fsdp("train", "--model", "model", *small_runs.SHAPE, "--data", "rows.json", "--steps", 1, "--sample", "", "--quiet")
        self.assertEqual(done.stderr.splitlines(), [
            "warning: 40 rows are longer than --sequence 16 and cut; the longest has 57 tokens (rows.json: row 1)"])

    def test_eval_counts_what_is_learnt(self):
        self.train("run", "--data", "masked.bin", "--checkpoint-dir", "run", "--validation-data", "masked.bin",
                   "--validate-every", STEPS, "--validation-batches", 1000)
        results = {}
        for data in ("text.txt", "masked.bin", "rest.bin"):
            done = self.fsdp("eval", "--checkpoint", "run", "--data", data, "--batch", BATCH, "--json")
            results[data] = json.loads(done.stdout)
        windows = (len(self.tokens) - 1) // SEQUENCE // BATCH * BATCH
        learnt = sum(self.learnt[1:windows * SEQUENCE + 1])
        self.assertEqual(results["masked.bin"]["tokens"], learnt)
        self.assertEqual(results["rest.bin"]["tokens"], windows * SEQUENCE - learnt)
        # Each target is in one of the two.
        total = sum(results[data]["loss"] * results[data]["tokens"] for data in ("masked.bin", "rest.bin"))
        whole = results["text.txt"]
        self.assertAlmostEqual(total / (whole["loss"] * whole["tokens"]), 1, delta=1e-6)
        # Validation is the same figure.
        logged = small_runs.log_records(self.root / "run.jsonl", "validation")[-1]
        self.assertAlmostEqual(logged["loss"], results["masked.bin"]["loss"], delta=1e-12)
        self.assertEqual(logged["tokens"], learnt)

    def test_info_verifies_and_counts_them(self):
        shown = json.loads(self.fsdp("data", "info", "masked.bin", "--verify", "--json").stdout)
        self.assertEqual(shown["learnt"], sum(self.learnt))
        self.assertRegex(self.fsdp("data", "info", "masked.bin").stdout, r"learnt +[\d,]+ of the tokens \(loss mask\)")


class Damage(Data):
    def flip(self, name, place):
        """Changes a token of bytes into another one of the vocabulary."""
        with open(self.root / name, "r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1]))

    def refused(self, name, *options):
        done = self.fsdp("train", "--model", "model", *small_runs.SHAPE, "--sample", "", "--quiet", "--log",
                         f"{name}.jsonl", "--checkpoint-dir", name, *options, code=1)
        self.assertRegex(done.stderr, r"\.bin: its tokens are damaged \(the checksum differs\); use another copy")

    def test_a_run_goes_on_with_no_flipped_bit(self):
        self.fsdp("data", "pack", "text.txt", "--output", "text.bin")
        self.train("run", "--data", "text.bin", "--checkpoint-dir", "run")
        self.flip("text.bin", 1000)
        self.refused("run", "--data", "text.bin", "--steps", STEPS + 2)
        self.refused("new", "--data", "text.txt", "--validation-data", "text.bin", "--steps", 2)
        self.assertFalse((self.root / "new").exists())

    @small_runs.more
    def test_a_large_file_is_verified_before_anything_is_published(self):
        small_runs.write_text(self.root / "line.txt", copies=1)
        (self.root / "large.txt").write_text((self.root / "line.txt").read_text() * 560_000)
        self.fsdp("data", "pack", "large.txt", "--output", "large.bin")
        size = (self.root / "large.bin").stat().st_size
        self.assertGreater(size, 64 << 20)
        self.flip("large.bin", size - 1000)
        self.refused("run", "--data", "large.bin", "--steps", 2, "--checkpoint-every", 1, "--validate-every", 0,
                     "--ranks", 2)
        self.assertEqual([path.name for path in (self.root / "run").iterdir() if path.is_dir()], [])


class Documents(Data):
    def setUp(self):
        super().setUp()
        # Documents of 1 to 40 bytes: several in a window, and some of more than one.
        (self.root / "notes").mkdir()
        text = (self.root / "text.txt").read_text()
        begin, number = 0, 0
        while begin < len(text):
            length = number * 13 % 40 + 1
            (self.root / "notes" / f"{number:04}.txt").write_text(text[begin:begin + length])
            begin, number = begin + length, number + 1
        small_runs.write_model(self.root / "predicting" / "config.json", num_key_value_heads=2, num_nextn_predict_layers=1)

    @small_runs.more
    def test_separate_documents_learn_the_same_however_they_are_divided(self):
        joined = self.train("joined", "--data", "notes", "--documents", "joined")
        self.assertEqual(joined, self.train("auto", "--data", "notes"))
        for model in ("model", "predicting", "hybrid-tiny"):
            words = ["--data", "notes", "--documents", "separate", "--model", model]
            alone = self.train(f"{model}-alone", *words)
            if model == "model":
                self.assertNotEqual(alone, joined)
            self.assertEqual(self.train(f"{model}-again", *words, "--recompute", "block"), alone)
            divisions = {"tp": ["--ranks", 2, "--tp", 2]}
            # Predictions of later tokens have other numbers of targets, but the shares of the first ones.
            if model != "predicting":
                divisions |= {"microbatches": ["--microbatches", 4], "ranks": ["--ranks", 2, "--microbatches", 2]}
            for name, options in divisions.items():
                with self.subTest(f"{model} {name}"):
                    self.assert_near(self.train(f"{model}-{name}", *words, *options), alone)

    def test_rows_with_loss_masks_are_separate_documents(self):
        tokens = [token for number in range(150) for token in (*f"{number} is".encode(), *f" {number * 7}.".encode(), 256)]
        write_masked(self.root / "rows.bin", tokens, [token != 32 for token in tokens])
        auto = self.train("auto", "--data", "rows.bin")
        self.assertEqual(self.train("separate", "--data", "rows.bin", "--documents", "separate"), auto)
        self.assertNotEqual(self.train("joined", "--data", "rows.bin", "--documents", "joined"), auto)

    def test_eval_takes_the_words_of_training(self):
        self.train("run", "--data", "notes", "--checkpoint-dir", "run", "--documents", "separate", "--validation-data",
                   "notes", "--validate-every", STEPS, "--validation-batches", 1000)
        logged = small_runs.log_records(self.root / "run.jsonl", "validation")[-1]
        found = {}
        for documents in ("auto", "joined", "separate"):
            done = self.fsdp("eval", "--checkpoint", "run", "--data", "notes", "--batch", BATCH, "--json", "--documents", documents)
            found[documents] = json.loads(done.stdout)
        self.assertEqual(found["auto"], found["joined"])
        self.assertAlmostEqual(found["separate"]["loss"], logged["loss"], delta=1e-12)
        self.assertEqual(found["separate"]["tokens"], logged["tokens"])
        self.assertLess(found["separate"]["tokens"], found["joined"]["tokens"])


class Sources(Data):
    """Windows that are drawn from several paths, by weights and for some epochs."""

    def setUp(self):
        super().setUp()
        small_runs.write_text(self.root / "more.txt", copies=20)
        self.words = ["--data", "text.txt", "more.txt", "--data-weights", "0.25", "0.75"]

    def test_a_mix_is_the_same_run_on_any_ranks_and_after_any_stop(self):
        whole = self.train("whole", *self.words, steps=8)
        self.assertNotEqual(whole, self.train("plain", *self.words[:3], steps=8))
        self.assertNotEqual(whole, self.train("other", *self.words[:-2], "0.5", "0.5", steps=8))
        self.assert_near(self.train("ranks", *self.words, "--ranks", 2, "--microbatches", 2, steps=8), whole)
        begun = self.train("run", *self.words, "--checkpoint-dir", "run", steps=5)
        self.assertEqual({**begun, **self.train("run", *self.words, "--checkpoint-dir", "run", steps=8)}, whole)

    def test_the_end_tells_how_often_each_was_gone_through(self):
        done = self.fsdp("train", "--model", "model", *self.words, *small_runs.SHAPE, "--steps", 4, "--sample", "",
                         "--validation-fraction", 0, "--validate-every", 0)
        # 32 windows: 8 of the first text, 24 of the second.
        sizes = [(len((self.root / name).read_bytes()) + 1 - 1) // SEQUENCE for name in ("text.txt", "more.txt")]
        epochs = [f"{number / size:.3f}".rstrip("0") for number, size in zip((8, 24), sizes)]
        self.assertIn(f"epochs of the data: text.txt {epochs[0]}, more.txt {epochs[1]}", done.stdout)

    def test_another_mix_does_not_go_on(self):
        self.train("run", *self.words, "--checkpoint-dir", "run")
        for words in (self.words[:3], [*self.words[:-2], "0.5", "0.5"]):
            done = self.fsdp("train", "--model", "model", *words, *small_runs.SHAPE, "--steps", 8, "--sample", "",
                             "--checkpoint-dir", "run", code=2)
            self.assertRegex(done.stderr, "the mix of the data was 2500 of .*--data-weights|number of training windows")

    @small_runs.more
    def test_epochs_are_as_many_steps_as_their_windows_take(self):
        windows = (self.root / "text.txt").stat().st_size // SEQUENCE
        for epochs in (1, 0.25, 1.5):
            words = ["--data", "text.txt", "--validation-fraction", 0]
            losses = self.train(f"{epochs}", *words, "--epochs", epochs, steps=None)
            steps = math.ceil(epochs * windows / BATCH)
            self.assertEqual(self.train(f"{epochs} as steps", *words, steps=steps), losses)


if __name__ == "__main__":
    small_runs.main()
