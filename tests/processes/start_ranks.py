"""Starts a program as the ranks of one job, as torchrun would, on this host.

Usage: start_ranks.py RANKS PROGRAM [ARGUMENT...]

Rank 0 opens the store at a free port. When a rank fails, the others have ten seconds to notice.
"""

import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time


def is_free(port):
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def free_port():
    """One below those that the system gives to connections: such a one may be gone before rank 0 opens it."""
    with open("/proc/sys/net/ipv4/ip_local_port_range") as limits:
        first_given = int(limits.read().split()[0])
    return next(port for port in random.sample(range(10_000, max(first_given, 20_000)), 1000) if is_free(port))


SECRET = secrets.token_hex(32)  # of the jobs that this process starts: nobody else on this host joins them


def environment_of(rank, ranks, port, address="127.0.0.1"):
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "FSDP_SECRET": SECRET,
    }


def start(ranks, command, **options):
    """The processes of a job; `options` go to Popen."""
    port = free_port()
    return [
        subprocess.Popen(command, env={**os.environ, **environment_of(rank, ranks, port)}, **options)
        for rank in range(ranks)
    ]


def main():
    processes = start(int(sys.argv[1]), sys.argv[2:])
    deadline = None
    while any(process.poll() is None for process in processes):
        if deadline is None and any(process.poll() for process in processes):
            deadline = time.monotonic() + 10
        if deadline is not None and time.monotonic() > deadline:
            for process in processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGKILL)
        time.sleep(0.02)
    return max(abs(process.returncode) for process in processes)


if __name__ == "__main__":
    sys.exit(main())
