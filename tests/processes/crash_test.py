"""A training that is killed again and again ends as one that was not, bit for bit.

Usage: crash_test.py KILLS CHECKPOINT_RUN_BINARY MPIRUN [MPIRUN_OPTION...]

Kills (SIGKILL) one rank or all of them at random instants, while checkpoints are written in the
background every few steps, and starts the job again. FSDP_CRASH_SEED chooses other instants.
"""

import filecmp
import os
import random
import signal
import subprocess
import sys
import tempfile
import time

KILLS, BINARY, MPIRUN = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
RANKS = 2
NEVER = 10**9
SAVE_EVERY = 3


def start(directory, last_step, save_every):
    return subprocess.Popen(
        [*MPIRUN, "-n", str(RANKS), BINARY, "train", directory, str(last_step), str(save_every)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ranks_of(job):
    """Process ids of the ranks, which are children of mpirun."""
    pids = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as file:
                parent = int(file.read().rsplit(")", 1)[1].split()[1])
            with open(f"/proc/{pid}/cmdline") as file:
                if parent == job.pid and BINARY in file.read():
                    pids.append(int(pid))
        except OSError:
            pass  # it has just ended
    return pids


def latest(directory):
    names = os.listdir(directory) if os.path.isdir(directory) else []
    return max((int(name[5:13]) for name in names if name.startswith("step-")), default=0)


def kill(job, rng):
    """Kills one rank, or everything; returns what it did."""
    pids = ranks_of(job)
    if len(pids) == RANKS and rng.random() < 0.7:
        os.kill(rng.choice(pids), signal.SIGKILL)
        what = "one rank"
    else:
        os.killpg(job.pid, signal.SIGKILL)
        what = "all"
    for pid in pids:  # mpirun ends the others; if it was killed itself, nobody does
        if what == "all":
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
    job.communicate(timeout=60)
    return what


def finish(directory, last_step, save_every):
    job = start(directory, last_step, save_every)
    output, _ = job.communicate(timeout=600)
    assert job.returncode == 0 and "done" in output, f"exit code {job.returncode}:\n{output}"


def same_files(a, b):
    for folder in ("model", "optimizer"):
        names = sorted(os.listdir(os.path.join(a, folder)))
        assert names == sorted(os.listdir(os.path.join(b, folder))), folder
        for name in names:
            pair = [os.path.join(path, folder, name) for path in (a, b)]
            assert filecmp.cmp(*pair, shallow=False), f"{pair[0]} differs from {pair[1]}"
        assert names


def main():
    rng = random.Random(int(os.environ.get("FSDP_CRASH_SEED", "1")))
    with tempfile.TemporaryDirectory() as root:
        killed = os.path.join(root, "killed")
        progress = 0
        counts = {"one rank": 0, "all": 0}
        longest = 2.5  # seconds until a kill; grows where the machine is too slow to get anywhere
        in_the_middle = 0  # kills that found a checkpoint half written
        for i in range(KILLS):
            job = start(killed, NEVER, SAVE_EVERY)
            time.sleep(rng.uniform(0.2, longest))
            assert job.poll() is None, f"the job ended by itself:\n{job.communicate()[0]}"
            what = kill(job, rng)
            counts[what] += 1
            step = latest(killed)
            names = os.listdir(killed) if os.path.isdir(killed) else []
            in_the_middle += any(name.endswith(".tmp") for name in names)
            assert step >= progress, f"step {progress} was there, now the latest is {step}"
            longest *= 1.0 if step > progress else 1.3
            progress = step
            print(f"kill {i + 1} of {KILLS}: {what}; the latest checkpoint is of step {step}", flush=True)
        assert progress > 0, "no checkpoint was ever complete: the test proves nothing"
        last = progress + 20
        finish(killed, last, SAVE_EVERY)
        undisturbed = os.path.join(root, "undisturbed")
        finish(undisturbed, last, 0)
        name = f"step-{last:08}"
        same_files(os.path.join(killed, name), os.path.join(undisturbed, name))
        left = [each for each in os.listdir(killed) if each.startswith(".")]
        assert not left, f"left over: {left}"
        print(f"{counts['one rank']} times one rank was killed, {counts['all']} times all; {in_the_middle} times a "
              f"checkpoint was half written; {last} steps end with the same bits as undisturbed ones")


if __name__ == "__main__":
    main()
