#!/usr/bin/env python3
"""The example programs learn the same on any ranks: own_module interrupted and resumed, hsdp on three meshes.

    examples_test.py OWN_MODULE HSDP [MPIRUN...]
"""

import re
import subprocess
import sys
import tempfile

OWN_MODULE, HSDP, *MPIRUN = sys.argv[1:]
# fp32 losses whose sums were added in other orders over 60 steps: 6e-8 per step at first, amplified a little by each
# that builds on it. Printed with six digits.
TOLERANCE = 1e-4


def run(*command):
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    return done.stdout


def check(condition, words):
    if not condition:
        sys.exit(f"examples_test: {words}")


def last_loss(output):
    return float(re.findall(r"loss ([\d.]+)", output)[-1])


def check_own_module(folder):
    whole = run(OWN_MODULE, f"{folder}/whole", 60)
    first = run(OWN_MODULE, f"{folder}/parts", 40, 2)
    second = run(OWN_MODULE, f"{folder}/parts", 60, 3)
    check("goes on after step 40" in second, second)
    check("goes on" not in whole + first, whole + first)
    check(last_loss(whole) < 0.8 * last_loss(first), f"it does not learn: {whole}")
    check(abs(last_loss(second) / last_loss(whole) - 1) < TOLERANCE, f"{whole}{first}{second}")
    check(subprocess.run([OWN_MODULE], stderr=subprocess.DEVNULL).returncode == 1, "it needs arguments")


def check_hsdp(*command):
    output = run(*command)
    losses = [float(loss) for loss in re.findall(r"loss after 5 steps ([\d.]+)", output)]
    check(len(losses) == 3 and max(losses) - min(losses) < TOLERANCE, output)
    fsdp, hsdp, hfsdp = (float(size) for size in re.findall(r"moments +(\d+) KiB", output))
    check(fsdp == hfsdp and hsdp == 2 * fsdp, output)


with tempfile.TemporaryDirectory() as place:
    check_own_module(place)
check_hsdp(HSDP)
if MPIRUN:
    check_hsdp(*MPIRUN, "-n", "4", HSDP)
print("passed")
