"""Two hosts on one machine: network namespaces with a cable between them, and an MPI job across it.

Usage: train_two_hosts_test.py FSDP MPIRUN [MPIRUN_OPTION...]        ends with "skipped: ..." where namespaces are not allowed

The hosts have their own names, addresses and network devices, and nothing but TCP between them; files are shared, as a
cluster's are.
"""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import small_runs

FSDP, MPIRUN = sys.argv[1], sys.argv[2:]
HOSTS = {f"fsdp-{os.getpid()}-a": "10.77.0.1", f"fsdp-{os.getpid()}-b": "10.77.0.2"}
FIRST, SECOND = HOSTS
NETWORK = "10.77.0.0/24"


def ip(*arguments):
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def connect_hosts():
    """Two namespaces, and a pair of network devices, one end in each."""
    for host in HOSTS:
        ip("netns", "add", host)
    ip("link", "add", "eth0", "netns", FIRST, "type", "veth", "peer", "name", "eth0", "netns", SECOND)
    for host, address in HOSTS.items():
        ip("-n", host, "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", host, "link", "set", device, "up")


def processes_on(host, program=""):
    """Process ids, all or those of a program."""
    found = []
    for pid in ip("netns", "pids", host).split():
        try:
            if pathlib.Path(f"/proc/{pid}/cmdline").read_text().startswith(program):
                found.append(int(pid))
        except OSError:
            pass  # it has just ended
    return found


def end_processes():
    """Whatever is left: a daemon of mpirun that cannot hear of the job's end stays for ever."""
    for host in HOSTS:
        for pid in processes_on(host):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def remove_hosts():
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], capture_output=True)


def on_host(host, command):
    """The command as it would run there."""
    return ["ip", "netns", "exec", host, "unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', host, *command]


def sent_bytes(host):
    return int(re.search(r"TX:.*\n\s*(\d+)", ip("-n", host, "-s", "link", "show", "eth0")).group(1))


class TwoHosts(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        small_runs.write_model(self.root / "model" / "config.json")
        small_runs.write_text(self.root / "text.txt")
        # This stands in for ssh: mpirun calls it with a host and a command line for that host's shell.
        agent = self.root / "agent"
        names = " ".join(f"{address}) name={host};;" for host, address in HOSTS.items())
        agent.write_text(f'#!/bin/sh\ncase $1 in {names} esac\nshift\n'
                         'exec ip netns exec "$name" unshare --uts sh -c "hostname $name; $*"\n')
        agent.chmod(0o755)

    def command(self, log, steps, *options):
        return [FSDP, "train", "--model", "model/config.json", "--data", "text.txt", *small_runs.SHAPE, "--steps", str(steps),
                "--schedule", "constant", "--warmup", "0", "--sample", "", "--quiet", "--log", log, "--validate-every", "0",
                *options]

    def mpirun(self, ranks, command):
        hosts = ",".join(f"{address}:{ranks // 2}" for address in HOSTS.values())
        only_tcp = ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "oob_tcp_if_include", NETWORK,
                    "--mca", "btl_tcp_if_include", NETWORK]
        return on_host(FIRST, [*MPIRUN, "--host", hosts, "-n", str(ranks), "--mca", "plm_rsh_agent",
                               str(self.root / "agent"), *only_tcp, *command])

    def test_ranks_on_two_hosts_train_as_on_one(self):
        expected = self.root / "threads.jsonl"
        small_runs.run(self.command(expected, 6, "--ranks", "2"), cwd=self.root)
        before = sent_bytes(SECOND)
        small_runs.run(self.mpirun(2, self.command("hosts.jsonl", 6)), cwd=self.root)
        self.assertEqual(small_runs.losses(self.root / "hosts.jsonl"), small_runs.losses(expected))
        # Each step gathers the parts of the other host twice and reduces gradients: tens of KiB each, 6 times.
        self.assertGreater(sent_bytes(SECOND) - before, 100_000)
        small_runs.run(self.mpirun(4, self.command("four.jsonl", 6, "--outer", "2", "--strategy",
                                                   "optim_grads_params+hfsdp")), cwd=self.root)
        four = small_runs.losses(self.root / "four.jsonl")
        for step, loss in small_runs.losses(expected).items():
            self.assertLess(abs(four[step] - loss), 1e-5 * loss, f"step {step}")  # see train_runs_test.py

    def test_a_checkpoint_of_two_hosts_goes_on_on_one(self):
        small_runs.run(self.command("straight.jsonl", 8, "--ranks", "2"), cwd=self.root)
        small_runs.run(self.mpirun(2, self.command("run.jsonl", 4, "--checkpoint-dir", "run")), cwd=self.root)
        small_runs.run(self.command("run.jsonl", 8, "--ranks", "2", "--checkpoint-dir", "run"), cwd=self.root)
        self.assertEqual(small_runs.losses(self.root / "run.jsonl"), small_runs.losses(self.root / "straight.jsonl"))

    def test_a_cable_that_is_pulled_ends_all_ranks_within_the_deadline(self):
        job = small_runs.start(self.mpirun(2, self.command("run.jsonl", 10**6, "--timeout", "4")), cwd=self.root)
        self.addCleanup(end_processes)
        deadline = time.monotonic() + 60
        while len(small_runs.losses(self.root / "run.jsonl")) < 5:
            self.assertIsNone(job.poll(), "the run ended by itself")
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)
        self.addCleanup(ip, "-n", SECOND, "link", "set", "eth0", "up")
        ip("-n", SECOND, "link", "set", "eth0", "down")
        deadline = time.monotonic() + 20
        while any(processes_on(host, FSDP) for host in HOSTS):
            self.assertLess(time.monotonic(), deadline, "ranks that cannot hear each other go on waiting")
            time.sleep(0.1)
        # The ranks have ended; mpirun waits for the other host, and has passed on what was said on its own.
        end_processes()
        _, errors = job.communicate(timeout=10)
        self.assertRegex(errors, "waited 4 s for (world )?rank 1, which has not arrived")


def main():
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        print("skipped: ip or unshare is not installed")
        return
    try:
        connect_hosts()
    except (subprocess.CalledProcessError, OSError) as error:
        remove_hosts()
        print(f"skipped: network namespaces are not allowed here: {getattr(error, 'stderr', error)}")
        return
    try:
        unittest.main(argv=sys.argv[:1], verbosity=2)
    finally:
        remove_hosts()


if __name__ == "__main__":
    main()
