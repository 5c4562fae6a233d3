"""Checks what the ranks of a TCP job say when it goes wrong, how soon, and that nothing hangs.

Usage: tcp_failures_test.py PROCESS_FAILURES_BINARY
"""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

import failure_checks
import start_ranks

BINARY = sys.argv[1]
RANKS = 3


def start(failure, **environment):
    os.environ.update(environment)
    try:
        return start_ranks.start(
            RANKS, [BINARY, failure], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    finally:
        for name in environment:
            del os.environ[name]


def finish(processes):
    """Returns {rank: its last message} of the ranks that said something."""
    messages = {}
    for rank, process in enumerate(processes):
        output, _ = process.communicate(timeout=60)
        found = re.findall(r"^\[rank \d\] (.*)$", output, re.MULTILINE)
        if found:
            messages[rank] = found[-1]
    return messages


def run(failure, **environment):
    """Returns {rank: its last message}."""
    return finish(start(failure, **environment))


def run_alone(rank, ranks, port, **environment):
    """One process of a job whose others are not there; returns what it says."""
    variables = {**os.environ, **start_ranks.environment_of(rank, ranks, port), **environment}
    process = subprocess.run([BINARY, "away"], env=variables, capture_output=True, text=True, timeout=60)
    assert process.returncode == 1, process
    return process.stderr.strip()


class TcpFailures(failure_checks.FailureChecks, unittest.TestCase):
    run_job = staticmethod(run)

    def test_a_rank_that_left_is_named_at_once(self):
        messages = run("away")
        self.assertEqual(sorted(messages), [0, 1])
        for message in messages.values():
            self.assertIn("barrier 'blocks.3' needs world rank 2, which has left the job", message)

    def test_a_dead_process_is_named_at_once(self):
        messages = run("die")
        self.assertEqual(sorted(messages), [0, 1])
        for message in messages.values():
            self.assertIn("rank 2 is gone: its connection ", message)

    def test_a_process_killed_in_the_middle_of_a_transfer_is_named_at_once(self):
        processes = start("work")
        self.assertIn("pid", processes[2].stdout.readline())
        time.sleep(0.3)
        processes[2].kill()
        messages = finish(processes)
        for rank in (0, 1):
            self.assertIn("rank 2 is gone: its connection ", messages[rank])

    def test_deadline_names_a_process_that_stands_still(self):
        processes = start("work", FSDP_TIMEOUT_S="2")
        self.assertIn("pid", processes[2].stdout.readline())
        processes[2].send_signal(signal.SIGSTOP)
        try:
            messages = finish(processes[:2])
        finally:
            processes[2].kill()
            processes[2].communicate()
        # The one whose deadline comes first names the culprit and tells the other.
        for rank in (0, 1):
            self.assertRegex(messages[rank], r"all_gather 'blocks.3' of \d+ bytes of Float waited 2 s for world rank 2,")

    def test_different_world_sizes_are_shown(self):
        port = start_ranks.free_port()
        processes = [
            subprocess.Popen(
                [BINARY, "away"],
                env={**os.environ, **start_ranks.environment_of(rank, ranks, port)},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, ranks in ((0, 2), (1, 3))
        ]
        said = [process.communicate(timeout=60)[1] for process in processes]
        self.assertIn("rank 1 says WORLD_SIZE=3, but rank 0 says WORLD_SIZE=2", said[0])
        self.assertIn("rank 0 says WORLD_SIZE=2, but rank 1 says WORLD_SIZE=3", said[1])

    def test_different_choices_about_nccl_are_shown(self):
        port = start_ranks.free_port()
        processes = [
            subprocess.Popen(
                [BINARY, "away"],
                env={**os.environ, **start_ranks.environment_of(rank, RANKS, port), "FSDP_NCCL": "off" if rank == 1 else "auto"},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        for process in processes:
            said = process.communicate(timeout=60)[1]
            self.assertIn("FSDP_NCCL is off on rank 1 and auto on rank 0: set it alike on all ranks", said)
            self.assertEqual(process.returncode, 1)

    def test_a_port_in_use_is_one_sentence(self):
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            holder.listen()
            said = run_alone(0, 2, holder.getsockname()[1])
        self.assertRegex(said, r"^cannot listen at 127.0.0.1:\d+: .*in use; choose another port$")

    def test_no_rank_0_is_one_sentence(self):
        said = run_alone(1, 2, start_ranks.free_port(), FSDP_TIMEOUT_S="1")
        self.assertRegex(said, r"^rank 0 has not answered at 127.0.0.1:\d+ after 1 s: look at what it does, or correct "
                               r"MASTER_ADDR and MASTER_PORT$")

    def test_rank_0_does_not_listen_where_other_hosts_cannot_reach_it(self):
        said = run_alone(0, 2, start_ranks.free_port(), LOCAL_WORLD_SIZE="1", FSDP_TIMEOUT_S="1")
        self.assertRegex(said, r"^rank 0 would listen at 127.0.0.1, .*: set FSDP_HOST_ADDRESS")

    def test_listening_at_every_address_is_a_warning(self):
        said = run_alone(0, 2, start_ranks.free_port(), MASTER_ADDR="0.0.0.0", FSDP_TIMEOUT_S="1")
        self.assertIn("MASTER_ADDR is 0.0.0.0, so rank 0 listens at every address of its host; set it to the one that", said)

    def test_secrets_are_checked_before_anything_else(self):
        for variables, words in (({"FSDP_SECRET": "short"}, "FSDP_SECRET has 5 characters: it needs 16 or more"),
                                 ({"FSDP_SECRET": "x" * 16, "FSDP_SECRET_FILE": "f"}, "both FSDP_SECRET and FSDP_SECRET_FILE"),
                                 ({"FSDP_SECRET_FILE": "/no/such/file"}, "/no/such/file")):
            with self.subTest(words):
                environment = {"FSDP_SECRET": "", **variables}
                self.assertIn(words, run_alone(0, 2, start_ranks.free_port(), **environment))

    def test_a_process_without_the_secret_does_not_join(self):
        port = start_ranks.free_port()
        with tempfile.NamedTemporaryFile("w") as file:
            file.write("a secret of this job\n")
            file.flush()
            secrets = ({"FSDP_SECRET_FILE": file.name, "FSDP_SECRET": ""}, {"FSDP_SECRET": "of somebody else"})
            processes = [
                subprocess.Popen(
                    [BINARY, "away"],
                    env={**os.environ, **start_ranks.environment_of(rank, 2, port), **secrets[rank], "FSDP_TIMEOUT_S": "600"},
                    stderr=subprocess.PIPE, text=True)
                for rank in range(2)
            ]
            said = [process.communicate(timeout=60)[1] for process in processes]
        self.assertIn("rank 0 and rank 1 have not the same FSDP_SECRET", said[1])
        self.assertIn("somebody who says RANK=1 called and does not know this job's FSDP_SECRET", said[0])
        self.assertIn("rank 1 and rank 0 have not the same FSDP_SECRET", said[0])
        self.assertNotIn("of somebody else", said[0] + said[1])

    def test_nobody_listens_while_the_job_works(self):
        processes = start("work")
        try:
            self.assertIn("pid", processes[2].stdout.readline())  # all have met
            listening = subprocess.run(["ss", "-Htlnp"], capture_output=True, text=True, check=True).stdout
            for process in processes:
                self.assertNotIn(f"pid={process.pid},", listening)
        finally:
            for process in processes:
                process.kill()
                process.communicate()

    def test_a_process_killed_before_all_have_joined_is_named_at_once(self):
        for killed, other, words in ((1, 0, "rank 1 left before all ranks had joined; look at what it said last"),
                                     (0, 1, "rank 0 is gone: it ended before all ranks had met; look at what it said last")):
            with self.subTest(killed=killed):
                port = start_ranks.free_port()
                processes = [  # the third one never comes
                    subprocess.Popen([BINARY, "away"], env={**os.environ, **start_ranks.environment_of(rank, 3, port)},
                                     stderr=subprocess.PIPE, text=True)
                    for rank in range(2)
                ]
                connected = ["ss", "-Htn", "state", "established", f"( sport = :{port} )"]
                while not subprocess.run(connected, capture_output=True, text=True, check=True).stdout:
                    time.sleep(0.01)
                processes[killed].kill()
                self.assertEqual(processes[other].communicate(timeout=60)[1].strip(), words)
                processes[killed].communicate()

    def test_a_rank_that_never_comes_is_named(self):
        said = run_alone(0, 2, start_ranks.free_port(), FSDP_TIMEOUT_S="1")
        self.assertIn("rank 0 of 2 waited 1 s for rank 1, which has not joined", said)
        self.assertEqual(len(said.splitlines()), 1, said)

    def test_a_name_without_address_is_one_sentence(self):
        said = run_alone(1, 2, 29500, MASTER_ADDR="no.such.host.invalid", FSDP_TIMEOUT_S="1")
        self.assertIn("host 'no.such.host.invalid' has no address", said)
        self.assertEqual(len(said.splitlines()), 1, said)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
