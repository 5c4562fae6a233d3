"""Weights that `fsdp train --export-dir` writes beside the training are those that `fsdp convert` makes of a checkpoint.

Usage: train_export_test.py FSDP
"""

import pathlib
import sys
import tempfile
import unittest

import small_runs

FSDP = sys.argv[1]
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


class Exports(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        small_runs.write_text(self.root / "text.txt")

    def fsdp(self, *arguments, code=0):
        return small_runs.run([FSDP, *map(str, arguments)], cwd=self.root, code=code)

    def train(self, *options, steps=4, code=0, **fields):
        small_runs.write_model(self.root / "model" / "config.json", num_key_value_heads=2, **fields)
        return self.fsdp("train", "--sequence", 16, "--batch", 12, "--model", "model/config.json", "--data", "text.txt", "--steps", steps,
                         "--validate-every", 0, "--sample", "", "--checkpoint-dir", "run", "--checkpoint-every", 2, "--export-dir",
                         "weights", *options, code=code)

    def files(self, *place):
        return {path.name: path.read_bytes() for path in self.root.joinpath(*place).iterdir()}

    def assert_like_converted(self, step, in_order=True):
        name = f"step-{step:08}"
        self.fsdp("convert", f"run/{name}", f"converted/{name}", "--to", "hf")
        converted, exported = self.files("converted", name), self.files("weights", name)
        self.assertEqual(converted.keys(), exported.keys())
        for file, content in converted.items():
            if in_order or file == "config.json":
                self.assertTrue(content == exported[file], file)
            else:
                self.assertEqual(small_runs.stored_tensors(content), small_runs.stored_tensors(exported[file]))

    def exported_steps(self):
        return sorted(path.name for path in (self.root / "weights").iterdir())

    def test_every_export_is_the_converted_checkpoint(self):
        for number, (ranks, options, fields) in enumerate([
                (1, [], {}),
                (3, ["--strategy", "optim_grads_params", "--write-chunk", "1000"], {"tie_word_embeddings": True}),
                (4, ["--outer", "2", "--strategy", "optim_grads_params+hfsdp"], {}),
                (2, ["--tp", "2"], {}),
                (2, ["--ep", "2"], MIXTRAL),
                (4, ["--ep", "2", "--tp", "2"], MIXTRAL)]):
            with self.subTest(ranks=ranks, options=options):
                self.setUp()
                self.train("--ranks", ranks, "--export-every", 2, *options, **fields)
                self.assertEqual(self.exported_steps(), ["step-00000002", "step-00000004"])
                for step in (2, 4):
                    # Ranks of a tp group group the tensors of a unit in their own way.
                    self.assert_like_converted(step, in_order="--tp" not in options)

    def test_the_end_has_an_export_and_a_resumed_run_replaces_them(self):
        shown = self.train("--export-every", 3)
        self.assertIn("weights of step 4: weights/step-00000004, ", shown.stdout)
        self.assertEqual(self.exported_steps(), ["step-00000003", "step-00000004"])
        self.train(steps=6)
        self.assertEqual(self.exported_steps(), ["step-00000003", "step-00000004", "step-00000006"])
        self.assert_like_converted(6)
        self.train(steps=6)
        self.assert_like_converted(4)

    def test_what_is_generated_with_an_export_is_what_the_run_generates(self):
        self.train()
        words = ["--prompt", "Line ", "--temperature", "0", "--tokens", "8"]
        self.assertEqual(self.fsdp("generate", "--checkpoint", "weights/step-00000004", *words).stdout,
                         self.fsdp("generate", "--checkpoint", "run", *words).stdout)

    def test_refuses_to_export_nowhere(self):
        small_runs.write_model(self.root / "model" / "config.json")
        wrong = self.fsdp("train", *small_runs.SHAPE, "--model", "model/config.json", "--data", "text.txt", "--export-every", 5, code=2)
        self.assertIn("--export-every is 5, but there is no --export-dir to write to; give one", wrong.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
