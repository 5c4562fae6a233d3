"""pip builds a wheel of the Python package that is small, has no libtorch inside, and works where it is installed.

Usage: python_wheel_test.py PROJECT BUILD     BUILD is the build tree, whose object files it uses
"""

import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

PROJECT, BUILD = (pathlib.Path(argument).resolve() for argument in sys.argv[1:])
TRAIN = """
import torch, fsdp_cpp as fsdp
assert "site" in fsdp.__file__, fsdp.__file__
model = fsdp.fully_shard(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))))
optimizer = fsdp.AdamW(model)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
print("trained with", fsdp.__version__)
"""
OTHER_TORCH = """
import torch
torch.__version__ = "2.9.1+cpu"
try:
    import fsdp_cpp
except ImportError as error:
    print(error)
"""


def run(*command, **options):
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def check_what_it_says(said, needed):
    """One line names the torch of the build, CUDA and NCCL, each as there or as missing with a reason; pip is told of that torch."""
    print(said, end="")
    version, parts = re.fullmatch(r"fsdp_cpp \S+ for torch (\d+\.\d+)\.\d+ with (.*)\n", said).groups()
    assert needed == [f"Requires-Dist: torch=={version}.*"], needed
    has, _, lacks = parts.partition("; without ")
    for part in ("CUDA", "NCCL"):
        assert part in has or re.search(rf"{part} \([^)]+\)", lacks), said
    if "+cpu" in torch_version():
        assert "CUDA (libtorch is a CPU build)" in lacks, said


def torch_version():
    return run("-c", "import torch; print(torch.__version__)").strip()


def main():
    if subprocess.run([sys.executable, "-c", "import scikit_build_core"], capture_output=True, check=False).returncode != 0:
        print("skipped: scikit-build-core is not installed")
        return
    with tempfile.TemporaryDirectory() as folder:
        wheels, site = pathlib.Path(folder, "wheels"), pathlib.Path(folder, "site")
        # The options of the tree stay as they are: it belongs to whoever builds there.
        run("-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", wheels, "-C", f"build-dir={BUILD}",
            "-C", "cmake.define.FSDP_TESTS=ON", "-C", "cmake.define.FSDP_BENCH=ON", PROJECT)
        wheel, = wheels.iterdir()
        assert wheel.stat().st_size < 20e6, f"{wheel.stat().st_size} bytes"
        names = zipfile.ZipFile(wheel).namelist()
        assert not [name for name in names if "torch" in name and name.endswith(".so")], names
        for name in ("_C.pyi", "py.typed", "_build.py", "shard.py", "convert/__main__.py"):
            assert f"fsdp_cpp/{name}" in names, names
        metadata, = (name for name in names if name.endswith(".dist-info/METADATA"))
        needed = [line for line in zipfile.ZipFile(wheel).read(metadata).decode().splitlines() if line.startswith("Requires-Dist")]
        run("-m", "pip", "install", "-q", "--no-deps", "--target", site, wheel)
        environment = {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1", "FSDP_LOG": "warning", "PATH": "/usr/bin:/bin"}
        print(run("-c", TRAIN, env=environment, cwd=folder), end="")
        check_what_it_says(run("-m", "fsdp_cpp", env=environment, cwd=folder), needed)
        said = run("-c", OTHER_TORCH, env=environment, cwd=folder)
        assert "fsdp_cpp was built for torch" in said and "torch 2.9.1+cpu is installed" in said, said


main()
