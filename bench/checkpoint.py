"""Checkpoints beside plain files and beside torch.distributed.checkpoint, on one disk.

Usage: .venv/bin/python bench/checkpoint.py [--bench build/release/bin/bench_checkpoint] [--mib 768] [--rounds 5]
                                            [--directory /tmp]

Both are set against plain files of as many bytes, written by turns with the same fsync.
"""

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import threading
import time

import torch
import torch.distributed.checkpoint as dcp

WIDTH = 1024
THREADS = 2


def write_plainly(path, view):
    file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    for begin in range(0, len(view), 16 << 20):
        os.write(file, view[begin : begin + (16 << 20)])
    os.fsync(file)
    os.close(file)


def write_plain_files(folder, views):
    threads = [
        threading.Thread(target=write_plainly, args=(os.path.join(folder, f"plain-{i}"), view))
        for i, view in enumerate(views)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def forget(folder):
    for path, _, names in os.walk(folder):
        for name in names:
            file = os.open(os.path.join(path, name), os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def seconds(action):
    begin = time.monotonic()
    action()
    return time.monotonic() - begin


def dcp_rows(folder, mib, rounds):
    units = (mib << 20) // (12 * WIDTH * (WIDTH + 1))
    state = {}
    for unit in range(units):
        for part in ("", ".exp_avg", ".exp_avg_sq"):
            state[f"unit{unit}.weight{part}"] = torch.rand(WIDTH, WIDTH)
            state[f"unit{unit}.bias{part}"] = torch.rand(WIDTH)
    total = sum(tensor.numel() * 4 for tensor in state.values())
    views = [memoryview(bytearray(total // THREADS)) for _ in range(THREADS)]
    target = os.path.join(folder, "dcp")

    def save():
        writer = dcp.FileSystemWriter(target, sync_files=True, thread_count=THREADS, overwrite=True)
        dcp.save(state, storage_writer=writer, no_dist=True)

    writes = []
    for i in range(rounds):
        turns = {"plain": lambda: write_plain_files(folder, views), "dcp": save}
        order = list(turns) if i % 2 == 0 else list(turns)[::-1]
        writes.append({name: seconds(turns[name]) for name in order})
    loads = []
    for _ in range(rounds):
        forget(folder)
        loads.append(seconds(lambda: dcp.load(state, storage_reader=dcp.FileSystemReader(target), no_dist=True)))
    dcp_write = statistics.median(each["dcp"] for each in writes)
    plain_write = statistics.median(each["plain"] for each in writes)
    ratio = statistics.median(each["plain"] / each["dcp"] for each in writes)
    print(f"torch.distributed.checkpoint, FileSystemWriter with {THREADS} threads and fsync: {total / 1e9:.3f} GB")
    print(f"write   {total / dcp_write / 1e9:.3f} GB/s, plain file {total / plain_write / 1e9:.3f} GB/s, ratio {ratio:.3f}")
    print(f"read    {total / statistics.median(loads) / 1e9:.3f} GB/s", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bench", default="build/release/bin/bench_checkpoint")
    parser.add_argument("--mib", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default=tempfile.gettempdir())
    args = parser.parse_args()
    print(f"# {time.strftime('%Y-%m-%d')}  {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
          f"load {os.getloadavg()[0]:.1f} at the beginning", flush=True)
    subprocess.run([args.bench, "--mib", str(args.mib), "--rounds", str(args.rounds), "--directory", args.directory],
                   check=True)
    folder = tempfile.mkdtemp(dir=args.directory)
    try:
        dcp_rows(folder, args.mib, args.rounds)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
