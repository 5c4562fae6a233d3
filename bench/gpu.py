"""The table of training steps on one GPU: ours, the same model unsharded, and the peers, in one run.

Usage: python bench/gpu.py [--bench build/cuda/bin/bench_gpu] [--models llama-1b llama-110m] [--rows ours fsdp2 ...]
                           [--steps 20] [--rounds 2] [--out bench/results]

Every row is a process of its own; rows take turns, and every other round goes through them backwards. Writes
DATE-gpu.json and DATE-gpu.md, with a line for each goal. A row that cannot run is left out with a note. The peers'
megatron-fsdp is found in --peers where it is not installed (gpu_peers.py says how to put it there).
"""

import argparse
import array
import importlib.util
import json
import os
import pathlib
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time

import gpu_profile
import gpu_report

HERE = pathlib.Path(__file__).resolve().parent
OURS = ("plain-bf16", "plain-same", "plain-same-graph", "ours", "ours-graph", "ours-collectives", "plain-same-aten", "ours-aten")
MORE_OURS = ("ours-collectives-graph", "ours-persistent", "ours-offload-50", "ours-offload-100",
             "ours-muon", "ours-muon-graph", "ours-fp8-row", "ours-fp8-row-graph", "ours-fp8-tensor")  # on request
PEERS = ("pytorch-bf16", "fsdp2", "megatron-fsdp", "megatron-fsdp-double-buffer", "fsdp2-compile")
SHAPES = {"llama-1b": (4, 2048, 32000), "llama-110m": (4, 512, 32000), "tiny": (4, 64, 257)}


def stop(sentence):
    sys.exit(f"gpu: {sentence}")


def first_line(command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=HERE)
        return done.stdout.strip().splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return ""


def environment(args):
    """Facts that the figures depend on. Ends the program where nothing can be measured."""
    if importlib.util.find_spec("torch") is None:
        stop(f"{sys.executable} has no PyTorch, which the peers need; run this with a Python that has it")
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        stop("PyTorch sees no GPU here; --device cpu --models tiny tries the program, without figures worth having")
    found = {"date": time.strftime("%Y-%m-%d"), "machine": f"{platform.machine()}, {os.cpu_count()} cores",
             "python": platform.python_version(), "torch": torch.__version__,
             "commit": args.commit or first_line(["git", "rev-parse", "--short", "HEAD"]) or "unknown",
             "command": " ".join(["python", "bench/gpu.py", *sys.argv[1:]])}
    if args.device == "cuda":
        found["gpu"] = first_line(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"])
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    sys.path.append(args.peers)
    if importlib.util.find_spec("megatron_fsdp") is not None:
        text = (pathlib.Path(importlib.util.find_spec("megatron_fsdp").origin).parent / "package_info.py").read_text()
        numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE))
        found["megatron_fsdp"] = ".".join(numbers.get(part, "?") for part in ("MAJOR", "MINOR", "PATCH"))
    return found


def write_tokens(path, model):
    batch, sequence, vocab = SHAPES[model]
    numbers = random.Random(1)
    with open(path, "wb") as file:
        array.array("i", (numbers.randrange(vocab) for _ in range(batch * (sequence + 1)))).tofile(file)


def command_of(args, row, model, folder):
    command = [sys.executable, str(HERE / "gpu_peers.py"), "--row", row, "--peers", args.peers]
    if row in OURS + MORE_OURS:
        command = [args.bench, "--rows", row.removesuffix("-aten")]
    command += ["--model", model, "--device", args.device, "--steps", str(args.steps), "--warm-up", str(args.warm_up),
                "--lr", str(args.lr), "--tokens", f"{folder}/{model}.tokens"]
    return command


def run(args, command, row=""):
    """The figures a process printed, and an error: its last words, if it failed."""
    try:
        # One rank whatever started this script.
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        if row.endswith("-aten"):
            kept["FSDP_LAYERS"] = "aten"  # libtorch's operations instead of our layers' kernels, as the peers compute
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=args.timeout, env=kept)
    except OSError as error:
        return [], str(error)
    except subprocess.TimeoutExpired:
        return [], f"not done after {args.timeout} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and lines:
        return [json.loads(line) for line in lines], ""
    words = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    if args.verbose:
        print("\n".join(words[-30:]), file=sys.stderr)
    errors = [line for line in words if re.match(r"\S*(Error|Exception|bench_gpu)\b.*:", line)]
    return [], (errors or words or ["no words"])[-1].strip()[:300]


def run_row(args, row, model, folder, profiles=False):
    """Figures that the process measured, or {"error": its last words}."""
    figures, error = run(args, command_of(args, row, model, folder) + (["--profile", folder] if profiles else []), row)
    return {"error": error} if error else figures[-1]


def host_turns(args, model, folder):
    """Milliseconds of the host, {row: one for each turn}, of our eager rows by turns in one process."""
    rows = [row for row in ("plain-same", "ours", "ours-collectives") if row in args.rows]
    if len(rows) < 2:
        return {}
    command = [args.bench, "--rows", *rows, "--model", model, "--device", args.device, "--host-turns", str(args.host_turns),
               "--tokens", f"{folder}/{model}.tokens"]
    figures, error = run(args, command)
    words = error or ", ".join(f"{each['row']} {min(each['host_turns_ms']):.1f}" for each in figures)
    print(f"# {model} host ms: {words}", file=sys.stderr, flush=True)
    return {each["row"]: each["host_turns_ms"] for each in figures}


