"""Ten steps are five, a new process, and five more: random numbers and the order of the data included.

Usage: resume_test.py CHECKPOINT_RUN_BINARY MPIRUN [MPIRUN_OPTION...]
"""

import filecmp
import os
import subprocess
import sys
import tempfile
import unittest

BINARY, MPIRUN = sys.argv[1], sys.argv[2:]
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params", "optim_grads_params+hfsdp")


def train(directory, last_step, strategy):
    command = [*MPIRUN, "-n", "2", BINARY, "train", directory, str(last_step), "0", strategy]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=120)


class Resume(unittest.TestCase):
    def test_every_strategy_goes_on_with_the_same_bits(self):
        for strategy in STRATEGIES:
            with self.subTest(strategy), tempfile.TemporaryDirectory() as root:
                straight, resumed = os.path.join(root, "straight"), os.path.join(root, "resumed")
                train(straight, 10, strategy)
                train(resumed, 5, strategy)
                train(resumed, 10, strategy)
                files = 0
                for folder in ("model", "optimizer"):
                    names = os.listdir(os.path.join(straight, "step-00000010", folder))
                    self.assertTrue(names)
                    for name in names:
                        pair = [os.path.join(each, "step-00000010", folder, name) for each in (straight, resumed)]
                        self.assertTrue(filecmp.cmp(*pair, shallow=False), f"{strategy}: {pair[1]}")
                        files += 1
                self.assertGreater(files, 1)
                # Five other steps are another model: what was compared depends on the training.
                five = os.path.join(resumed, "step-00000005", "model", "00000-0.safetensors")
                self.assertFalse(filecmp.cmp(pair[0].replace("optimizer", "model"), five, shallow=False))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
