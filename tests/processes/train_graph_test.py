"""`fsdp train --cuda-graph`: the losses, validations and weights of the same command without it.

Usage: train_graph_test.py FSDP       skipped without a GPU
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

import small_runs

FSDP = sys.argv[1]


class Graphs(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        small_runs.write_model(self.root / "model" / "config.json", hidden_size=64, num_attention_heads=4)
        small_runs.write_text(self.root / "text.txt", copies=200)

    def train(self, name, *options, steps=16, code=0):
        """Losses by step and validations; checkpoints are in NAME."""
        done = small_runs.run([FSDP, "train", "--model", "model/config.json", "--data", "text.txt", *small_runs.SHAPE, "--steps",
                               str(steps), "--schedule", "constant", "--warmup", "2", "--sample", "", "--validate-every", "3",
                               "--validation-batches", "2", "--deterministic", "--checkpoint-dir", name, "--report", "none",
                               *options], cwd=self.root, code=code)
        if code:
            return done.stderr
        log = self.root / name / "log.jsonl"
        return small_runs.losses(log), [each["loss"] for each in small_runs.log_records(log, "validation")]

    def weights(self, name, step):
        last = self.root / name / f"step-{step:08}"
        found = {str(path.relative_to(last)): path.read_bytes() for path in last.rglob("*.safetensors")}
        self.assertTrue(found)
        return found

    def test_trains_validates_saves_and_resumes_with_the_same_bits(self):
        for options in ((), ("--microbatches", "2", "--main-grads", "fp32", "--grad-comm", "bf16"), ("--moments", "bf16")):
            with self.subTest(options):
                name = "run" + "".join(options)
                expected = self.train(f"{name}-eager", *options)
                self.assertEqual(len(expected[0]), 16)
                self.assertGreaterEqual(len(expected[1]), 5)
                self.assertEqual(self.train(f"{name}-graph", "--cuda-graph", *options), expected)
                self.train(f"{name}-resumed", "--cuda-graph", *options, steps=7)  # in the middle of replays
                self.assertEqual(self.train(f"{name}-resumed", "--cuda-graph", *options)[0], expected[0])
                for other in ("graph", "resumed"):
                    self.assertEqual(self.weights(f"{name}-{other}", 16), self.weights(f"{name}-eager", 16), other)

    def test_says_what_cannot_be_recorded(self):
        self.assertIn("offload", self.train("run", "--cuda-graph", "--offload", "0.5", code=2))
        self.assertIn("--ranks is 2", self.train("run", "--cuda-graph", "--ranks", "2", code=2))


if __name__ == "__main__":
    devices = json.loads(subprocess.check_output([FSDP, "info", "--json"]))["devices"]
    if not any(device.startswith("cuda") for device in devices):
        print("skipped: no GPU here")
        sys.exit(0)
    unittest.main(argv=sys.argv[:1])
