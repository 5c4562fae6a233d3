#!/usr/bin/env python3
"""A run's patches bring exported weights to the weights of its last checkpoint; everything that does not fit is one sentence.

    patch_runs_test.py FSDP
"""

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

import small_runs

FSDP = sys.argv[1]
TRAINING = [FSDP, "train", "--model", "model/config.json", "--data", "text.txt", "--sequence", "16", "--batch", "6", "--quiet",
            "--sample", "", "--validate-every", "0", "--ranks", "2", "--patches", "patches", "--checkpoint-dir", "run",
            "--checkpoint-every", "2", "--keep-last", "0"]


def fsdp(root, *words):
    return subprocess.run([FSDP, *map(str, words)], cwd=root, check=True, capture_output=True, text=True).stdout


def refused(root, *words):
    done = subprocess.run([FSDP, *map(str, words)], cwd=root, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done
    return done.stderr


def check_weights(root):
    """Weights of step 2 become those of step 5, byte by byte."""
    fsdp(root, "convert", "run/step-00000002", "weights", "--to", "hf")
    fsdp(root, "convert", "run/step-00000005", "expected", "--to", "hf")
    assert (root / "weights/model.safetensors").read_bytes() != (root / "expected/model.safetensors").read_bytes()
    shown = fsdp(root, "patch", "apply", "weights", "patches")
    assert shown.endswith("weights has the weights of step 5\n"), shown
    assert (root / "weights/model.safetensors").read_bytes() == (root / "expected/model.safetensors").read_bytes()
    assert json.loads((root / "weights/patches-applied.json").read_text())["step"] == 5
    assert fsdp(root, "patch", "apply", "weights", "patches") == "weights has the weights of step 5\n"


def check_words(root):
    names = sorted(path.name for path in (root / "patches").iterdir())
    assert names == ["patch-00000000-00000002", "patch-00000002-00000004", "patch-00000004-00000005", "patch-full-00000000"], names
    assert "everything of step 0 of base" in fsdp(root, "patch", "show", "patches")
    assert "model.embed_tokens.weight fp32" in fsdp(root, "patch", "show", "--tensors", "patches/patch-00000002-00000004")
    assert fsdp(root, "patch", "verify", "patches").count("as written") == 4


def check_refusals(root):
    fsdp(root, "convert", "run/step-00000002", "again", "--to", "hf")
    gap = "patches/patch-00000002-00000004"
    assert "no patch was applied yet; begin with a full one" in refused(root, "patch", "apply", "again", gap)
    fsdp(root, "patch", "apply", "again", "patches/patch-full-00000000")
    assert "apply the patches between them first" in refused(root, "patch", "apply", "again", gap)
    assert "is a checkpoint, whose checksums" in refused(root, "patch", "apply", "run/step-00000002", "patches")
    shutil.copytree(root / gap, root / "damaged")
    file = root / "damaged/00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    assert "is not what was written; the patch is damaged" in refused(root, "patch", "verify", "damaged")


def main():
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        small_runs.write_model(root / "model/config.json")
        small_runs.write_text(root / "text.txt")
        small_runs.run([*TRAINING, "--steps", "5", "--patch-every", "2"], cwd=root)
        check_words(root)
        check_weights(root)
        check_refusals(root)
        # Another run begins a stream of its own, which receivers of the first one take up.
        small_runs.run([*TRAINING, "--steps", "7"], cwd=root)
        assert fsdp(root, "patch", "apply", "weights", "patches").endswith("weights has the weights of step 7\n")
        fsdp(root, "convert", "run/step-00000007", "last", "--to", "hf")
        assert (root / "weights/model.safetensors").read_bytes() == (root / "last/model.safetensors").read_bytes()


main()
