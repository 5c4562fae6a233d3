"""Quantised matrices have the bits that torchao makes of them; skipped where it is not installed.

Usage: torchao_test.py QUANTIZE_MATRIX_BINARY
"""

import pathlib
import subprocess
import sys
import tempfile
import unittest

try:
    import torch
    from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(0)

BINARY = sys.argv[1]
E4M3 = torch.float8_e4m3fn


def matrix(rows, columns):
    """Numbers of many sizes, a row of zeros and one of small numbers."""
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(rows, columns, generator=generator) * torch.exp(torch.randn(rows, columns, generator=generator))
    values[1] *= 1e-6
    values[2] = 0.0
    return values


class Torchao(unittest.TestCase):
    def ours(self, recipe, values):
        """Codes and scales, as bytes."""
        with tempfile.TemporaryDirectory() as folder:
            paths = [pathlib.Path(folder) / name for name in ("values", "codes", "scales")]
            paths[0].write_bytes(values.numpy().tobytes())
            subprocess.run([BINARY, recipe, *map(str, values.shape), *map(str, paths)], check=True)
            return [torch.tensor(list(path.read_bytes()), dtype=torch.uint8) for path in paths[1:]]

    def assert_same(self, ours, theirs, what):
        theirs = theirs.contiguous().flatten().view(torch.uint8)
        self.assertTrue(torch.equal(ours, theirs), f"{what}: {(ours != theirs).sum()} of {ours.numel()} bytes differ")

    def test_fp8_with_a_scale_for_a_matrix_or_a_row(self):
        values = matrix(48, 160)
        for recipe, amax in (("fp8-tensor", values.abs().max()), ("fp8-row", values.abs().amax(1, keepdim=True))):
            with self.subTest(recipe):
                scale = amax_to_scale(amax, E4M3)  # what numbers are multiplied by
                codes, scales = self.ours(recipe, values)
                self.assert_same(codes, to_fp8_saturated(values * scale, E4M3), "codes")
                self.assert_same(scales, scale.reciprocal(), "scales")

    def test_mxfp8(self):
        values = matrix(48, 160)
        scale, data = to_mx(values, E4M3, 32, ScaleCalculationMode.RCEIL)
        codes, scales = self.ours("mxfp8", values)
        self.assert_same(scales, scale, "scales")
        self.assert_same(codes, data, "codes")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
