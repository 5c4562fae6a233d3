"""A wheel asks this of pip: the minor version of torch whose libtorch it is built with. scikit-build-core calls it (pyproject.toml).

libtorch's C++ interface changes from version to version, so a wheel for 2.13 works with 2.13.x alone.
"""

import os
import pathlib
import re
import sysconfig

PROJECT = pathlib.Path(__file__).resolve().parent.parent
SUPPORTED = "torch>=2.11,<2.14"  # of source packages, which are for no torch yet


def torch_folder():
    """Where cmake/FsdpTorch.cmake finds libtorch when pip builds; None where it finds none."""
    found = [os.environ.get("FSDP_TORCH") or None, pathlib.Path(sysconfig.get_path("platlib"), "torch"),
             *sorted(PROJECT.glob(".venv/lib/python3.*/site-packages/torch"))]
    for folder in filter(None, found):
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
    print(requirement())
