"""The examples of docs/integrations.md run as they are shown: on one rank, then on two, which go on."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(int(os.environ.get("WORLD_SIZE", "1")) > 1, reason="starts ranks itself")
EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples" / "python_integrations"
LAUNCHER = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}  # of these tests themselves


def output_of(ranks, folder, name, *arguments):
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER}
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    job = subprocess.run([sys.executable, *launcher, EXAMPLES / name, *arguments], cwd=folder, text=True, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, timeout=200,
                         env={**environment, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    assert job.returncode == 0, job.stdout
    return job.stdout


def numbers(pattern, text):
    return [float(number) for number in re.findall(pattern, text)]


def test_the_loop_of_accelerate_goes_on_on_two_ranks(tmp_path):
    pytest.importorskip("accelerate")
    first, second = (output_of(ranks, tmp_path, "accelerate_loop.py", "run") for ranks in (1, 2))
    before, after = (numbers(r"loss ([\d.]+)", text) for text in (first, second))
    assert len(before) == len(after) == 3 and before[-1] < 0.7 * before[0], first
    assert "goes on from run" in second and "goes on" not in first and after[0] < 1.2 * before[-1], second


def test_the_trainer_goes_on_on_two_ranks(tmp_path):
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    first, second = (output_of(ranks, tmp_path, "trainer.py", "run", "--steps", str(30 * ranks)) for ranks in (1, 2))
    before, after = (numbers(r"'eval_loss': '?([\d.]+)", text) for text in (first, second))
    assert len(before) == len(after) == 3 and before[-1] < 0.5 * before[0] and after[0] < before[-1], first + second
    assert all("after 3, 4, 5 comes [6, 7, 8, 9, 10]" in text for text in (first, second)), first + second


def test_the_average_is_better_than_the_last_weights(tmp_path):
    for ranks in (1, 2):
        text = output_of(ranks, tmp_path, "ema.py", "average")
        last, averaged, loaded = numbers(r"(?:loss|averaged|loaded) ([\d.]+)", text)
        assert averaged < last and loaded == averaged, text
