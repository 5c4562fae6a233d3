"""Our checkpoints as torch.distributed.checkpoint and the safetensors package read them.

Usage: read_by_others_test.py CHECKPOINT_RUN_BINARY
"""

import glob
import json
import os
import subprocess
import sys
import tempfile
import unittest

try:
    import safetensors
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(0)

BINARY = sys.argv[1]


def read_whole(folder):
    """Whole tensors by name, from files that hold nothing else."""
    tensors = {}
    for path in glob.glob(os.path.join(folder, "*.safetensors")):
        with safetensors.safe_open(path, framework="pt") as file:
            for name in file.keys():
                tensors[name] = file.get_tensor(name)
    return tensors


class ReadByOthers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory()
        subprocess.run([BINARY, "write", cls.directory.name], check=True)
        cls.checkpoint = os.path.join(cls.directory.name, "run", "step-00000003")
        cls.memory = read_whole(os.path.join(cls.directory.name, "memory"))
        cls.moments = {name for name in cls.memory if name.endswith((".exp_avg", ".exp_avg_sq"))}

    @classmethod
    def tearDownClass(cls):
        cls.directory.cleanup()

    def expect_equal_through_dcp(self, folder, names):
        reader = HuggingFaceStorageReader(os.path.join(self.checkpoint, folder))
        # Everything that the reader says is there, so that nothing is left out.
        metadata = reader.read_metadata()
        self.assertEqual(set(metadata.state_dict_metadata), names)
        state = {name: torch.full(entry.size, float("nan")) for name, entry in metadata.state_dict_metadata.items()}
        dcp.load(state, storage_reader=HuggingFaceStorageReader(os.path.join(self.checkpoint, folder)), no_dist=True)
        for name, value in state.items():
            self.assertEqual(value.shape, self.memory[name].shape, name)
            self.assertTrue(torch.equal(value, self.memory[name]), name)

    def test_dcp_reads_the_weights_bit_for_bit(self):
        self.expect_equal_through_dcp("model", set(self.memory) - self.moments)

    def test_dcp_reads_the_moments_bit_for_bit(self):
        self.assertEqual(len(self.moments), 2 * (len(self.memory) - len(self.moments)))
        self.expect_equal_through_dcp("optimizer", self.moments)

    def test_dcp_reads_into_another_sharding(self):
        # The middle rows of every matrix, as a rank of another world would ask for them.
        name = "unit1.linear.weight"
        whole = {name: torch.zeros(27, 23)}
        dcp.load(whole, storage_reader=HuggingFaceStorageReader(os.path.join(self.checkpoint, "model")), no_dist=True)
        self.assertTrue(torch.equal(whole[name][5:16], self.memory[name][5:16]))

    def test_safetensors_reads_every_piece_where_its_offsets_say(self):
        pieces = 0
        mid_row = 0
        for path in glob.glob(os.path.join(self.checkpoint, "*", "*.safetensors")):
            with safetensors.safe_open(path, framework="pt") as file:
                info = json.loads(file.metadata()["DCP_SHARDING_INFO"])
                for name in file.keys():
                    piece = file.get_tensor(name)
                    offsets = info[name]["saved_offsets"]
                    box = tuple(slice(o, o + n) for o, n in zip(offsets, piece.shape))
                    self.assertTrue(torch.equal(piece, self.memory[name][box]), f"{path} {name}")
                    pieces += 1
                    mid_row += any(o > 0 for o in offsets[1:])
        self.assertGreater(pieces, len(self.memory))
        self.assertGreater(mid_row, 0, "no rank begins in the middle of a row: the test proves nothing")

    def test_no_file_has_pickled_code(self):
        kinds = {os.path.splitext(name)[1] for _, _, names in os.walk(self.checkpoint) for name in names}
        self.assertEqual(kinds, {".json", ".safetensors"})


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
