"""A wheel asks this of pip: the minor version of torch whose libtorch it is built with. scikit-build-core calls it (pyproject.toml).

libtorch's C++ interface changes from version to version, so a wheel for 2.13 works with 2.13.x alone.
"""

import os
import pathlib
import re
import subprocess
import sys

PROJECT = pathlib.Path(__file__).resolve().parent.parent
SUPPORTED = "torch>=2.11,<2.14"  # of source packages, which are for no torch yet


FIND = "import importlib.util as util; found = util.find_spec('torch'); print(found.submodule_search_locations[0] if found else '')"


def imported():
    """The torch of this Python; pip lets a build see only what the build requires, by two variables."""
    plain = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
    for environment in (os.environ, plain):
        yield subprocess.run([sys.executable, "-c", FIND], env=environment, capture_output=True, text=True, check=False).stdout.strip()


def torch_folder():
    """Where cmake/FsdpTorch.cmake finds libtorch when pip builds; None where it finds none."""
    for folder in filter(None, (os.environ.get("FSDP_TORCH"), *imported(), *sorted(PROJECT.glob(".venv/lib/python3.*/site-packages/torch")))):
        if pathlib.Path(folder, "include/torch/headeronly/version.h").exists():
            return pathlib.Path(folder)
    return None


def requirement():
    folder = torch_folder()
    if folder is None:
        return SUPPORTED
    text = (folder / "include/torch/headeronly/version.h").read_text()
    major, minor = (re.search(rf"#define TORCH_VERSION_{part} (\d+)", text)[1] for part in ("MAJOR", "MINOR"))
    return f"torch=={major}.{minor}.*"


def dynamic_metadata(field, settings):
    if field != "dependencies" or settings:
        raise RuntimeError(f"this gives 'dependencies' without settings, not '{field}' with {settings}")
    return [requirement()]


if __name__ == "__main__":
    print(torch_folder() or "" if "--folder" in sys.argv else requirement())
