"""The cost of sharding, beside PyTorch FSDP2, in one run on one machine.

Usage: .venv/bin/python bench/engine.py [--bench build/release/bin/bench_engine] [--ranks 2] [--rounds 5] [--every-case]

Every row is a quotient of a sharded and a plain model that take turns, so that a busy machine slows both.
"""

import argparse
import os
import platform
import subprocess
import sys
import time

import torch

import fsdp2


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bench", default="build/release/bin/bench_engine")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--every-case", action="store_true", help="more strategies and pools")
    args = parser.parse_args()

    def ours(part):
        command = [args.bench, "--part", part, "--ranks", str(args.ranks), "--rounds", str(args.rounds)]
        subprocess.run(command + ["--every-case"] * args.every_case, check=True)

    print(f"# {time.strftime('%Y-%m-%d')}  {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, "
          f"load {os.getloadavg()[0]:.1f} at the beginning", flush=True)
    ours("tax")
    subprocess.run([sys.executable, fsdp2.__file__, "--ranks", str(args.ranks), "--rounds", str(args.rounds)],
                   check=True)
    ours("host")
    ours("wire")


if __name__ == "__main__":
    main()
