"""How far `fsdp plan` is off the milliseconds that `fsdp train` takes, for runs that no rates were measured with.

Usage: python bench/forecast.py measure OUT.json [--fsdp build/cuda/bin/fsdp] [--set gpu|cpu|slow-links] [--only NAME ...]
       python bench/forecast.py compare OUT.json --rates h200 [--fsdp build/release/bin/fsdp]

`measure` trains every run of a set for a few steps and keeps the median of their milliseconds, without the first ones;
a run that fails is kept with its last words. `compare` needs no GPU: it asks `fsdp plan` for the same settings.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time

LLAMA_8B = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "num_attention_heads": 32,
            "num_key_value_heads": 8, "intermediate_size": 14336, "max_position_embeddings": 8192,
            "rope_theta": 500000.0, "num_hidden_layers": 8}
QWEN_1_5B = {"model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1536, "num_attention_heads": 12,
             "num_key_value_heads": 2, "intermediate_size": 8960, "max_position_embeddings": 32768,
             "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "num_hidden_layers": 28}
SMALL = {"model_type": "llama", "vocab_size": 257, "hidden_size": 192, "num_attention_heads": 6,
         "num_key_value_heads": 2, "intermediate_size": 512, "max_position_embeddings": 1024, "num_hidden_layers": 4}
GPU = {"device": "cuda", "main_grads": "fp32", "gradient_lifetime": "step"}
CPU = {"device": "cpu", "threads": 1}

# Name -> (model, settings of `fsdp train`, environment).
SETS = {
    "gpu": {
        "llama-110m 4x512": ("llama-110m", {**GPU, "batch": 4, "sequence": 512}, {}),
        "llama-110m 4x512 graph": ("llama-110m", {**GPU, "batch": 4, "sequence": 512, "cuda_graph": True}, {}),
        "llama-110m 16x1024 graph": ("llama-110m", {**GPU, "batch": 16, "sequence": 1024, "cuda_graph": True}, {}),
        "llama-1b 4x2048": ("llama-1b", {**GPU, "batch": 4, "sequence": 2048}, {}),
        "llama-1b 2x1024 graph": ("llama-1b", {**GPU, "batch": 2, "sequence": 1024, "cuda_graph": True}, {}),
        "llama-1b 12x1024 recompute": ("llama-1b", {**GPU, "batch": 12, "sequence": 1024, "recompute": "block"}, {}),
        "llama-1b 4x2048 two microbatches": ("llama-1b", {**GPU, "batch": 8, "sequence": 2048, "microbatches": 2}, {}),
        "llama-1b 4x2048 offload half": ("llama-1b", {**GPU, "batch": 4, "sequence": 2048, "offload": 0.5}, {}),
        "llama-1b 4x2048 fp8-row": ("llama-1b", {**GPU, "batch": 4, "sequence": 2048, "weights": "fp8-row"}, {}),
        "8 layers of 8B 2x4096": (LLAMA_8B, {**GPU, "batch": 2, "sequence": 4096}, {}),
        "8 layers of 8B 1x8192 recompute graph": (
            LLAMA_8B, {**GPU, "batch": 1, "sequence": 8192, "recompute": "block", "cuda_graph": True}, {}),
        "8 layers of 8B 2x4096 fp8-row": (LLAMA_8B, {**GPU, "batch": 2, "sequence": 4096, "weights": "fp8-row"}, {}),
        "8 layers of 8B 4x2048 bf16 gradients": (
            LLAMA_8B, {**GPU, "batch": 4, "sequence": 2048, "main_grads": "none"}, {}),
        "Qwen 1.5B 4x2048": (QWEN_1_5B, {**GPU, "batch": 4, "sequence": 2048}, {}),
        "Qwen 1.5B 2x4096 graph": (QWEN_1_5B, {**GPU, "batch": 2, "sequence": 4096, "cuda_graph": True}, {}),
    },
    "cpu": {
        "2 ranks": (SMALL, {**CPU, "ranks": 2, "batch": 8, "sequence": 64}, {}),
        "2 ranks 50MB": (SMALL, {**CPU, "ranks": 2, "batch": 8, "sequence": 64}, {"FSDP_BANDWIDTH": "50MB"}),
        "2 ranks 20MB no prefetch": (
            SMALL, {**CPU, "ranks": 2, "batch": 4, "sequence": 128, "prefetch": 0}, {"FSDP_BANDWIDTH": "20MB"}),
        "2 ranks 20MB optim": (
            SMALL, {**CPU, "ranks": 2, "batch": 8, "sequence": 64, "strategy": "optim"}, {"FSDP_BANDWIDTH": "20MB"}),
        "4 ranks 20MB": (SMALL, {**CPU, "ranks": 4, "batch": 8, "sequence": 64}, {"FSDP_BANDWIDTH": "20MB"}),
        "4 ranks 40MB recompute": (
            SMALL, {**CPU, "ranks": 4, "batch": 8, "sequence": 64, "recompute": "block"}, {"FSDP_BANDWIDTH": "40MB"}),
    },
    # Links decide nearly everything, so that these compare the order of gathers and reductions on any processor.
    "slow-links": {
        f"{model} {' '.join(f'{key} {value}' for key, value in settings.items())} {bandwidth}": (
            model, {**CPU, "batch": 4, "sequence": 16, **settings}, {"FSDP_BANDWIDTH": bandwidth})
        for model, settings, bandwidth in (
            ("tiny", {"ranks": 2}, "5MB"), ("tiny", {"ranks": 2, "prefetch": 0}, "5MB"),
            ("tiny", {"ranks": 2, "strategy": "optim"}, "5MB"),
            ("tiny", {"ranks": 4, "outer": 2, "recompute": "block"}, "5MB"),
            ("tiny", {"ranks": 2, "tp": 2}, "1MB"), ("moe-tiny", {"ranks": 2, "ep": 2}, "5MB"))
    },
}
STEPS = 12
WARM_UP = 5  # the first ones learn the order of units, and record


def stop(sentence):
    sys.exit(f"forecast: {sentence}")


def model_of(model, folder):
    if isinstance(model, str):
        return model
    path = os.path.join(folder, "config.json")
    with open(path, "w") as out:
        json.dump(model, out)
    return path


def write_settings(model, settings, folder):
    path = os.path.join(folder, "run.json")
    with open(path, "w") as out:
        json.dump({"model": model_of(model, folder), **settings}, out)
    return path


def last_words(done):
    lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"exit code {done.returncode}, without words"


def measure(args):
    runs = []
    numbers = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        text = os.path.join(folder, "text.txt")
        with open(text, "w") as out:
            out.write("".join(chr(numbers.randrange(32, 127)) for _ in range(1 << 21)))
        for name, (model, settings, variables) in SETS[args.set].items():
            if args.only and name not in args.only:
                continue
            log = os.path.join(folder, "log.jsonl")
            config = write_settings(model, {**settings, "data": [text], "steps": STEPS, "validate_every": 0, "sample": "", "log": log, "checkpoint_dir": "none"}, folder)
            begin = time.time()
            done = subprocess.run([args.fsdp, "train", "--config", config, "--quiet"], capture_output=True, text=True,
                                  env={**os.environ, **variables})
            run = {"name": name, "environment": variables}
            if done.returncode == 0:
                with open(log) as lines:
                    steps = [json.loads(line) for line in lines]
                run["step_ms"] = [step["ms"] for step in steps if step["kind"] == "step"]
                # Other work on the cores can only make a step slower.
                of_set = statistics.median if args.set == "gpu" else min
                run["ms"] = of_set(run["step_ms"][WARM_UP:])
            else:
                run["error"] = last_words(done)
            runs.append(run)
            print(f"{name}: {run.get('ms', run.get('error'))} ({time.time() - begin:.1f} s)", flush=True)
            write_runs(args, runs)


def write_runs(args, runs):
    """After every run, so that an interrupted measurement loses none."""
    with open(args.file, "w") as out:
        json.dump({"set": args.set, "date": time.strftime("%Y-%m-%d"), "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                   "runs": runs}, out, indent=1)


def compare(args):
    with open(args.file) as file:
        measured = json.load(file)
    errors = []
    print("| run | measured ms | forecast ms | error |\n|---|---:|---:|---:|")
    for run in measured["runs"]:
        model, settings, variables = SETS[measured["set"]][run["name"]]
        if "ms" not in run:
            print(f"| {run['name']} | failed: {run['error']} | | |")
            continue
        with tempfile.TemporaryDirectory() as folder:
            config = write_settings(model, settings, folder)
            link = ["--link", variables["FSDP_BANDWIDTH"]] if variables else []
            done = subprocess.run([args.fsdp, "plan", "--config", config, "--ranks", str(settings.get("ranks", 1)),
                                   "--rates", args.rates, "--json", *link], capture_output=True, text=True)
        if done.returncode != 0:
            print(f"| {run['name']} | {run['ms']:.2f} | {last_words(done)} | |")
            continue
        forecast = json.loads(done.stdout)["time"]["step_ms"]
        errors.append(forecast / run["ms"] - 1)
        print(f"| {run['name']} | {run['ms']:.2f} | {forecast:.2f} | {100 * errors[-1]:+.1f} % |")
    if errors:
        sizes = [abs(error) for error in errors]
        print(f"\nmedian error {100 * statistics.median(sizes):.1f} %, worst {100 * max(sizes):.1f} %, {len(sizes)} runs")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("measure", "compare"))
    parser.add_argument("file")
    parser.add_argument("--fsdp", default="build/release/bin/fsdp")
    parser.add_argument("--set", choices=tuple(SETS), default="gpu")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--rates")
    args = parser.parse_args()
    if not os.path.exists(args.fsdp):
        stop(f"--fsdp is '{args.fsdp}', which is not there; build the command first")
    if args.action == "compare" and not args.rates:
        stop("--rates is missing; name the rates to forecast with")
    (measure if args.action == "measure" else compare)(args)


if __name__ == "__main__":
    main()
