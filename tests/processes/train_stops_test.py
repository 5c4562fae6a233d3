"""Runs of `fsdp train` that are stopped, killed, starved or kept waiting: what they say, and that they go on.

Usage: train_stops_test.py FSDP [MPIRUN [MPIRUN_OPTION...]]      without mpirun its tests are skipped

FSDP_CRASH_SEED chooses other instants for the kills.
"""

import json
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import small_runs
import start_ranks

FSDP, MPIRUN = sys.argv[1], sys.argv[2:]
FOREVER = 10**6
ORDER = 1e-5  # see train_runs_test.py


class Stops(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        small_runs.write_model(self.root / "model" / "config.json")
        small_runs.write_text(self.root / "text.txt")

    def command(self, directory, steps, *options, mpi=0):
        """Checkpoints are in DIRECTORY, as is the log; the rate does not depend on the number of steps."""
        launch = [*MPIRUN, "-n", str(mpi)] if mpi else []
        return [*launch, FSDP, "train", "--model", "model/config.json", "--data", "text.txt", *small_runs.SHAPE,
                "--steps", str(steps), "--schedule", "constant", "--warmup", "0", "--sample", "", "--validate-every", "0",
                "--checkpoint-dir", directory, "--report", "none", *map(str, options)]

    def losses(self, directory):
        return small_runs.losses(self.root / directory / "log.jsonl")

    def finish(self, directory, steps, *options, mpi=0, code=0):
        done = small_runs.run(self.command(directory, steps, *options, mpi=mpi), cwd=self.root, code=code)
        return done

    def start(self, directory, *options, mpi=0, after=5):
        """A run without end that has done some steps."""
        job = small_runs.start(self.command(directory, FOREVER, *options, mpi=mpi), cwd=self.root)
        self.addCleanup(small_runs.stop, job)
        self.wait_for_steps(job, directory, after)
        return job

    def wait_for_steps(self, job, directory, after):
        deadline = time.monotonic() + 60
        while max(self.losses(directory), default=0) < after:
            self.assertIsNone(job.poll(), "the run ended by itself")
            self.assertLess(time.monotonic(), deadline, "no steps within a minute")
            time.sleep(0.02)

    def ranks_of(self, job):
        """Process ids of the ranks, which are children of mpirun, by rank."""
        ranks = {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/stat") as file:
                    parent = int(file.read().rsplit(")", 1)[1].split()[1])
                if parent != job.pid:
                    continue
                with open(f"/proc/{pid}/environ") as file:
                    variables = dict(each.split("=", 1) for each in file.read().split("\0") if "=" in each)
                ranks[int(variables["OMPI_COMM_WORLD_RANK"])] = int(pid)
            except (OSError, KeyError):
                pass  # it has just ended, or has not begun
        return ranks

    def check_goes_on(self, directory, *options, mpi=0):
        """The rest of a run: its losses are those of one that nobody stopped."""
        last = max(self.losses(directory)) + 5
        self.finish(directory, last, *options, mpi=mpi)
        self.finish("undisturbed", last, *options, "--checkpoint-every", 0, mpi=mpi)
        self.assertEqual(self.losses(directory), self.losses("undisturbed"))
        self.assertEqual(max(self.losses(directory)), last)


class Signals(Stops):
    def test_a_signal_ends_the_step_saves_and_says_so(self):
        for number, options in ((signal.SIGTERM, ["--ranks", 2]), (signal.SIGINT, [])):
            name = number.name
            with self.subTest(name):
                job = self.start(name, *options, "--checkpoint-every", 0)
                job.send_signal(number)
                output, errors = job.communicate(timeout=30)
                self.assertEqual(job.returncode, 128 + number, errors)
                self.assertEqual(errors, "")
                self.assertIn(name, output)
                last = max(self.losses(name))
                saved = (self.root / name / "latest").read_text().strip()
                self.assertEqual(saved, f"step-{last:08}")
                self.assertIn(saved, output)
                shutil.rmtree(self.root / "undisturbed", ignore_errors=True)
                self.check_goes_on(name, *options)

    def test_a_second_signal_stops_at_once(self):
        job = self.start("run", "--checkpoint-every", 0)
        job.send_signal(signal.SIGSTOP)  # both arrive while it sleeps, so that there is no step between them
        job.send_signal(signal.SIGTERM)
        job.send_signal(signal.SIGINT)
        job.send_signal(signal.SIGCONT)
        _, errors = job.communicate(timeout=30)
        self.assertIn(job.returncode, (128 + signal.SIGTERM, 128 + signal.SIGINT))
        self.assertIn("stopped at once", errors)
        self.assertFalse((self.root / "run" / "latest").exists())

    @small_runs.more
    @unittest.skipUnless(MPIRUN, "no mpirun")
    def test_a_signal_to_one_process_stops_all_after_the_same_step(self):
        job = self.start("run", "--checkpoint-every", 0, mpi=2)
        os.kill(self.ranks_of(job)[1], signal.SIGTERM)
        output, _ = job.communicate(timeout=60)
        self.assertEqual(job.returncode, 128 + signal.SIGTERM, output)
        self.assertIn("SIGTERM", output)
        self.check_goes_on("run", mpi=2)

    @small_runs.more
    @unittest.skipUnless(MPIRUN, "no mpirun")
    def test_a_signal_to_mpirun_saves(self):
        job = self.start("run", "--checkpoint-every", 0, mpi=2)
        job.send_signal(signal.SIGTERM)
        job.communicate(timeout=60)
        self.assertNotEqual(job.returncode, 0)
        saved = (self.root / "run" / "latest").read_text().strip()
        self.assertEqual(saved, f"step-{max(self.losses('run')):08}")


class OverTcp(Stops):
    """Processes that nobody watches: what happens to one they find out by themselves."""

    def start_ranks(self, ranks, *options, odd_one=()):
        """The last one gets other options, too."""
        port = start_ranks.free_port()
        jobs = []
        for rank in range(ranks):
            words = [*options, *(odd_one if rank == ranks - 1 else ())]
            jobs.append(small_runs.start(self.command("run", FOREVER, *words), cwd=self.root,
                                         **start_ranks.environment_of(rank, ranks, port)))
            self.addCleanup(small_runs.stop, jobs[-1])
        return jobs

    def test_a_signal_to_one_process_ends_all_with_its_code(self):
        jobs = self.start_ranks(2, "--checkpoint-every", 0)
        self.wait_for_steps(jobs[0], "run", 3)
        jobs[1].send_signal(signal.SIGTERM)
        for rank, job in enumerate(jobs):
            _, errors = job.communicate(timeout=60)
            self.assertEqual(job.returncode, 128 + signal.SIGTERM, f"rank {rank}: {errors}")

    def test_a_process_that_fails_before_the_first_step_is_heard_by_all(self):
        jobs = self.start_ranks(2, odd_one=["--data", "nowhere.txt"])
        said = [job.communicate(timeout=120)[1] for job in jobs]
        self.assertEqual([job.returncode != 0 for job in jobs], [True] * 2, said)
        for words in said:
            self.assertIn("nowhere.txt", words)
            self.assertEqual(len(words.strip().splitlines()), 1, words)


class Resumes(Stops):
    def test_auto_goes_on_with_the_same_bits(self):
        self.finish("straight", 10, "--ranks", 2)
        self.finish("parts", 4, "--ranks", 2)
        self.finish("parts", 10, "--ranks", 2, "--resume", "auto")
        self.assertEqual(list(self.losses("parts")), list(range(1, 11)))
        self.assertEqual(self.losses("parts"), self.losses("straight"))

    @small_runs.more
    def test_other_ranks_strategies_and_pools_go_on_too(self):
        self.finish("straight", 9, "--ranks", 4)
        self.finish("parts", 3, "--ranks", 4)
        self.finish("parts", 6, "--ranks", 1, "--strategy", "no_shard")
        self.finish("parts", 9, "--ranks", 2, "--strategy", "optim_grads", "--pool", "max_pool", "--microbatches", 2)
        straight, parts = self.losses("straight"), self.losses("parts")
        self.assertEqual(parts.keys(), straight.keys())
        for step, loss in parts.items():
            self.assertLess(abs(loss - straight[step]), ORDER * straight[step], f"step {step}")
        self.assertEqual([parts[step] for step in (1, 2, 3)], [straight[step] for step in (1, 2, 3)])

    def test_a_path_begins_a_new_directory_where_the_old_one_was(self):
        self.finish("straight", 6)
        self.finish("old", 3)
        self.finish("new", 6, "--resume", "old")
        self.assertEqual(self.losses("new"), {step: loss for step, loss in self.losses("straight").items() if step > 3})
        self.assertEqual((self.root / "old" / "latest").read_text().strip(), "step-00000003")

    def test_goes_on_from_the_newest_checkpoint_whatever_latest_says(self):
        self.finish("straight", 8)
        latest = self.root / "run" / "latest"
        for steps, text in ((2, None), (4, "step-00000003\n"), (6, "no step\n")):
            self.finish("run", steps)
            # A run that was killed before step 3 was there, and whoever goes back, leaves the second of these texts.
            latest.unlink()
            if text:
                latest.write_text(text)
            shown = small_runs.run([FSDP, "inspect", "run", "--json"], cwd=self.root).stdout
            self.assertEqual(json.loads(shown)["step"], 2 if steps == 4 else steps)
        self.finish("run", 8)
        self.assertEqual(self.losses("run"), self.losses("straight"))
        self.assertEqual(latest.read_text(), "step-00000008\n")
        # One that is damaged is passed over, with a warning.
        with open(self.root / "run" / "step-00000008" / "optimizer" / "00000-0.safetensors", "r+b") as file:
            file.seek(-8, os.SEEK_END)
            file.write(b"12345678")
        done = self.finish("run", 10)
        self.assertRegex(done.stderr, "step-00000008: is damaged .*, so this run goes on from step-00000006: ")
        self.finish("straight", 10)
        self.assertEqual(self.losses("run"), self.losses("straight"))

    @small_runs.more
    def test_quantised_weights_go_on_with_the_same_bits(self):
        for recipe in ("fp8-row", "fp8-tensor", "fp8-block"):
            with self.subTest(recipe):
                straight, parts = f"{recipe}.straight", f"{recipe}.parts"
                self.finish(straight, 8, "--ranks", 2, "--weights", recipe)
                self.finish(parts, 4, "--ranks", 2, "--weights", recipe)
                self.finish(parts, 8, "--ranks", 2, "--weights", recipe)
                self.assertEqual(self.losses(parts), self.losses(straight))

    @small_runs.more
    def test_other_commands_read_checkpoints_of_quantised_weights(self):
        quantised = ["--weights", "fp8-row"]
        self.finish("straight", 6, "--ranks", 2, *quantised)
        self.finish("parts", 3, "--ranks", 2, *quantised)
        said = small_runs.run([FSDP, "inspect", "parts", "--verify"], cwd=self.root).stdout
        self.assertRegex(said, r"(?m)^moments +\d+ tensors")
        small_runs.run([FSDP, "convert", "parts", "exported", "--to", "hf"], cwd=self.root)
        small_runs.run([FSDP, "convert", "parts", "recut", "--to", "sharded", "--ranks", "2"], cwd=self.root)
        small_runs.run([FSDP, "inspect", "parts", "--diff", "recut"], cwd=self.root)
        self.finish("onward", 6, "--ranks", 2, *quantised, "--resume", "recut")
        straight = self.losses("straight")
        self.assertEqual(self.losses("onward"), {step: straight[step] for step in (4, 5, 6)})

    @small_runs.more
    def test_quantised_and_plain_weights_go_on_with_each_other(self):
        """Each way the losses stay near those of plain weights alone: codes of 3 bits are off by a few percent."""
        self.finish("plain", 12)
        for name, first, then in (("from", "fp8-row", "bf16"), ("to", "bf16", "fp8-row"), ("between", "fp8-block", "fp8-row")):
            with self.subTest(name):
                self.finish(name, 6, "--weights", first)
                self.finish(name, 12, "--weights", then)
                for step, loss in self.losses("plain").items():
                    self.assertLess(abs(self.losses(name)[step] - loss), 0.02 * loss, f"step {step}")

    def test_a_run_that_is_done_says_so_and_changes_nothing(self):
        self.finish("run", 3)
        before = self.losses("run")
        done = self.finish("run", 3)
        self.assertIn("step 3 of 3 is done already", done.stdout)
        self.assertEqual(self.losses("run"), before)


@small_runs.more
class Kills(Stops):
    def kill_often(self, kills, kill, *options, mpi=0):
        """Kills at random instants; the end must be that of a run which was left alone."""
        rng = random.Random(int(os.environ.get("FSDP_CRASH_SEED", "1")))
        progress = []
        for number in range(kills):
            known = max(self.losses("run"), default=0)
            job = small_runs.start(self.command("run", FOREVER, "--checkpoint-every", 3, *options, mpi=mpi), cwd=self.root)
            self.addCleanup(small_runs.stop, job)
            if number % 3 != 1:  # while it trains; else while it begins
                self.wait_for_steps(job, "run", known + rng.randrange(4, 20))
            time.sleep(rng.uniform(0, 0.5))
            self.assertIsNone(job.poll(), "the run ended by itself")
            kill(job, rng)
            job.communicate(timeout=60)
            progress.append(max(self.losses("run")))
        self.check_goes_on("run", *options, mpi=mpi)
        left = [each for each in os.listdir(self.root / "run") if each.startswith(".")]
        self.assertEqual(left, [], "half-written checkpoints")
        print(f"killed {kills} times, at steps {', '.join(map(str, progress))}", flush=True)

    def test_killed_at_random_instants_it_ends_as_undisturbed(self):
        self.kill_often(6, lambda job, rng: job.kill(), "--ranks", 2)

    @unittest.skipUnless(MPIRUN, "no mpirun")
    def test_a_killed_process_ends_the_job_which_then_goes_on(self):
        def kill(job, rng):
            ranks = self.ranks_of(job)
            if len(ranks) == 2:
                os.kill(ranks[rng.randrange(2)], signal.SIGKILL)
            else:
                os.killpg(job.pid, signal.SIGKILL)

        self.kill_often(3, kill, mpi=2)


@small_runs.more
class TwoRuns(Stops):
    """Which saved over each other, and both ended as if all were well."""

    def check_refused(self, job, **launch):
        done = self.finish("run", 5, code=1, **launch)
        said = [line for line in done.stderr.splitlines() if "another run saves" in line]
        self.assertEqual(len(said), 1, done.stderr)
        host = os.uname().nodename
        self.assertIn(f"fsdp: run: another run saves its checkpoints here (process {job.pid} on {host}); stop", said[0])
        self.assertIn("(--checkpoint-dir)", said[0])

    def test_the_second_one_is_refused_until_the_first_is_dead(self):
        job = self.start("run", "--checkpoint-every", 3, "--ranks", 2)
        self.check_refused(job)
        if MPIRUN:
            self.check_refused(job, mpi=2)
        self.assertIsNone(job.poll(), "the first run ended")
        job.kill()
        self.check_goes_on("run", "--ranks", 2)


class Disks(Stops):
    def test_a_file_that_cannot_grow_costs_a_checkpoint_and_no_other(self):
        self.finish("run", 4)

        def limit():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as on a full disk: an error, not a signal
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

        command = self.command("run", 8, "--checkpoint-every", 2, "--ranks", 2)
        done = subprocess.run(command, cwd=self.root, env=small_runs.environment(), capture_output=True, text=True,
                              preexec_fn=limit, restore_signals=False, timeout=120)
        self.check_refused(done)
        self.assertEqual(max(self.losses("run")), 8, "training goes on without checkpoints")
        self.check_older_one("run", 4)

    def check_refused(self, done):
        """The last save is lost: an error at the end, and before it a line for each save that failed."""
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertRegex(done.stderr.splitlines()[-1], "^fsdp: .*(File too large|No space left on device)")

    def check_older_one(self, directory, step):
        self.assertEqual((self.root / directory / "latest").read_text().strip(), f"step-{step:08}")
        small_runs.run([FSDP, "inspect", directory, "--verify"], cwd=self.root)
        self.finish(directory, step + 2)
        self.assertEqual(max(self.losses(directory)), step + 2)

    @small_runs.more
    def test_a_full_disk(self):
        (self.root / "disk").mkdir()
        mount = "mount -t tmpfs -o size=400k tmpfs disk"
        allowed = shutil.which("unshare") and subprocess.run(
            ["unshare", "--mount", "sh", "-c", mount], cwd=self.root, capture_output=True).returncode == 0
        if not allowed:
            self.skipTest("mounting a small disk is not allowed here")
        first = self.command("disk/run", 2)
        second = self.command("disk/run", 12, "--checkpoint-every", 2, "--keep-last", 0)
        # In one mount namespace: the disk is gone when it ends.
        script = f'{mount} && "$@" > first && {shell(second)} > second 2> errors; echo $? > code; cp -r disk/run left'
        small_runs.run(["unshare", "--mount", "sh", "-c", script, "sh", *first], cwd=self.root)
        done = subprocess.CompletedProcess(second, int((self.root / "code").read_text()),
                                           stderr=(self.root / "errors").read_text())
        self.check_refused(done)
        kept = sorted(each.name for each in (self.root / "left").glob("step-*"))
        self.assertEqual(kept[0], "step-00000002")
        latest = (self.root / "left" / "latest").read_text().strip()
        self.assertEqual(latest, kept[-1])
        self.assertNotEqual(latest, "step-00000012", "the disk was too large to be full")
        for each in kept:
            small_runs.run([FSDP, "inspect", f"left/{each}", "--verify"], cwd=self.root)


def shell(command):
    return " ".join("'" + word.replace("'", "'\\''") + "'" for word in command)


@unittest.skipUnless(MPIRUN, "no mpirun")
class Waits(Stops):
    @small_runs.more
    def test_a_process_that_hangs_is_named_within_the_deadline(self):
        for sleeper in (1, 0):
            with self.subTest(sleeper=sleeper):
                # A save that has begun would be waited for up to a minute more.
                job = self.start(f"run{sleeper}", "--timeout", 3, "--checkpoint-every", 0, mpi=2)
                ranks = self.ranks_of(job)
                self.assertEqual(sorted(ranks), [0, 1])
                begin = time.monotonic()
                os.kill(ranks[sleeper], signal.SIGSTOP)
                _, errors = job.communicate(timeout=60)
                seconds = time.monotonic() - begin
                self.assertNotEqual(job.returncode, 0)
                self.assertRegex(errors, rf"fsdp: .*waited 3 s for (world )?rank {sleeper}, .* or raise --timeout\.")
                self.assertNotIn("warning", errors)
                self.assertEqual(errors.count("waited"), 1, errors)
                self.assertGreater(seconds, 2.5)

    def test_processes_that_find_different_data_do_not_train_together(self):
        small_runs.write_text(self.root / "other.txt", copies=50)
        small_runs.run([FSDP, "data", "pack", "text.txt", "--output", "text.bin"], cwd=self.root)
        copy = bytearray((self.root / "text.bin").read_bytes())
        copy[1000] ^= 1  # under the same header
        (self.root / "copy.bin").write_bytes(copy)
        command = [word for word in self.command("run", 3) if word not in ("--data", "text.txt")]
        for first, second, error in (("text.txt", "other.txt", "rank 1 reads other data than rank 0"),
                                     ("text.bin", "copy.bin", "copy.bin: its tokens are damaged")):
            with self.subTest(data=second):
                script = f'case $OMPI_COMM_WORLD_RANK in 1) exec "$@" --data {second};; *) exec "$@" --data {first};; esac'
                done = small_runs.run([*MPIRUN, "-n", "2", "sh", "-c", script, "sh", *command], cwd=self.root,
                                      code=None, timeout=60)
                self.assertEqual(done.returncode, 1, "ranks with different data trained together")
                self.assertIn(error, done.stderr)
                self.assertFalse((self.root / "run").exists())


if __name__ == "__main__":
    small_runs.main()
