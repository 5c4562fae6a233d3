"""The threads communicator beside gloo (torch.distributed), in one run on one machine.

Usage: .venv/bin/python bench/comm.py [--bench build/release/bin/bench_comm] [--ranks 2] [--rounds 3]

Each round runs memcpy, ours and gloo one after the other; the best of all rounds counts, since a busy
machine only makes a measurement worse.
"""

import argparse
import json
import os
import platform
import subprocess
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from best_rows import keep_best

SIZES = [1 << 10, 32 << 10, 1 << 20, 32 << 20, 64 << 20]


def best_us(body, size):
    calls = max(4, min(300, (64 << 20) // (size + 1)))
    body()
    best = float("inf")
    for _ in range(5):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(calls):
            body()
        best = min(best, (time.perf_counter() - begin) / calls * 1e6)
    return best


def gloo_rank(rank, ranks, folder):
    # Newer versions of torch have new names for these two; the old ones work in all that we support.
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    rows = []
    for size in SIZES:
        numel = size // 4
        whole = torch.zeros(numel)
        share = torch.full((numel // ranks,), float(rank + 1))
        rows.append(("all_gather", size, best_us(lambda: dist.all_gather_into_tensor(whole, share), size)))
        assert whole[-1] == ranks
        source = torch.full((numel,), float(rank + 1))
        rows.append(("reduce_scatter fp32", size, best_us(lambda: dist.reduce_scatter_tensor(share, source), size)))
        assert share[0] == ranks * (ranks + 1) / 2
    if rank == 0:
        with open(f"{folder}/rows.json", "w") as out:
            json.dump([{"operation": name, "bytes": size, "us": us} for name, size, us in rows], out)
    dist.barrier()
    dist.destroy_process_group()


def run_gloo(ranks):
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(gloo_rank, args=(ranks, folder), nprocs=ranks)
        with open(f"{folder}/rows.json") as rows:
            return json.load(rows)


def run_ours(binary, ranks):
    command = [binary, "--ranks", str(ranks), "--format", "json", "--bytes", *map(str, SIZES)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bench", default="build/release/bin/bench_comm")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    ours, gloo = {}, {}
    for _ in range(args.rounds):
        keep_best(ours, run_ours(args.bench, args.ranks))
        keep_best(gloo, run_gloo(args.ranks))

    print(f"# {time.strftime('%Y-%m-%d')}  {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
          f"{args.ranks} ranks, best of {args.rounds} rounds")
    print("# GB/s = bytes of the whole, unsharded side / time; memcpy: each thread copies that many bytes")
    print(f"{'# operation':26} {'bytes':>10} {'us':>10} {'GB/s':>7} {'gloo us':>10} {'gloo GB/s':>9} {'x gloo':>7} {'/ memcpy':>8}")
    for (name, size), us in sorted(ours.items(), key=lambda item: (item[0][0], item[0][1])):
        rate = size / us * 1e-3
        # gloo sums in the type that travels; the bf16 wire is compared with what it replaces.
        peer = gloo.get((name.replace("bf16 wire", "fp32"), size))
        peer_text = f"{peer:10.1f} {size / peer * 1e-3:9.2f} {peer / us:7.1f}" if peer else f"{'':10} {'':9} {'':7}"
        print(f"{name:26} {size:10} {us:10.2f} {rate:7.2f} {peer_text} {ours[('memcpy', size)] / us:8.2f}")


if __name__ == "__main__":
    main()
