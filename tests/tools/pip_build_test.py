#!/usr/bin/env python3
"""pip builds on torch wherever its Python imports it from, and on no package of Debian's.

    pip_build_test.py TORCH     any libtorch
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

PROJECT = pathlib.Path(__file__).resolve().parents[2]
TORCH = pathlib.Path(sys.argv[1])
REQUIREMENT = PROJECT / "tools/torch_requirement.py"
# Not that of a virtual environment, which has no packages of its user.
PYTHON = next(path for path in (pathlib.Path(sys.base_prefix, "bin", name) for name in ("python3", "python")) if path.exists())


def make_torch(folder, minor):
    """A package torch of version 2.MINOR, as far as is looked at."""
    header = folder / "torch/include/torch/headeronly/version.h"
    header.parent.mkdir(parents=True)
    (folder / "torch/__init__.py").touch()
    header.write_text(f"#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR {minor}\n#define TORCH_VERSION_PATCH 0\n")


class PipBuild(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name).resolve()

    def required(self, **variables):
        kept = {name: value for name, value in os.environ.items() if name not in ("FSDP_TORCH", "PYTHONPATH", "PYTHONNOUSERSITE")}
        asked = [subprocess.run([PYTHON, REQUIREMENT, *more], env={**kept, **variables}, capture_output=True, text=True, check=True).stdout.strip()
                 for more in ([], ["--folder"])]
        return asked[0], pathlib.Path(asked[1])

    def test_torch_is_found_where_python_imports_it(self):
        make_torch(self.root / "path", 12)
        self.assertEqual(self.required(PYTHONPATH=str(self.root / "path")), ("torch==2.12.*", self.root / "path/torch"))
        # pip hides the user's packages from a build, by variables.
        base = self.root / "user"
        site = subprocess.run([PYTHON, "-c", "import site; print(site.getusersitepackages())"], env={**os.environ, "PYTHONUSERBASE": str(base)},
                              capture_output=True, text=True, check=True).stdout.strip()
        make_torch(pathlib.Path(site), 11)
        (self.root / "overlay").mkdir()
        self.assertEqual(self.required(PYTHONUSERBASE=str(base), PYTHONNOUSERSITE="1", PYTHONPATH=str(self.root / "overlay")),
                         ("torch==2.11.*", pathlib.Path(site, "torch")))
        self.assertEqual(self.required(PYTHONUSERBASE=str(base), FSDP_TORCH=str(self.root / "path/torch"))[0], "torch==2.12.*")

    def test_headers_come_from_packages_of_python(self):
        """nlohmann-json's, that pyproject.toml asks for; CLI11 is not looked for, since a wheel has no command."""
        header = self.root / "site/nlohmann_json/include/nlohmann/json.hpp"
        header.parent.mkdir(parents=True)
        header.touch()
        self.assertIn('"nlohmann-json', (PROJECT / "pyproject.toml").read_text())

        def configure(*options):
            return subprocess.run(
                ["cmake", "-S", PROJECT, "-B", self.root / "build", "-G", "Ninja", "-DSKBUILD=2", f"-DFSDP_TORCH={TORCH}", "-DFSDP_TESTS=OFF",
                 "-DFSDP_BENCH=OFF", "-DFSDP_PYTHON=AUTO", "-DFSDP_MPI=OFF", "-DFSDP_CUDA=OFF", "-DCMAKE_DISABLE_FIND_PACKAGE_nlohmann_json=ON",
                 "-DCMAKE_DISABLE_FIND_PACKAGE_CLI11=ON", "-DCMAKE_IGNORE_PATH=/usr/include;/usr/local/include", *options],
                capture_output=True, text=True, check=False)

        done = configure()
        self.assertIn("nlohmann_json 3.10 was not found", re.sub(r"\s+", " ", done.stderr))
        done = configure(f"-DCMAKE_PREFIX_PATH={self.root / 'site'}")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(str(header.parents[1]), (self.root / "build/build.ninja").read_text())
        self.assertNotIn("fsdp_command", (self.root / "build/build.ninja").read_text())


if __name__ == "__main__":
    del sys.argv[1:]
    unittest.main(verbosity=2)
