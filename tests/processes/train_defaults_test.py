"""The choices of `fsdp train` where nobody says otherwise: rates and validations by the weights, a directory by the date, samples of
chats; and figures of a run that agree wherever they are shown, Weights & Biases included.

Usage: train_defaults_test.py FSDP
"""

import json
import pathlib
import re
import sys
import tempfile
import time
import unittest

import small_runs

FSDP = sys.argv[1]
START_RANKS = [sys.executable, str(pathlib.Path(__file__).with_name("start_ranks.py"))]
# Stands for the package: a file has its calls. Step 3 of project "dies" is too much for it.
WANDB = """
import json, os, sys
out = open(os.environ["WANDB_STAND_IN"], "a", buffering=1)
class Calls:
    def __init__(self, place): self.__dict__["place"] = place
    def __getattr__(self, name): return Calls(f"{self.place}.{name}".lstrip("."))
    def __call__(self, *words, **named):
        print(json.dumps([self.place, words, named]), file=out)
        if project == "dies" and named.get("step") == 3: os.kill(os.getpid(), 9)
class Run(Calls):
    url = "https://wandb.example/run" if os.environ.get("WANDB_MODE") != "offline" else None
    dir = "wandb/offline-run"
def init(**named):
    global project
    project = named["project"]
    if project == "refused": raise ValueError("no such project")
    print(json.dumps(["init", [], named]), file=out)
    return Run("")
"""


