#!/usr/bin/env python3
"""Configuring decides about CUDA by libtorch and nvcc, and says on its last line what the build has, lacks, and why.

    cuda_option_test.py TORCH NVCC     TORCH is any libtorch; NVCC may be missing
"""

import pathlib
import subprocess
import sys
import tempfile
import unittest

PROJECT = pathlib.Path(__file__).resolve().parents[2]
TORCH, NVCC = sys.argv[1:3]


def libtorch(folder, *, with_cuda):
    """TORCH as a CPU build or as a CUDA build, which CMake tells apart by one library; NCCL lies beside the latter."""
    torch = pathlib.Path(folder, "cuda" if with_cuda else "cpu", "torch")
    (torch / "lib").mkdir(parents=True)
    (torch / "include").symlink_to(pathlib.Path(TORCH, "include"))
    for library in pathlib.Path(TORCH, "lib").iterdir():
        if "_cuda" not in library.name:
            (torch / "lib" / library.name).symlink_to(library)
    if with_cuda:
        nccl = torch.parent / "nvidia/nccl"
        for file in (torch / "lib/libtorch_cuda.so", nccl / "include/nccl.h", nccl / "lib/libnccl.so.2"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    return torch


def configure(torch, *options):
    """Returns the exit status and the last lines."""
    with tempfile.TemporaryDirectory() as build:
        done = subprocess.run(["cmake", "-S", PROJECT, "-B", build, "-G", "Ninja", f"-DFSDP_TORCH={torch}", "-DFSDP_TESTS=OFF",
                               "-DFSDP_BENCH=OFF", "-DFSDP_PYTHON=OFF", "-DFSDP_MPI=OFF", *options],
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stderr.strip()


class CudaOption(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def last_line(self, torch, *options):
        status, said = configure(torch, *options)
        self.assertEqual(status, 0, said)
        return said.splitlines()[-1]

    def test_a_libtorch_for_cpus_is_a_build_for_cpus(self):
        line = self.last_line(libtorch(self.folder.name, with_cuda=False))
        self.assertIn("without MPI (FSDP_MPI is OFF), CUDA (libtorch is a CPU build), NCCL (there is no CUDA)", line)

    def test_a_libtorch_for_gpus_is_a_build_with_cuda_and_nccl_where_nvcc_is(self):
        line = self.last_line(libtorch(self.folder.name, with_cuda=True))
        if pathlib.Path(NVCC).is_file():
            self.assertRegex(line, r"with CUDA [0-9.]+, NCCL; without MPI")
        else:
            self.assertIn("CUDA (no nvcc was found in PATH, CUDA_HOME or /usr/local/cuda)", line)

    def test_off_is_off(self):
        self.assertIn("CUDA (FSDP_CUDA is OFF)", self.last_line(libtorch(self.folder.name, with_cuda=True), "-DFSDP_CUDA=OFF"))

    def test_on_is_an_error_where_it_cannot_be(self):
        status, said = configure(libtorch(self.folder.name, with_cuda=False), "-DFSDP_CUDA=ON")
        self.assertNotEqual(status, 0)
        self.assertIn("FSDP_CUDA is ON, but libtorch is a CPU build", " ".join(said.split()))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