def joined(turns):
    """One row of several rounds."""
    good = [turn for turn in turns if "error" not in turn]
    if not good:
        return turns[-1]
    row = dict(good[-1])
    row["ms"] = statistics.median(turn["ms"] for turn in good)
    for key in ("host_ms", "busy_host_ms"):
        row[key] = min((turn[key] for turn in good if turn[key] is not None), default=None)
    row["round_ms"] = [turn.get("ms") for turn in turns]
    row["round_loss"] = [turn.get("loss") for turn in turns]
    row["peak_mb"] = max(turn["peak_mb"] for turn in good)
    return row


def take_turn(args, turn, row, model, folder):
    """The result of run_row(), with the profile of a last turn."""
    begin = time.time()
    profiled = turn == args.rounds - 1 and row in args.profile
    result = run_row(args, row, model, folder, profiled)
    words = result.get("error") or f"{result['ms']:.2f} ms, {result['peak_mb']:.0f} MB"
    print(f"# {model} {row}: {words} ({time.time() - begin:.0f} s)", file=sys.stderr, flush=True)
    trace = pathlib.Path(folder) / f"{model}-{row}.json"
    if profiled and trace.exists():
        result["profile"] = gpu_profile.summary(trace)
        trace.unlink()
    return result


def measure(args, folder, save):
    """Calls save({model: {row: turns so far}}, hosts) after every turn: a run that is cut short leaves what it had."""
    turns = {model: {row: [] for row in args.rows} for model in args.models}
    hosts = {}
    for model in args.models:
        write_tokens(f"{folder}/{model}.tokens", model)
        hosts[model] = host_turns(args, model, folder)
    for turn in range(args.rounds):
        for model in args.models:
            for row in args.rows if turn % 2 == 0 else args.rows[::-1]:
                if turns[model][row] and "error" in turns[model][row][-1]:
                    continue
                turns[model][row].append(take_turn(args, turn, row, model, folder))
                save(turns, hosts)


def report_of(args, found, turns, hosts):
    results = {model: {row: joined(each) for row, each in rows.items() if each} for model, rows in turns.items()}
    for model, rows in hosts.items():
        for row, milliseconds in rows.items():
            if "ms" in results[model].get(row, {}):
                results[model][row] |= {"host_ms": min(milliseconds), "host_turns_ms": milliseconds}
    profiles = {model: {row: figures.pop("profile") for row, figures in rows.items() if "profile" in figures}
                for model, rows in results.items()}
    return {"environment": found, "shapes": {model: SHAPES[model][:2] for model in args.models}, "rounds": args.rounds,
            "steps": args.steps, "results": results, "goals": gpu_report.goals(results), "profiles": profiles}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bench", default="build/cuda/bin/bench_gpu")
    parser.add_argument("--models", nargs="+", default=["llama-1b", "llama-110m"], choices=SHAPES)
    parser.add_argument("--rows", nargs="+", default=[*OURS, *PEERS], choices=[*OURS, *MORE_OURS, *PEERS], metavar="ROW",
                        help=", ".join((*OURS, *MORE_OURS, *PEERS)))
    parser.add_argument("--steps", type=int, default=20, help="that are timed in each turn; the median counts")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before them")
    parser.add_argument("--lr", type=float, default=3e-5,
                        help="of every row; with 3e-4 llama-1b is too lively for losses to be compared")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each row")
    parser.add_argument("--host-turns", type=int, default=10, help="of our eager rows, in one process, for the host's time")
    parser.add_argument("--profile", nargs="*", default=["plain-same", "ours"], metavar="ROW",
                        help="rows whose last turn ends with a profile")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--peers", default="build/peers", help="a folder with an unpacked megatron-fsdp")
    parser.add_argument("--out", default=str(HERE / "results"), help="where the results go")
    parser.add_argument("--commit", default="", help="what was built, where there is no git")
    parser.add_argument("--timeout", type=int, default=400, help="seconds for one turn of a row")
    parser.add_argument("--verbose", action="store_true", help="show the last words of rows that fail")
    return parser.parse_args()


def main():
    args = arguments()
    args.bench, args.peers = os.path.abspath(args.bench), os.path.abspath(args.peers)
    found = environment(args)
    if not os.path.exists(args.bench) and any(row in OURS + MORE_OURS for row in args.rows):
        stop(f"--bench is '{args.bench}', which is not there; cmake --preset cuda && cmake --build --preset cuda "
             "--target bench_gpu builds it")
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)

    def save(turns, hosts):
        report = report_of(args, found, turns, hosts)
        (out / f"{found['date']}-gpu.json").write_text(json.dumps(report, indent=1) + "\n")
        (out / f"{found['date']}-gpu.md").write_text(gpu_report.page(report))

    with tempfile.TemporaryDirectory() as folder:
        measure(args, folder, save)
    print((out / f"{found['date']}-gpu.md").read_text())


if __name__ == "__main__":
    main()
