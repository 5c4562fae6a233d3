"""Two hosts with different addresses: two network namespaces of this one, joined by a virtual cable.

Usage: two_hosts_test.py PROCESS_COMMUNICATOR_TEST
"""

import os
import shutil
import subprocess
import sys
import time
import unittest

import start_ranks

SUITE = sys.argv[1]
RANKS = 4  # two on each host
ADDRESSES = ("10.213.77.1", "10.213.77.2")
PORT = 29500  # free: the namespaces are new


class Hosts:
    """Each host is a process in its own network namespace, and commands run beside it."""

    def __init__(self):
        self.keepers = [subprocess.Popen(["unshare", "-n", "sleep", "300"]) for _ in ADDRESSES]
        time.sleep(0.3)  # until both have entered their namespaces
        try:
            self.connect()
        except Exception:
            self.close()
            raise

    def connect(self):
        pids = [str(keeper.pid) for keeper in self.keepers]
        self.run_on(0, "ip", "link", "add", "cable0", "type", "veth", "peer", "name", "cable1", "netns", pids[1])
        for host, address in enumerate(ADDRESSES):
            self.run_on(host, "ip", "address", "add", f"{address}/24", "dev", f"cable{host}")
            self.run_on(host, "ip", "link", "set", f"cable{host}", "up")
            self.run_on(host, "ip", "link", "set", "lo", "up")

    def command_on(self, host, *command):
        return ["nsenter", "-t", str(self.keepers[host].pid), "-n", *command]

    def run_on(self, host, *command):
        subprocess.run(self.command_on(host, *command), check=True, capture_output=True, text=True)

    def close(self):
        for keeper in self.keepers:
            keeper.kill()
            keeper.wait()


HOSTS = None


class TwoHosts(unittest.TestCase):
    def run_ranks(self, ranks, **environment):
        """Returns (output, exit status) of each."""
        processes = []
        for rank in ranks:
            variables = {
                **os.environ,
                **start_ranks.environment_of(rank, RANKS, PORT, ADDRESSES[0]),
                "LOCAL_RANK": str(rank % 2),
                "LOCAL_WORLD_SIZE": "2",
                "FSDP_TEST_RANKS": str(RANKS),
                "FSDP_TIMEOUT_S": "60",
                **environment,
            }
            processes.append(
                subprocess.Popen(
                    HOSTS.command_on(rank // 2, SUITE, "--gtest_brief=1"),
                    env=variables,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        return [(process.communicate(timeout=120)[0], process.returncode) for process in processes]

    def test_ranks_on_two_hosts_pass_the_suite(self):
        for output, code in self.run_ranks(range(RANKS)):
            self.assertEqual(code, 0, output)

    def test_an_address_of_another_host_is_refused_in_words(self):
        [(output, code)] = self.run_ranks([0], FSDP_HOST_ADDRESS=ADDRESSES[1])
        self.assertNotEqual(code, 0, output)
        self.assertIn(f"cannot listen at {ADDRESSES[1]}:", output)
        self.assertIn("set FSDP_HOST_ADDRESS to an address of this host", output)


if __name__ == "__main__":
    missing = [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]
    if missing:
        print(f"skipped: there is no {', '.join(missing)} to make network namespaces with")
        sys.exit(0)
    try:
        HOSTS = Hosts()
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"skipped: network namespaces are not allowed here ({getattr(error, 'stderr', error)})")
        sys.exit(0)
    try:
        unittest.main(argv=sys.argv[:1])
    finally:
        HOSTS.close()
