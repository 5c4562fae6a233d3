"""Checks what the ranks of an NCCL job do when it goes wrong, how soon, and that nothing hangs.

Usage: nccl_failures_test.py NCCL_DEVICE_TEST_BINARY
"""

import signal
import subprocess
import sys
import time
import unittest

import start_ranks

BINARY = sys.argv[1]


class NcclFailures(unittest.TestCase):
    def check(self, claim, ranks, killed=0):
        """Every rank that is not killed ends by itself, in time, and says that the claim holds."""
        begin = time.monotonic()
        processes = start_ranks.start(
            ranks,
            [BINARY, f"--gtest_filter=NcclFailures.{claim}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            said = [process.communicate(timeout=60)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        if all("no GPU here" in each for each in said):
            print("no GPU here")
            self.skipTest("no GPU here")
        print(f"{claim} with {ranks} ranks: {time.monotonic() - begin:.1f} s", flush=True)
        expected = [0] * (ranks - killed) + [-signal.SIGKILL] * killed
        self.assertEqual([process.returncode for process in processes], expected, "\n".join(said))

    def test_an_operation_that_nobody_else_came_to(self):
        for ranks in (2, 3):
            self.check("NameTheOperationThatNobodyElseCameTo", ranks)

    def test_launches_that_are_stuck(self):
        self.check("EndLaunchesThatAreStuck", 2)

    def test_replays_to_which_a_rank_does_not_come(self):
        self.check("EndReplaysToWhichARankDoesNotCome", 2)

    def test_a_rank_that_died(self):
        for ranks in (2, 3):
            self.check("NameTheOperationOfARankThatDied", ranks, killed=1)

    def test_a_meeting_to_which_a_rank_does_not_come(self):
        for ranks in (2, 3):
            self.check("GiveUpAMeetingToWhichARankDoesNotCome", ranks)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
