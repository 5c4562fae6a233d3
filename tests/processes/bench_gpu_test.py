"""The table of training steps on a GPU, tried on a CPU: bench_gpu_test.py GPU.PY BENCH_GPU"""

import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile

ROWS = ("plain-bf16", "plain-same", "ours", "ours-collectives", "ours-aten", "pytorch-bf16", "fsdp2")


def run(command):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=250)


def all_rows_train_the_same_model(script, program):
    with tempfile.TemporaryDirectory() as folder:
        done = run([sys.executable, script, "--bench", program, "--device", "cpu", "--models", "tiny", "--rows", *ROWS,
                    "--steps", 3, "--warm-up", 1, "--rounds", 1, "--lr", 3e-4, "--host-turns", 2, "--profile",
                    "--out", folder, "--verbose"])
        assert done.returncode == 0, done.stdout + done.stderr
        (results,) = pathlib.Path(folder).glob("*-gpu.json")
        (page,) = pathlib.Path(folder).glob("*-gpu.md")
        report, page = json.loads(results.read_text()), page.read_text()
    rows = report["results"]["tiny"]
    for name in ROWS:
        assert "error" not in rows[name], f"{name}: {rows[name]['error']}"
        assert f"`{name}`" in page, page
    # All rows have the same first values and tokens, in fp32 on CPUs: sums in another order are what is left.
    first = rows["plain-same"]["losses"][0]
    for name in ROWS:
        losses = rows[name]["losses"]
        assert abs(losses[0] - first) < 1e-4, f"{name} begins with the loss {losses[0]}, plain-same with {first}"
        assert losses[-1] < losses[0] - 0.1, f"{name} does not learn: {losses}"
    for name in ("ours", "ours-collectives"):
        for mine, plain in zip(rows[name]["losses"], rows["plain-same"]["losses"]):
            assert abs(mine - plain) < 1e-3, f"{name}: {rows[name]['losses']}, plain-same: {rows['plain-same']['losses']}"
    for name in ("plain-same", "ours", "ours-collectives"):
        assert len(rows[name]["host_turns_ms"]) == 2, rows[name]
    goals = {goal["goal"]: goal["met"] for goal in report["goals"]["tiny"]}
    assert goals["ours: loss of plain-same within 1%"] is True, goals
    assert goals["ours-graph <= 1.02 x plain-same-graph"] is None, goals


def says_when_there_is_no_gpu(script, program):
    import torch

    if torch.cuda.is_available():
        return
    for command in ([sys.executable, script, "--bench", program], [program]):
        done = run(command)
        assert done.returncode == 1 and "no GPU" in done.stderr and "Traceback" not in done.stderr, done.stderr
    done = run([program, "--device", "cpu", "--model", "tiny", "--rows", "our"])
    assert done.returncode == 1 and "--rows has 'our'; there are plain-bf16, " in done.stderr, done.stderr


def main():
    if importlib.util.find_spec("torch") is None:
        print("skipped: this Python has no PyTorch")
        return
    script, program = map(pathlib.Path, sys.argv[1:])
    says_when_there_is_no_gpu(script, program)
    all_rows_train_the_same_model(script, program)


if __name__ == "__main__":
    main()
