"""Processes started by the real torchrun join and train, whoever holds the store.

Usage: torchrun_test.py PROCESS_COMMUNICATOR_TEST HELLO_FSDP
"""

import importlib.util
import os
import subprocess
import sys
import unittest

import start_ranks

SUITE, HELLO = sys.argv[1:3]
RANKS = 3


def torchrun(options, command, **environment):
    job = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, "--no-python", *command],
        env={**os.environ, "FSDP_TEST_RANKS": str(RANKS), "FSDP_TIMEOUT_S": "60", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    return job.returncode, job.stdout


class Torchrun(unittest.TestCase):
    def expect_suite_passes(self, *options, **environment):
        command = [SUITE, "--gtest_brief=1", "--gtest_filter=*GivesTheSameBits*:*HasTheSize*"]
        code, output = torchrun([*options, f"--nproc-per-node={RANKS}"], command, **environment)
        self.assertEqual(code, 0, output)
        self.assertEqual(output.count("[  PASSED  ] 2 tests"), RANKS, output)

    def test_static_rendezvous(self):
        self.expect_suite_passes(f"--master-port={start_ranks.free_port()}")

    def test_standalone(self):
        self.expect_suite_passes("--standalone")

    def test_c10d_rendezvous(self):
        self.expect_suite_passes("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{start_ranks.free_port()}")

    def test_rank_0_opens_the_store_where_the_agent_does_not_share_its_own(self):
        self.expect_suite_passes("--standalone", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")

    def test_a_restarted_job_joins_again(self):
        # The first attempt's rank 1 fails after joining.
        script = f'[ "$TORCHELASTIC_RESTART_COUNT$RANK" = 01 ] && exit 3; exec {HELLO}'
        code, output = torchrun(
            ["--standalone", "--max-restarts=1", f"--nproc-per-node={RANKS}"], ["sh", "-c", script]
        )
        self.assertEqual(code, 0, output)
        self.assertIn("step 20  loss", output)

    def test_hello_fsdp_trains(self):
        code, output = torchrun(["--standalone", f"--nproc-per-node={RANKS}"], [HELLO])
        self.assertEqual(code, 0, output)
        self.assertRegex(output, r"step 20  loss [0-3]\.")

    def test_rank_0_says_on_one_line_how_tensors_travel(self):
        _, output = torchrun(["--standalone", f"--nproc-per-node={RANKS}"], [HELLO], FSDP_LOG="info", CUDA_VISIBLE_DEVICES="")
        self.assertEqual([line for line in output.splitlines() if "tensors travel" in line],
                         ["[rank 0] tensors travel through host memory over TCP: no rank sees a GPU"], output)


if __name__ == "__main__":
    if importlib.util.find_spec("torch") is None:
        print("skipped: this Python has no torch, so no torchrun")
        sys.exit(0)
    unittest.main(argv=sys.argv[:1])
