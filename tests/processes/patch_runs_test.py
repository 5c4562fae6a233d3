#!/usr/bin/env python3
"""A run's patches bring exported weights to the weights of its last checkpoint; everything that does not fit is one sentence.

    patch_runs_test.py FSDP
"""

import json
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import tempfile

import patch_cases
import small_runs

FSDP = sys.argv[1]
TRAINING = [FSDP, "train", "--model", "model/config.json", "--data", "text.txt", "--sequence", "16", "--batch", "6", "--quiet",
            "--sample", "", "--validate-every", "0", "--ranks", "2", "--patches", "patches", "--checkpoint-dir", "run",
            "--checkpoint-every", "2", "--keep-last", "0"]


def fsdp(root, *words):
    return small_runs.run([FSDP, *words], root).stdout


def refused(root, *words):
    done = small_runs.run([FSDP, *words], root, code=1)
    assert done.stderr.count("\n") == 1, done
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


def check_the_table_of_patches(root):
    cases = list(patch_cases.write_all(root / "cases"))
    done = small_runs.run([FSDP, "patch", "verify", *(path for _, path, _ in cases)], root, code=None)
    lines = done.stdout.splitlines()
    assert len(lines) == len(cases), done
    for line, (name, path, fits) in zip(lines, cases):
        assert str(path.parent if name == "a file outside of the patch" else path) in line and line.startswith("WRONG ") != fits, (name, line)
    num_wrong = sum(not fits for _, _, fits in cases)
    assert done.returncode == 1 and f"{num_wrong} of {len(cases)} patches are damaged" in done.stderr, done


def check_a_run_that_goes_back(root):
    """Its patches take the place of those of the run before, in the same directory."""
    options = ["back" if word == "run" else word for word in TRAINING] + ["--resume", "run/step-00000004"]
    before = {path.name: path.joinpath("patch.json").read_text() for path in (root / "patches").iterdir()}
    (root / "patches/.patch-00000004-00000006.0123.tmp").mkdir()
    small_runs.run([*options, "--steps", "5", "--patch-every", "2"], cwd=root)
    after = {path.name: path.joinpath("patch.json").read_text() for path in (root / "patches").iterdir()}
    assert after.keys() == before.keys() | {"patch-full-00000004"}, after.keys()
    assert [name for name in before if before[name] != after[name]] == ["patch-00000004-00000005"]
    assert fsdp(root, "patch", "verify", "patches").count("as written") == 5


def check_a_full_disk(root):
    """Neither patches nor exports end a training; the last export is missed."""
    def little_room():  # a file of more bytes cannot be written
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    command = [*TRAINING[:TRAINING.index("--patches")], "--steps", "3", "--no-save", "--log", "none", "--report", "none"]
    (root / "exports/.step-00000001.tmp").mkdir(parents=True)
    for options, code in ((["--patches", "small"], 0), (["--export-dir", "exports", "--export-every", "1"], 1)):
        done = subprocess.run([*command, *options], cwd=root, env=small_runs.environment(), preexec_fn=little_room, restore_signals=False,
                              capture_output=True, text=True)
        assert done.returncode == code, done
        assert done.stderr.count("the patch of step 3 was not written, and the next one is full: ") == 2 * (code == 0), done.stderr
        assert done.stderr.count("the weights of step 1 were not exported: ") == code, done.stderr  # by rank 0, which writes
    assert not any((root / "small").glob("patch-*")) and list((root / "exports").iterdir()) == [], list((root / "exports").iterdir())
    small_runs.run([*command, "--patches", "small", "--keep-patches", "1"], cwd=root)
    names = sorted(path.name for path in (root / "small").iterdir())
    assert names == ["patch-00000002-00000003", "patch-full-00000002", "patch-full-00000003"], names


def main():
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        small_runs.write_model(root / "model/config.json")
        small_runs.write_text(root / "text.txt")
        small_runs.run([*TRAINING, "--steps", "5", "--patch-every", "2"], cwd=root)
        check_words(root)
        check_weights(root)
        check_refusals(root)
        check_the_table_of_patches(root)
        check_a_run_that_goes_back(root)
        check_a_full_disk(root)
        # Another run begins a stream of its own, which receivers of the first one take up.
        small_runs.run([*TRAINING, "--steps", "7"], cwd=root)
        assert fsdp(root, "patch", "apply", "weights", "patches").endswith("weights has the weights of step 7\n")
        fsdp(root, "convert", "run/step-00000007", "last", "--to", "hf")
        assert (root / "weights/model.safetensors").read_bytes() == (root / "last/model.safetensors").read_bytes()


main()
