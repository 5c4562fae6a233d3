"""Looks for other bits on some run: small jobs of all backends again and again, beside other work, their checkpoints compared.

Usage: soak.py [--minutes M] [--seed N] FSDP [MPIRUN [MPIRUN_OPTION...]]

Without --minutes every job runs twice. Without mpirun its jobs are left out.
"""

import argparse
import dataclasses
import hashlib
import multiprocessing
import os
import pathlib
import random
import shutil
import sys
import tempfile
import time

import small_runs

START_RANKS = [sys.executable, str(pathlib.Path(__file__).with_name("start_ranks.py"))]
STEPS = 4
CUTS = 2  # where a resumed job was interrupted


@dataclasses.dataclass
class Job:
    """Jobs of equal `numbers` must end with the same bits, whatever carries their data."""

    numbers: str
    backend: str  # threads, tcp, mpi
    ranks: int
    options: tuple = ()
    resumed: bool = False
    sum_group: int = 0  # FSDP_SUM_GROUP

    def name(self):
        return f"{self.numbers}, {self.ranks} ranks by {self.backend}{', resumed' if self.resumed else ''}"


def all_jobs():
    hfsdp = ("--outer", "2", "--strategy", "optim_grads_params+hfsdp", "--grad-comm", "bf16", "--main-grads", "fp32")
    for backend in ("threads", "tcp", "mpi"):
        yield Job("llama", backend, 2)
        yield Job("hfsdp", backend, 4, hfsdp)
        yield Job("groups", backend, 4, sum_group=2)
    yield Job("llama", "threads", 2, resumed=True)
    yield Job("moe", "threads", 2, ("--model", "moe/config.json"))
    yield Job("hybrid", "threads", 2, ("--model", "hybrid-tiny", "--batch", "2"))
    yield Job("bf16", "threads", 2, ("--compute", "bf16"))
    # Operations on this many elements are divided among OpenMP's threads.
    yield Job("openmp", "threads", 1, ("--model", "wide/config.json", "--sequence", "256", "--threads", "2"))


class Soak:
    def __init__(self, fsdp, mpirun, root):
        self.fsdp, self.mpirun, self.root = fsdp, mpirun, root
        self.expected = {}  # by numbers: the digests of the first run, and its name
        self.num_runs = 0
        small_runs.write_model(root / "model" / "config.json")
        small_runs.write_model(root / "moe" / "config.json", model_type="mixtral", num_local_experts=4,
                               num_experts_per_tok=2)
        small_runs.write_model(root / "wide" / "config.json", hidden_size=128, intermediate_size=256,
                               max_position_embeddings=256)
        small_runs.write_text(root / "text.txt", copies=200)

    def train(self, job, steps):
        launch = {"threads": [], "tcp": [*START_RANKS, str(job.ranks)], "mpi": [*self.mpirun, "-n", str(job.ranks)]}
        options = list(job.options)
        for name, value in (("--model", "model/config.json"), ("--batch", "8"), ("--sequence", "16")):
            if name not in options:
                options += [name, value]
        if job.backend == "threads":
            options += ["--ranks", str(job.ranks)]
        small_runs.run([*launch[job.backend], self.fsdp, "train", "--data", "text.txt", "--steps", str(steps),
                        "--schedule", "constant", "--warmup", "0", "--sample", "", "--validate-every", "0", "--report",
                        "none", "--quiet", "--checkpoint-dir", "run", "--deterministic", *options], cwd=self.root,
                       FSDP_SUM_GROUP=str(job.sum_group))

    def digests(self, job):
        """{file: digest} of what the job ends with."""
        shutil.rmtree(self.root / "run", ignore_errors=True)
        if job.resumed:
            self.train(job, CUTS)
        self.train(job, STEPS)
        last = self.root / "run" / f"step-{STEPS:08}"
        found = {str(path.relative_to(last)): hashlib.sha256(path.read_bytes()).hexdigest()
                 for path in sorted(last.rglob("*.safetensors"))}
        losses = small_runs.losses(self.root / "run" / "log.jsonl")
        return {**found, **{f"loss of step {step}": repr(loss) for step, loss in losses.items()}}

    def check(self, job):
        """The differences from the first run with these numbers, as lines."""
        self.num_runs += 1
        found = self.digests(job)
        expected, first = self.expected.setdefault(job.numbers, (found, job.name()))
        assert len(expected) > STEPS, f"{job.name()} left no weights behind"
        return [f"run {self.num_runs} ({job.name()}) differs from {first} in {name}: {found.get(name)}, not {value}"
                for name, value in expected.items() if found.get(name) != value]


def keep_busy(parent):
    while os.getppid() == parent:  # ends with whoever started it
        hashlib.sha256(bytes(1 << 20))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("fsdp", type=os.path.abspath)
    parser.add_argument("mpirun", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    jobs = [job for job in all_jobs() if arguments.mpirun or job.backend != "mpi"]
    shuffle = random.Random(arguments.seed)
    end = time.monotonic() + 60 * arguments.minutes
    others = [multiprocessing.Process(target=keep_busy, args=(os.getpid(),), daemon=True) for _ in range(os.cpu_count())]
    for other in others:
        other.start()
    failures = []
    rounds = 0
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(arguments.fsdp, arguments.mpirun, pathlib.Path(folder))
        while rounds < 2 or time.monotonic() < end:
            for job in shuffle.sample(jobs, len(jobs)):
                if rounds >= 2 and time.monotonic() >= end:
                    break
                failures += soak.check(job)
            rounds += 1
            print(f"round {rounds}: {soak.num_runs} runs, {len(failures)} differences", flush=True)
        runs = soak.num_runs
    for other in others:
        other.terminate()
    print("\n".join(failures[:20]))
    print(f"{runs} runs of {len(jobs)} jobs, seed {arguments.seed}: "
          f"{'the same bits every time' if not failures else f'{len(failures)} differences'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
