"""What the ranks of an MPI job say when it goes wrong, and that nothing hangs.

Usage: mpi_failures_test.py PROCESS_FAILURES_BINARY MPIRUN [MPIRUN_OPTION...]
"""

import os
import re
import subprocess
import sys
import time
import unittest

BINARY, MPIRUN = sys.argv[1], sys.argv[2:]
RANKS = 3


def run(failure, **environment):
    """Returns ({rank: its last message}, seconds)."""
    begin = time.monotonic()
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
    return {int(rank): text for rank, text in messages.items()}, time.monotonic() - begin


class MpiFailures(unittest.TestCase):
    def test_checked_mode_shows_both_sides_on_all_ranks_within_5_seconds(self):
        messages, seconds = run("disagree", FSDP_CHECKED="1")
        self.assertEqual(sorted(messages), [0, 1, 2])
        for message in messages.values():
            self.assertIn("all_gather 'blocks.3' of 96 bytes of Float", message)
            self.assertIn("all_reduce (sum) 'blocks.4' of 16 bytes of Half", message)
        self.assertLess(seconds, 5)

    def test_unchecked_mode_notices_sizes_and_points_to_checked_mode(self):
        messages, seconds = run("counts")
        self.assertEqual(sorted(messages), [0, 1, 2])
        for message in messages.values():
            self.assertIn("FSDP_CHECKED=1", message)
        self.assertLess(seconds, 5)

    def test_an_operation_fails_with_the_error_of_what_it_follows(self):
        messages, seconds = run("follow", FSDP_CHECKED="1")
        self.assertEqual(sorted(messages), [0, 1, 2])
        for message in messages.values():
            self.assertIn("all_gather 'blocks.3' of 96 bytes", message)
            self.assertIn("all_gather 'blocks.3' of 108 bytes", message)
        self.assertLess(seconds, 8)

    def test_deadline_names_operation_and_who_has_not_arrived(self):
        messages, seconds = run("away", FSDP_TIMEOUT_S="1")
        self.assertEqual(sorted(messages), [0, 1])
        for message in messages.values():
            self.assertIn("barrier 'blocks.3' waited 1 s for world rank 2, which has not arrived", message)
        self.assertLess(seconds, 8)

    def test_message_of_a_failing_rank_reaches_all_others(self):
        messages, seconds = run("fail")
        self.assertEqual(messages[2], "no space left for blocks.7")
        for rank in (0, 1):
            self.assertEqual(messages[rank], "rank 2 failed: no space left for blocks.7")
        self.assertLess(seconds, 8)

    def test_a_dead_process_ends_the_job(self):
        _, seconds = run("die")
        self.assertLess(seconds, 20)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