class Defaults(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        small_runs.write_model(self.root / "model" / "config.json")
        small_runs.write_text(self.root / "text.txt")

    def train(self, *options, model="model", launch=(), code=0, **environment):
        return small_runs.run([*launch, FSDP, "train", "--model", model, "--data", "text.txt", *small_runs.SHAPE,
                               "--validation-batches", 1, "--sample-tokens", 4, *options], cwd=self.root, code=code, **environment)

    # --- what a run begins with -----------------------------------------------------------------------

    def test_loaded_weights_are_tuned_at_a_low_rate_and_the_first_line_says_so(self):
        said = self.train("--steps", 20, "--checkpoint-dir", "first").stdout
        self.assertTrue(said.startswith("training random weights, seed 1: --lr 0.004, --validate-every 2, because no weights are "
                                        "loaded\nmodel/config.json: "), said)
        self.assertEqual(said.count("validation after"), 10, said)
        for init, more in (("first", []), ("first", ["--warmup", "0"])):
            said = self.train("--steps", 30, "--init", init, "--log", "log.jsonl", *more).stdout
            self.assertTrue(said.startswith("fine-tuning the weights of first: --lr 2e-05, --validate-every 3, because weights are "
                                            "loaded\n"), said)
            start, = small_runs.log_records(self.root / "log.jsonl", "run")
            self.assertEqual([start["settings"][name] for name in ("lr", "min-lr", "validate-every")], ["2e-05", "2e-06", "3"])
            self.assertFalse({"lr", "validate-every"} & set(start["changed"]), start["changed"])
            rates = [step["lr"] for step in small_runs.log_records(self.root / "log.jsonl", "step")]
            self.assertAlmostEqual(max(rates), 2e-5)
            self.assertEqual(rates[0] < 1e-5, not more)  # it warms up
            self.assertLess(rates[-1], 3e-6)
        said = self.train("--steps", 2, "--init", "first", "--lr", "1e-3", "--validate-every", 0).stdout
        self.assertTrue(said.startswith("fine-tuning the weights of first\n"), said)
        small_runs.run([FSDP, "convert", "first", "tuned", "--to", "hf"], cwd=self.root)
        for options, words in (([], "fine-tuning the weights of tuned: --lr 2e-05, --validate-every 50, because weights are loaded "
                                    "(--init none: random ones)\n"), (["--init", "none"], "training random weights, seed 1: --lr 0.004,")):
            self.assertTrue(self.train("--check", *options, model="tuned").stdout.startswith(words))

    # --- where it is saved ----------------------------------------------------------------------------

    def test_a_run_without_a_directory_gets_one_that_is_new(self):
        # Any that would be named by the next seconds is there already.
        now = int(time.time())
        old = {f"model-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now + i))}" for i in range(40)}
        for name in old:
            (self.root / "runs" / name).mkdir(parents=True)
        taken = set(old)
        for launch in ([], [*START_RANKS, "2"]):
            done = self.train("--checkpoint-dir", "auto", "--steps", 1, "--sample", "", launch=launch)
            made = {each.name for each in (self.root / "runs").iterdir()} - taken
            self.assertEqual(len(made), 1, made)
            name = made.pop()
            self.assertRegex(name, r"^model-\d{8}-\d{6}$")
            self.assertIn(f"saved in runs/{name}, since no --checkpoint-dir is named (--no-save: nowhere)\n", done.stdout)
            for file in ("log.jsonl", "report.html", "step-00000001/manifest.json"):
                self.assertTrue((self.root / "runs" / name / file).is_file(), file)
            self.assertEqual(list(small_runs.losses(self.root / "runs" / name / "log.jsonl")), [1])
            taken.add(name)
        self.assertFalse([name for name in old if any((self.root / "runs" / name).iterdir())])

    def test_nothing_is_saved_only_for_those_who_say_so(self):
        before = sorted(self.root.rglob("*"))
        for options in (["--no-save"], ["--checkpoint-dir", "none"]):
            self.train("--steps", 1, "--sample", "", *options)
            self.assertEqual(sorted(self.root.rglob("*")), before)
        printed = json.loads(self.train("--no-save", "--print-config").stdout)
        self.assertEqual(printed["checkpoint_dir"], "none")

    # --- what is seen ---------------------------------------------------------------------------------

    def test_the_engine_is_silent_unless_it_is_asked(self):
        options = ["--steps", 1, "--sample", "", "--ranks", 2]
        self.assertEqual(self.train(*options).stderr, "")
        self.assertIn("planned: one arena of", self.train(*options, "--verbose").stderr)

    def test_console_log_and_report_of_a_run_have_the_same_figures(self):
        said = self.train("--steps", 12, "--checkpoint-dir", "run", "--log-every", 1).stdout
        steps = small_runs.log_records(self.root / "run/log.jsonl", "step")
        page = (self.root / "run/report.html").read_text()
        shown, = json.loads(re.search(r'<script [^>]*id="data"[^>]*>(.*?)</script>', page, re.DOTALL)[1])["runs"]
        self.assertEqual(len(steps), 12)
        for at, step in enumerate(steps):
            line = next(line.split() for line in said.splitlines() if line.split()[:1] == [f"{step['step']}/12"])
            self.assertEqual(line[1], f"{step['loss']:.4f}")
            self.assertAlmostEqual(float(line[4]), step["ms"], delta=0.051)
            self.assertAlmostEqual(int(line[5].replace(",", "")), step["tokens_per_s"], delta=0.51 + 1e-5 * step["tokens_per_s"])
            self.assertAlmostEqual(step["tokens_per_s"] * step["ms"] / 1e3, 8 * 16, delta=0.01)
            for series, key in (("loss", "loss"), ("milliseconds", "ms"), ("tokens_per_second", "tokens_per_s")):
                self.assertAlmostEqual(shown["series"][series]["y"][at] / step[key], 1, delta=1e-4)
        for figure, key in (("milliseconds", "ms"), ("tokens_per_second", "tokens_per_s")):
            middle = sorted(step[key] for step in steps)[5:7]  # of an even number: between these two
            self.assertTrue(middle[0] * 0.9999 <= shown[figure] <= middle[1] * 1.0001, (figure, middle, shown[figure]))

    # --- Weights & Biases -----------------------------------------------------------------------------

    def wandb(self, project, code=0, **environment):
        """The run's answer, and the calls of the package that stands for wandb."""
        (self.root / "packages").mkdir(exist_ok=True)
        (self.root / "packages" / "wandb.py").write_text(WANDB)
        calls = self.root / f"{project}.calls"
        done = self.train("--steps", 4, "--validate-every", 2, "--sample", "", "--checkpoint-dir", project, "--log", f"wandb:{project}",
                          code=code, PYTHONPATH=str(self.root / "packages"), WANDB_STAND_IN=str(calls),
                          FSDP_PYTHON=sys.executable, **environment)
        return done, [json.loads(line) for line in calls.read_text().splitlines()]

    def test_weights_and_biases_gets_the_figures_of_the_log(self):
        done, calls = self.wandb("good")
        self.assertIn("Weights & Biases: https://wandb.example/run\n", done.stdout)
        self.assertEqual(done.stderr, "")
        self.assertEqual(calls[0], ["init", [], {"project": "good", "name": "good"}])
        place, words, _ = calls[1]
        self.assertEqual((place, words[0]["steps"]), ("config.update", "4"))
        self.assertEqual(calls[-1], ["finish", [], {"exit_code": 0}])
        logged = [(named["step"], words[0]) for place, words, named in calls if place == "log"]
        for record in small_runs.log_records(self.root / "good/log.jsonl"):
            if record["kind"] == "step":
                figures = next(each for step, each in logged if step == record["step"] and "loss/train" in each)
                self.assertEqual((figures["loss/train"], figures["learning_rate"], figures["speed/tokens_per_s"], figures["speed/step_ms"]),
                                 (record["loss"], record["lr"], record["tokens_per_s"], record["ms"]))
            elif record["kind"] == "validation":
                self.assertIn((record["step"], {"loss/validation": record["loss"]}), logged)
        self.assertEqual(len(logged), 4 + 2)
        self.assertIn("Weights & Biases: wandb/offline-run\n", self.wandb("away", WANDB_MODE="offline")[0].stdout)

    def test_weights_and_biases_never_end_a_training(self):
        done, _ = self.wandb("dies")
        self.assertEqual(list(small_runs.losses(self.root / "dies/log.jsonl")), [1, 2, 3, 4])
        self.assertEqual(done.stderr.count("Weights & Biases gets nothing more: "), 1, done.stderr)
        self.assertIn("was ended by signal 9", done.stderr)
        self.assertIn("training goes on without it", done.stderr)

    def test_weights_and_biases_that_are_missing_or_refuse_are_said_at_once(self):
        (self.root / "refused.calls").touch()
        done, _ = self.wandb("refused", code=1)
        self.assertEqual(done.stderr, "fsdp: --log is 'wandb:refused', but wandb says: no such project.\n")
        done = self.train("--steps", 1, "--log", "wandb:a", code=1, FSDP_PYTHON=sys.executable)
        self.assertIn("--log wandb:a needs the Python package wandb, which was not found", done.stderr)


if __name__ == "__main__":
    small_runs.main()
