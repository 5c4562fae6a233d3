"""Checks what the ranks of an MPI job say when it goes wrong, and that nothing hangs.

Usage: mpi_failures_test.py PROCESS_FAILURES_BINARY MPIRUN [MPIRUN_OPTION...]
"""

import os
import re
import subprocess
import sys
import unittest

import failure_checks

BINARY, MPIRUN = sys.argv[1], sys.argv[2:]
RANKS = 3


def run(failure, **environment):
    """Returns {rank: its last message}."""
    job = subprocess.run(
        [*MPIRUN, "-n", str(RANKS), BINARY, failure],
        env={**os.environ, **environment},
        stderr=subprocess.STDOUT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    messages = dict(re.findall(r"^\[rank (\d)\] (.*)$", job.stdout, re.MULTILINE))
    assert job.returncode != 0, f"{failure} ended well:\n{job.stdout}"
    return {int(rank): text for rank, text in messages.items()}


class MpiFailures(failure_checks.FailureChecks, unittest.TestCase):
    run_job = staticmethod(run)

    def test_deadline_names_operation_and_who_has_not_arrived(self):
        messages = run("away", FSDP_TIMEOUT_S="1")
        self.assertEqual(sorted(messages), [0, 1])
        for message in messages.values():
            self.assertIn("barrier 'blocks.3' waited 1 s for world rank 2, which has not arrived", message)

    def test_a_dead_process_ends_the_job(self):
        run("die")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
