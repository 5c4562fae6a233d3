"""Weights that a receiver has after the patches of `fsdp train` are those of its full exports; and the example that serves.

Usage: served_weights_test.py FSDP REPOSITORY
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

try:
    import torch
except ImportError:
    print("skipped: needs Python's torch")
    sys.exit(0)

import small_runs

FSDP, REPOSITORY = sys.argv[1], pathlib.Path(sys.argv[2])
sys.path.insert(0, str(REPOSITORY / "python"))
from fsdp_receiver import Patch, Receiver  # noqa: E402

MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
RUNS = [
    (1, ["--compute", "fp32"], {}),
    (2, ["--compute", "bf16", "--strategy", "optim"], {"tie_word_embeddings": True}),
    (3, ["--compute", "bf16", "--strategy", "optim_grads_params", "--lr", "1e-5"], {}),
    (4, ["--compute", "bf16", "--outer", "2", "--strategy", "optim_grads_params+hfsdp", "--main-storage", "separate"], {}),
    (2, ["--compute", "fp32", "--tp", "2"], {}),
    (2, ["--compute", "bf16", "--ep", "2"], MIXTRAL)]


class ServedWeights(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)

    def test_are_those_of_full_exports_after_every_patch(self):
        for ranks, options, fields in RUNS:
            with self.subTest(ranks=ranks, options=options):
                self.setUp()
                self.check_run(ranks, options, fields)

    def check_run(self, ranks, options, fields):
        small_runs.write_text(self.root / "text.txt")
        small_runs.write_model(self.root / "config.json", num_key_value_heads=2, **fields)
        small_runs.run([FSDP, "train", "--model", "config.json", "--data", "text.txt", "--sequence", "16", "--batch", "12", "--steps", "6",
                        "--ranks", str(ranks), "--validate-every", "0", "--sample", "", "--quiet", "--patches", "patches", "--patch-every", "2",
                        "--export-dir", "weights", "--export-every", "2", *options], cwd=self.root)
        patches = sorted((self.root / "patches").glob("patch-*"), key=lambda path: int(path.name[-8:]))
        self.assertEqual([path.name for path in patches], ["patch-full-00000000", "patch-00000000-00000002", "patch-00000002-00000004",
                                                           "patch-00000004-00000006"])
        target = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in Patch(patches[0]).tensors.items()}
        receiver = Receiver(target)
        for path in patches:
            receiver.apply(path)
            if receiver.step > 0:
                exported = small_runs.stored_tensors((self.root / f"weights/step-{receiver.step:08}/model.safetensors").read_bytes())
                self.assertEqual(exported.keys(), target.keys())
                for name, (_, shape, content) in exported.items():
                    self.assertEqual(list(target[name].shape), shape, name)
                    self.assertEqual(bytes(target[name].flatten().view(torch.uint8).tolist()), content, f"{name} of step {receiver.step}")

    def test_the_example_serves_what_the_training_has_learnt(self):
        try:
            import transformers  # noqa: F401
        except ImportError:
            self.skipTest("needs transformers")
        environment = small_runs.environment(FSDP=FSDP, PYTHON=sys.executable)
        done = subprocess.run([REPOSITORY / "examples/weights_out/run.sh", self.root / "run"], env=environment, capture_output=True, text=True,
                              timeout=280)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        served = re.findall(r"^step (\d+): [\d,]+ weights\n    (.*)$", done.stdout, re.MULTILINE)
        self.assertEqual(served[-1][0], "200")
        self.assertGreater(len({text for _, text in served}), 1, done.stdout)
        self.assertIn("A serving process beside a training", served[-1][1])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    unittest.main(argv=sys.argv[:1])
