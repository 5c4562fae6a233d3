"""Tokens per second of `fsdp train` beside a training script of PyTorch with FSDP2, in one run on one machine.

Usage: .venv/bin/python bench/train.py [--fsdp build/release/bin/fsdp] [--ranks 2] [--steps 30] [--rounds 3]

Both train the 7-million-parameter Llama of bench/llama.h on the same batch, in fp32, with AdamW and clipping, and say
the loss of every step. They take turns; each turn counts by the median of its steps without the first five. FSDP2 runs
as people run it on CPUs: a process per rank, gloo, one thread each. `fsdp train` runs its ranks as threads, and as
processes under mpirun where that is there.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fsdp2

WARM_UP = 5
CONFIG = {"model_type": "llama", "vocab_size": fsdp2.VOCAB, "hidden_size": fsdp2.HIDDEN,
          "num_hidden_layers": fsdp2.LAYERS, "num_attention_heads": fsdp2.HEADS, "num_key_value_heads": fsdp2.HEADS,
          "intermediate_size": fsdp2.FFN, "max_position_embeddings": fsdp2.SEQUENCE}


def run_fsdp2(rank, ranks, steps, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    model = fsdp2.build()
    for unit in (model.embedding, *model.blocks, model.head, model):
        fully_shard(unit, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(rank)
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        text = torch.randint(fsdp2.VOCAB, (fsdp2.BATCH, fsdp2.SEQUENCE + 1), generator=generator)
        loss = model(text[:, :-1].contiguous(), text[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.SUM)
        mean.item()
        times.append((time.perf_counter() - begin) * 1e3)
    if rank == 0:
        with open(f"{folder}/result.json", "w") as out:
            json.dump(times, out)
    dist.barrier()
    dist.destroy_process_group()


def fsdp2_ms(args):
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_fsdp2, args=(args.ranks, args.steps, folder), nprocs=args.ranks)
        with open(f"{folder}/result.json") as result:
            return statistics.median(json.load(result)[WARM_UP:]), None


def ours(args, launch):
    """(median ms of a step, median ms of data and logging, seconds from the command to the end of the first step)"""
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/config.json", "w") as config:
            json.dump(CONFIG, config)
        with open(f"{folder}/text", "wb") as text:
            text.write(os.urandom(1 << 20).translate(bytes(ord(" ") + byte % 95 for byte in range(256))))
        command = launch + [args.fsdp, "train", "--model", f"{folder}/config.json", "--data", f"{folder}/text",
                            "--sequence", str(fsdp2.SEQUENCE), "--batch", str(fsdp2.BATCH * args.ranks),
                            "--steps", str(args.steps), "--validate-every", "0", "--sample", "", "--lr", "1e-3",
                            "--compute", "fp32", "--device", "cpu", "--log", f"{folder}/log", "--no-save", "--threads", "1"]
        if not launch:
            command += ["--ranks", str(args.ranks)]
        environment = dict(os.environ, OMP_NUM_THREADS="1", OMPI_ALLOW_RUN_AS_ROOT="1",
                           OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        begin = time.time()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        with open(f"{folder}/log") as log:
            lines = [json.loads(line) for line in log]
        steps = [line for line in lines if line["kind"] == "step"]
        return (statistics.median(line["ms"] for line in steps[WARM_UP:]),
                statistics.median(line["overhead_ms"] for line in steps[WARM_UP:]),
                steps[0]["time"] - begin)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fsdp", default="build/release/bin/fsdp")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(f"# {time.strftime('%Y-%m-%d')}  {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
          f"load {os.getloadavg()[0]:.1f} at the beginning; {args.ranks} ranks, {args.steps} steps, "
          f"{args.rounds} rounds", flush=True)
    rows = {"PyTorch FSDP2 over gloo": lambda: fsdp2_ms(args), "fsdp train, threads": lambda: ours(args, [])}
    if shutil.which("mpirun"):
        launch = ["mpirun", "--oversubscribe", "--quiet", "-n", str(args.ranks)]
        rows["fsdp train, mpirun"] = lambda: ours(args, launch)
    results = {name: [] for name in rows}
    for _ in range(args.rounds):
        for name, measure in rows.items():
            results[name].append(measure())
            print(f"# {name}: {results[name][-1][0]:.1f} ms", file=sys.stderr, flush=True)
    tokens = args.ranks * fsdp2.BATCH * fsdp2.SEQUENCE
    peer = [turn[0] for turn in results["PyTorch FSDP2 over gloo"]]
    print(f"{'':28} {'ms/step':>9} {'tokens/s':>9} {'x FSDP2':>8} {'data+logs':>10} {'first step':>11}")
    for name, turns in results.items():
        ms = statistics.median(turn[0] for turn in turns)
        speed = statistics.median(theirs / turn[0] for theirs, turn in zip(peer, turns))
        more = ""
        if turns[0][1] is not None:
            more = (f" {statistics.median(turn[1] / turn[0] for turn in turns):10.2%}"
                    f" {statistics.median(turn[2] for turn in turns):9.2f} s")
        print(f"{name:28} {ms:9.1f} {tokens / ms * 1e3:9.0f} {speed:8.2f}{more}")


if __name__ == "__main__":
    main()
