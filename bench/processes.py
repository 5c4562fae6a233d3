"""The tcp and the mpi communicator between processes of one host, in turn.

Usage: .venv/bin/python bench/processes.py [--bench build/release/bin/bench_comm] [--ranks 2] [--rounds 3]

The best of all rounds counts, since a busy machine only makes a measurement worse.
"""

import argparse
import json
import os
import platform
import socket
import subprocess
import time

from best_rows import keep_best

SIZES = [1 << 10, 1 << 20, 32 << 20]
MPIRUN = ["mpirun", "--oversubscribe", "--quiet", "-n"]
MPI_ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def run_mpi(command, ranks):
    done = subprocess.run(
        [*MPIRUN, str(ranks), *command],
        env={**os.environ, **MPI_ENVIRONMENT},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout)


def run_tcp(command, ranks):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    return json.loads(outputs[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bench", default="build/release/bin/bench_comm")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    command = [args.bench, "--format", "json", "--bytes", *map(str, SIZES)]
    tcp, mpi = {}, {}
    for _ in range(args.rounds):
        keep_best(tcp, run_tcp(command, args.ranks))
        keep_best(mpi, run_mpi(command, args.ranks))

    print(f"# {time.strftime('%Y-%m-%d')}  {platform.machine()}, {os.cpu_count()} cores, {args.ranks} processes, "
          f"best of {args.rounds} rounds; load average {os.getloadavg()[0]:.1f}")
    print("# GB/s = bytes of the whole, unsharded side / time")
    print(f"{'# operation':26} {'bytes':>10} {'tcp us':>10} {'GB/s':>7} {'mpi us':>10} {'GB/s':>7} {'tcp/mpi time':>12}")
    for (name, size), us in sorted(tcp.items()):
        peer = mpi[(name, size)]
        print(f"{name:26} {size:10} {us:10.2f} {size / us * 1e-3:7.2f} {peer:10.2f} {size / peer * 1e-3:7.2f} "
              f"{us / peer:12.2f}")


if __name__ == "__main__":
    main()
