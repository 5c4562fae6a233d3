#!/usr/bin/env python3
"""The Dockerfile does what a machine without containers does, and an image of it works.

    dockerfile_test.py            that its steps name what there is
    dockerfile_test.py --build    that it builds, and that its command runs; skipped without docker or podman
"""

import pathlib
import re
import shutil
import subprocess
import sys

PROJECT = pathlib.Path(__file__).resolve().parents[2]
LINES = re.sub(r"\\\n\s*", " ", (PROJECT / "Dockerfile").read_text()).split("\n")
STEPS = [line.split(maxsplit=1) for line in LINES if line and not line.startswith("#")]


def steps(word):
    return [rest for name, rest in STEPS if name == word]


def check_steps():
    setup = (PROJECT / "tools/setup.sh").read_text()
    runs = " && ".join(steps("RUN"))
    (options,) = re.findall(r"tools/setup\.sh([^&]*)&&", runs)
    for option in options.split():
        assert f"{option})" in setup, f"tools/setup.sh has no option {option}"
    (target,) = re.findall(r"tools/build\.sh release --target (\w+)", runs)
    assert f"add_executable({target})" in (PROJECT / "src/CMakeLists.txt").read_text(), target
    for copied in steps("COPY"):
        words = [word for word in copied.split() if not word.startswith("--")]
        for source in words[:-1] if "--from" not in copied else []:
            assert (PROJECT / source).exists(), f"COPY {source}: there is no such file"
    # The documentation promises this image, for which the numbers of the build are pinned.
    images = {image.split()[0] for image in steps("FROM")}
    assert images == {"debian:12-slim"}, images
    assert "Debian 12" in (PROJECT / "README.md").read_text()
    # Whatever is ignored must not be what is copied.
    ignored = (PROJECT / ".dockerignore").read_text().split()
    assert not {"tools", "src", "requirements.txt", "docs", "LICENSE"} & set(ignored), ignored
    assert steps("ENTRYPOINT") == ['["fsdp"]']


def check_image():
    tool = next((name for name in ("docker", "podman") if shutil.which(name)), None)
    if tool is None or subprocess.run([tool, "info"], capture_output=True).returncode != 0:
        print("skipped: neither docker nor podman can build a container here")
        return
    subprocess.run([tool, "build", "-t", "fsdp-test", PROJECT], check=True)
    run = [tool, "run", "--rm", "fsdp-test"]
    assert "fsdp" in subprocess.run([*run, "--version"], check=True, capture_output=True, text=True).stdout
    subprocess.run([*run, "train", "--data", "/opt/fsdp/docs", "--ranks", "2", "--steps", "2", "--batch", "4"], check=True)


check_image() if "--build" in sys.argv[1:] else check_steps()
