"""`fsdp train`, `eval` and `generate` from end to end: the same losses however a run is divided.

Usage: train_runs_test.py FSDP [MPIRUN [MPIRUN_OPTION...]]       without mpirun its tests are skipped
"""

import json
import math
import pathlib
import struct
import sys
import tempfile
import unittest

import small_runs
import start_ranks

FSDP, MPIRUN = sys.argv[1], sys.argv[2:]
START_RANKS = [sys.executable, str(pathlib.Path(__file__).with_name("start_ranks.py"))]  # as torchrun does
STEPS = 6
# Ranks add the gradients of 8 sequences in another order. Each sum is off by a few fp32 roundings (6e-8), AdamW makes
# steps of about the same length of whatever gradient, and six of them add up.
ORDER = 1e-5
# Where sums are rounded to bf16 (4e-3) on their way, they are off by more.
ORDER_BF16 = 1e-2


class Trained(unittest.TestCase):
    """A directory with the small model and its text."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        small_runs.write_model(self.root / "model" / "config.json")
        small_runs.write_text(self.root / "text.txt")

    def fsdp(self, *arguments, code=0, mpi=0, tcp=0):
        launch = [*MPIRUN, "-n", str(mpi)] if mpi else [*START_RANKS, str(tcp)] if tcp else []
        return small_runs.run([*launch, FSDP, *map(str, arguments)], cwd=self.root, code=code)

    def train(self, name, *options, steps=STEPS, mpi=0, tcp=0, code=0):
        """Losses by step; the run's log is NAME.jsonl."""
        options = list(options)
        for name_of_option, value in (("--model", "model/config.json"), ("--validate-every", 0)):
            if name_of_option not in options:
                options += [name_of_option, value]
        done = self.fsdp("train", "--data", "text.txt", *small_runs.SHAPE, "--steps", steps, "--sample", "", "--quiet",
                         "--schedule", "constant", "--warmup", "0", "--log", f"{name}.jsonl", *options, mpi=mpi, tcp=tcp, code=code)
        self.assertEqual(done.stdout, "")
        compute = options[options.index("--compute") + 1:][:1] if "--compute" in options else []
        self.assertRegex(done.stderr, f"^{small_runs.slow_type_warning(compute)}$")
        return small_runs.losses(self.root / f"{name}.jsonl")

    def assert_near(self, losses, expected, tolerance):
        self.assertEqual(losses.keys(), expected.keys())
        for step, loss in losses.items():
            self.assertLess(abs(loss - expected[step]) / expected[step], tolerance, f"step {step}")


class Ranks(Trained):
    def test_one_rank_and_several_threads_have_the_same_losses(self):
        one = self.train("one")
        self.assertEqual(list(one), list(range(1, STEPS + 1)))
        self.assertLess(one[STEPS], one[1] - 0.1)
        self.assertGreater(one[1], math.log(257) - 0.5)  # a fresh model knows nothing
        for ranks in (2, 4):
            with self.subTest(ranks=ranks):
                self.assert_near(self.train(f"threads{ranks}", "--ranks", ranks), one, ORDER)
        self.assert_near(self.train("parts", "--ranks", 2, "--microbatches", 4), one, ORDER)

    @unittest.skipUnless(MPIRUN, "no mpirun")
    def test_processes_compute_what_threads_do(self):
        for ranks in (2, 4):
            with self.subTest(ranks=ranks):
                threads = self.train(f"threads{ranks}", "--ranks", ranks)
                processes = self.train(f"processes{ranks}", mpi=ranks)
                if ranks == 2:  # a sum of two numbers has one order
                    self.assertEqual(processes, threads)
                else:
                    self.assert_near(processes, threads, ORDER)

    def test_processes_say_at_the_start_how_tensors_travel(self):
        words = ["train", "--data", "text.txt", *small_runs.SHAPE, "--model", "model/config.json", "--steps", 1, "--sample", "",
                 "--validate-every", 0, "--device", "cpu"]
        said = self.fsdp(*words, tcp=2).stdout
        self.assertEqual([line for line in said.splitlines() if "tensors travel" in line],
                         ["tensors travel through host memory over TCP: NCCL is off"], said)
        self.assertNotIn("tensors travel", self.fsdp(*words, "--ranks", 2).stdout)  # threads share their memory

    def test_processes_of_torchrun_compute_what_threads_do(self):
        for ranks in (2, 4):
            with self.subTest(ranks=ranks):
                threads = self.train(f"threads{ranks}", "--ranks", ranks)
                self.assert_near(self.train(f"tcp{ranks}", tcp=ranks), threads, ORDER)

    def test_ranks_of_two_hosts_add_as_groups_of_threads_do(self):
        def run(name, *launch, steps=STEPS, ranks=4, batch=8, **environment):
            words = ["train", "--data", "text.txt", "--sequence", 16, "--batch", batch, "--model", "model/config.json", "--steps", steps,
                     "--checkpoint-dir", name, "--log", f"{name}.jsonl", "--validate-every", 0, "--sample", "", "--device", "cpu",
                     *([] if launch else ["--ranks", ranks])]
            done = small_runs.run([*launch, FSDP, *words], cwd=self.root, **environment)
            numbers = [(step["loss"], step["grad_norm"]) for step in small_runs.log_records(self.root / f"{name}.jsonl", "step")]
            return done, numbers, json.loads(self.fsdp("inspect", name, "--json").stdout)["sum_group"]

        # This variable makes two hosts of one, as it does for NCCL.
        on_two_hosts = [*START_RANKS, "4", "bash", "-c", 'NCCL_HOSTID=$((RANK / 2)) exec "$0" "$@"']
        hosts, numbers, group = run("hosts", *on_two_hosts)
        self.assertIn("; gradients are added in groups of 2 ranks first", hosts.stdout)
        self.assertEqual(group, 2)
        _, in_groups, group = run("groups", FSDP_SUM_GROUP="2")
        self.assertEqual((in_groups, group), (numbers, 2))
        _, on_one_host, group = run("one")
        self.assertEqual((on_one_host, group), (numbers, 4))  # groups of two are a level of the tree over four
        again, _, _ = run("groups", steps=STEPS + 1, FSDP_LOG="info")
        self.assertNotIn("other bits", again.stderr)
        # Groups of three are none.
        six = {"ranks": 6, "batch": 6}
        _, in_threes, group = run("threes", **six, FSDP_SUM_GROUP="3")
        _, on_one_host, all_six = run("six", **six)
        self.assertEqual((group, all_six), (3, 6))
        self.assertNotEqual(on_one_host, in_threes)
        for (loss, norm), (other_loss, other_norm) in zip(on_one_host, in_threes):
            self.assertLess(abs(loss - other_loss), ORDER * loss)
            self.assertLess(abs(norm - other_norm), 10 * ORDER * norm)
        again, _, _ = run("threes", **six, steps=STEPS + 1, FSDP_LOG="info")
        self.assertIn("the checkpoint's ranks added gradients in groups of 3, these add them in groups of 6", again.stderr)

    @small_runs.more
    def test_models_of_every_kind_train_the_same_on_two_ranks(self):
        moe = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
        small_runs.write_model(self.root / "moe" / "config.json", **moe)
        # Experts are balanced within what a rank and microbatch has: that is another loss where the batch is divided, by
        # a coefficient of 0.001 and little of it.
        for model, steps, tolerance in (("moe", STEPS, 1e-3), ("hybrid-tiny", 2, ORDER)):
            with self.subTest(model):
                one = self.train(f"{model}1", "--model", model, steps=steps)
                two = self.train(f"{model}2", "--model", model, "--ranks", 2, steps=steps)
                self.assert_near(two, one, tolerance)

    @small_runs.more
    def test_experts_that_ranks_share_out_learn_the_same(self):
        moe = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 24}
        small_runs.write_model(self.root / "moe" / "config.json", **moe)
        expected = self.train("moe", "--model", "moe", "--ranks", 4)
        for ep, options in ((2, {"outer": 2}), (4, {})):
            words = ["--model", "moe", "--ep", ep, *[word for name, value in options.items() for word in (f"--{name}", value)]]
            with self.subTest(ep=ep):
                threads = self.train(f"threads-ep{ep}", *words, "--ranks", 4)
                self.assert_near(threads, expected, ORDER)
                self.assertEqual(self.train(f"padded-ep{ep}", *words, "--ranks", 4, "--expert-exchange", "padded"), threads)
                self.assert_near(self.train(f"tcp-ep{ep}", *words, tcp=4), expected, ORDER)
                if MPIRUN:
                    self.assert_near(self.train(f"mpi-ep{ep}", *words, mpi=4), expected, ORDER)

    @small_runs.more
    def test_ranks_that_compute_a_loss_together_learn_the_same(self):
        small_runs.write_model(self.root / "heads" / "config.json", num_key_value_heads=2)  # 257 bytes are not shared
        small_runs.write_model(self.root / "even" / "config.json", num_key_value_heads=2, vocab_size=258)
        small_runs.write_model(self.root / "predicting" / "config.json", num_key_value_heads=2, num_nextn_predict_layers=1)
        for model in ("heads", "even", "predicting", "hybrid-tiny"):
            words = ["--model", model, "--validate-every", 3]
            expected = self.train(model, *words)
            with self.subTest(model):
                self.assert_near(self.train(f"{model}-two", *words, "--tp", 2, "--ranks", 2), expected, ORDER)
                self.assert_near(self.train(f"{model}-four", *words, "--tp", 2, "--ranks", 4, "--microbatches", 2), expected, ORDER)
                self.assert_near(self.train(f"{model}-tcp", *words, "--tp", 2, "--outer", 2, tcp=4), expected, ORDER)
                if MPIRUN:
                    self.assert_near(self.train(f"{model}-mpi", *words, "--tp", 2, "--outer", 2, mpi=4), expected, ORDER)
                    self.assert_near(self.train(f"{model}-mpi2", *words, "--tp", 2, mpi=4), expected, ORDER)

    def test_experts_and_heads_that_ranks_share_out_learn_the_same(self):
        self.compare_both_axes("moe")
        words = ["--model", "moe", "--ep", 4, "--tp", 2, "--lr", "1e-4"]
        threads = small_runs.losses(self.root / "four-moe.jsonl")
        self.assert_near(self.train("tcp", *words, tcp=4), threads, ORDER)
        if MPIRUN:
            self.assert_near(self.train("mpi", *words, mpi=4), threads, ORDER)

    @small_runs.more
    def test_other_models_learn_the_same_over_both_axes(self):
        for model in ("hybrid-moe-tiny", "delta-tiny", "mla-tiny"):
            with self.subTest(model):
                self.compare_both_axes(model)

    def compare_both_axes(self, model):
        """Two ranks have the batches of two tp groups, and balance experts within the same tokens."""
        moe = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
        small_runs.write_model(self.root / "moe" / "config.json", **moe)
        # A rate that changes few choices of experts between two steps: a choice is the other one because of a sum's order, and
        # then tokens differ.
        two = self.train(f"two-{model}", "--model", model, "--lr", "1e-4", "--ranks", 2)
        four = self.train(f"four-{model}", "--model", model, "--lr", "1e-4", "--ep", 4, "--tp", 2, "--ranks", 4)
        self.assert_near(four, two, ORDER)

    def test_a_log_line_has_the_names_that_others_script_against(self):
        self.train("run", "--ranks", 2, "--microbatches", 2, steps=3)
        kinds = [record["kind"] for record in small_runs.log_records(self.root / "run.jsonl")]
        self.assertEqual(kinds, ["run", "step", "step", "step", "end"])
        for number, record in enumerate(small_runs.log_records(self.root / "run.jsonl", "step"), start=1):
            self.assertEqual(record["step"], number)
            for name in ("loss", "lr", "grad_norm", "ms", "overhead_ms", "tokens_per_s", "peak_bytes"):
                self.assertGreater(record[name], 0, name)
            self.assertLess(record["overhead_ms"], record["ms"])
            self.assertEqual(record["tokens"], number * 16 * 8)
            self.assertAlmostEqual(record["tokens_per_s"], 128 / (record["ms"] / 1e3), delta=record["tokens_per_s"] / 1e3)


@small_runs.more
class Quantized(Trained):
    """Weights in fp8 learn as those of --compute do."""

    def test_fp8_learns_as_well(self):
        small_runs.write_model(self.root / "aligned" / "config.json", hidden_size=64, intermediate_size=128,
                               num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)

        # The text is small enough to be learnt by heart, and single losses are far apart then: the mean of many.
        def late_loss(name, *options):
            losses = self.train(name, "--model", "aligned", "--lr", "1e-3", *options, steps=300)
            return sum(losses[step] for step in range(101, 301)) / 200

        plain = late_loss("plain")
        for recipe in ("fp8-row", "fp8-tensor", "fp8-block"):
            with self.subTest(recipe):
                self.assertLess(abs(late_loss(recipe, "--weights", recipe) / plain - 1), 0.01)
                step = small_runs.log_records(self.root / f"{recipe}.jsonl", "step")[-1]
                self.assertEqual(step["terms"]["overflow"], 0)
                self.assertLess(step["terms"]["underflow"], 1e-3)

    def test_the_scale_of_the_loss_changes_no_bit(self):
        small_runs.write_model(self.root / "aligned" / "config.json", hidden_size=64, intermediate_size=128,
                               num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
        for recipe in ("fp8-row", "fp8-tensor", "fp8-block"):
            words = ["--model", "aligned", "--weights", recipe, "--lr", "1e-3", "--ranks", 2]
            at_one = self.train(f"{recipe}-1", *words)
            for scale in (2**-15, 2**10):
                with self.subTest(recipe, scale=scale):
                    self.assertEqual(self.train(f"{recipe}-{scale}", *words, "--loss-scale", scale), at_one)

    def test_fp8_trains_on_every_axis(self):
        small_runs.write_model(self.root / "aligned" / "config.json", hidden_size=64, intermediate_size=64,
                               num_attention_heads=4, num_key_value_heads=2, model_type="mixtral", num_local_experts=4,
                               num_experts_per_tok=2)
        words = ["--model", "aligned", "--weights", "fp8-row", "--lr", "1e-4"]
        one = self.train("one", *words)
        # Gradients are rounded by the tokens of a rank, so ranks differ by that.
        for name, options in (("two", ("--ranks", 2)), ("axes", ("--ranks", 4, "--ep", 2, "--tp", 2)),
                              ("optim", ("--ranks", 2, "--strategy", "optim")),
                              ("recomputed", ("--ranks", 2, "--recompute", "block", "--microbatches", 2)),
                              ("plain gradients", ("--ranks", 2, "--weights-gradient", "plain"))):
            with self.subTest(name):
                self.assert_near(self.train(name, *words, *options), one, 5e-3)
        self.assert_near(self.train("tcp", *words, tcp=2), self.train("threads", *words, "--ranks", 2), ORDER)


class Disagreement(Trained):
    """Processes that were started differently say so when they meet."""

    FLAGS = (("--lr", "0.1"), ("--batch", "24"), ("--sequence", "8"), ("--optimizer", "sgd"), ("--moments", "bf16"),
             ("--clip", "0.5"), ("--weight-decay", "0.2"), ("--loss-scale", "2"), ("--strategy", "optim"), ("--steps", "9"),
             ("--microbatches", "2"), ("--outer", "3"), ("--save", "blocking"), ("--checkpoint-every", "3"), ("--seed", "7"))

    def start(self, different):
        """Three ranks over TCP, the last one with other settings."""
        settings = {"--model": "model/config.json", "--data": "text.txt", "--sequence": "16", "--batch": "12", "--steps": "4",
                    "--sample": "", "--validate-every": "0", "--checkpoint-dir": "run", "--timeout": "60"}
        port = start_ranks.free_port()
        jobs = []
        for rank in range(3):
            words = [word for row in {**settings, **(different if rank == 2 else {})}.items() for word in row]
            jobs.append(small_runs.start([FSDP, "train", *words], cwd=self.root,
                                         **start_ranks.environment_of(rank, 3, port)))
        return jobs

    @small_runs.more
    def test_every_setting_is_compared(self):
        for name, value in self.FLAGS:
            with self.subTest(name):
                jobs = self.start({name: value})
                ended = [(job.communicate(timeout=60)[1], job.returncode) for job in jobs]
                for words, code in ended:
                    self.assertEqual(code, 2, words)
                self.assertRegex(ended[0][0], f"rank 2 has {name} '{value}' and rank 0 has '.+'; start all ranks with the same")
                self.assertFalse((self.root / "run").exists())

    def test_models_are_compared_by_what_they_are(self):
        small_runs.write_model(self.root / "copy" / "config.json")
        small_runs.write_model(self.root / "wider" / "config.json", intermediate_size=48)
        for model, code in (("wider/config.json", 2), ("copy/config.json", 0)):  # the second one leaves checkpoints
            with self.subTest(model):
                jobs = self.start({"--model": model})
                ended = [(job.communicate(timeout=60)[1], job.returncode) for job in jobs]
                self.assertEqual([each for _, each in ended], [code] * 3, ended)
                self.assertEqual("rank 2 has a model with checksum" in ended[0][0], code == 2, ended)


class Engine(Trained):
    """Every way to shard, to buffer and to round gives the losses of not sharding at all."""

    STRATEGIES = (("optim",), ("optim_grads",), ("optim_grads_params",), ("optim", "--outer", 2),
                  ("optim_grads_params", "--outer", 2), ("optim_grads+hfsdp", "--outer", 2),
                  ("optim_grads_params+hfsdp", "--outer", 2))
    POOLS = ("on_demand", "double_buffer", "max_pool", "planned")

    def test_every_strategy_and_pool_once(self):
        expected = self.train("plain", "--ranks", 4, "--strategy", "no_shard", steps=4)
        for number, strategy in enumerate(self.STRATEGIES):
            pool = self.POOLS[number % len(self.POOLS)]
            with self.subTest(strategy=strategy, pool=pool):
                found = self.train(f"{number}", "--ranks", 4, "--strategy", *strategy, "--pool", pool, steps=4)
                self.assert_near(found, expected, ORDER)

    @small_runs.more
    def test_strategies_and_pools(self):
        expected = self.train("plain", "--ranks", 4, "--strategy", "no_shard", steps=4)
        for strategy in self.STRATEGIES:
            first = None
            for pool in self.POOLS:
                with self.subTest(strategy=strategy, pool=pool):
                    name = "-".join(map(str, (*strategy, pool)))
                    found = self.train(name, "--ranks", 4, "--strategy", *strategy, "--pool", pool, steps=4)
                    self.assert_near(found, expected, ORDER)
                    first = first or found
                    self.assertEqual(found, first, "where memory comes from changes no number")

    PRECISIONS = (("--compute", "bf16"), ("--compute", "bf16", "--main-storage", "separate", "--main-grads", "fp32"),
                  ("--compute", "bf16", "--main-grads", "fp32", "--grad-comm", "bf16", "--moments", "bf16"),
                  ("--compute", "bf16", "--main-params", "none", "--rounding", "stochastic"),
                  ("--compute", "fp16", "--loss-scale", "dynamic", "--main-grads", "fp32"))

    @small_runs.more
    def test_strategies_and_precisions(self):
        fp32 = self.train("fp32", steps=4)
        for number, precision in enumerate(self.PRECISIONS):
            expected = self.train(f"{number}", "--ranks", 2, "--strategy", "no_shard", *precision, steps=4)
            # A narrower type is another computation, but of the same thing.
            self.assert_near(expected, fp32, 3e-2)
            self.assertNotEqual(expected, fp32)
            for strategy in ("optim", "optim_grads", "optim_grads_params"):
                with self.subTest(precision=precision, strategy=strategy):
                    found = self.train(f"{number}-{strategy}", "--ranks", 2, "--strategy", strategy, *precision, steps=4)
                    self.assert_near(found, expected, ORDER_BF16)

    def test_other_settings_of_the_engine_change_no_number(self):
        expected = self.train("plain", "--ranks", 2)
        for number, options in enumerate((
                ("--prefetch", 0), ("--prefetch", 3), ("--pool-budget", "1MiB"), ("--recompute", "block"), ("--checked",),
                ("--updates", "blocking"), ("--gradient-lifetime", "step"), ("--offload", 0.5),
                ("--deterministic",), ("--granularity", "row"), ("--name-nan",))):
            with self.subTest(options=options):
                self.assertEqual(self.train(f"{number}", "--ranks", 2, *options), expected)


    @small_runs.more
    def test_logits_of_fewer_tokens_at_once_are_the_same_run(self):
        expected = self.train("plain", "--ranks", 2)
        for number, size in enumerate(("1", "4KiB")):
            with self.subTest(size=size):
                self.assert_near(self.train(f"logits-{number}", "--ranks", 2, "--logit-memory", size), expected, ORDER)


class Settings(Trained):
    def test_what_print_config_prints_is_the_same_run(self):
        options = ["--model", "model/config.json", "--data", "text.txt", *small_runs.SHAPE, "--steps", "3", "--lr",
                   "0.002", "--rule", "*norm* decay=0 rate=0.5", "--pool", "max_pool", "--moments", "bf16", "--quiet",
                   "--sample", "", "--validate-every", "2", "--pool-budget", "none", "--ranks", "2", "--loss-scale", "8"]
        printed = self.fsdp("train", *options, "--print-config").stdout
        (self.root / "run.json").write_text(printed)
        self.assertEqual(self.fsdp("train", "--config", "run.json", "--print-config").stdout, printed)
        self.assertEqual(json.loads(printed)["lr"], "0.002")
        self.fsdp("train", *options, "--log", "flags.jsonl")
        self.fsdp("train", "--config", "run.json", "--log", "config.jsonl")
        flags = small_runs.losses(self.root / "flags.jsonl")
        self.assertEqual(len(flags), 3)
        self.assertEqual(flags, small_runs.losses(self.root / "config.jsonl"))
        # Flags win, and the rest stays.
        again = json.loads(self.fsdp("train", "--config", "run.json", "--lr", "0.5", "--print-config").stdout)
        self.assertEqual(again, {**json.loads(printed), "lr": "0.5"})

    def test_an_empty_value_may_follow_the_equals_sign(self):
        printed = self.fsdp("train", "--sample=", "--steps=7", "--print-config").stdout
        self.assertEqual((json.loads(printed)["sample"], json.loads(printed)["steps"]), ("", 7))

    def test_check_refuses_what_the_machine_cannot_hold(self):
        small_runs.write_model(self.root / "huge" / "config.json", hidden_size=16384, intermediate_size=65536,
                               num_hidden_layers=200, num_attention_heads=128, num_key_value_heads=128)
        for model, code, words in (("huge", 1, "does not fit"), ("model", 0, "everything fits together")):
            done = self.fsdp("train", "--model", f"{model}/config.json", "--data", "text.txt", *small_runs.SHAPE,
                             "--device", "cpu", "--ranks", 8, "--check", code=code)
            self.assertRegex(done.stdout, "memory of this host: 8 ranks need .* without activations, .* are available")
            self.assertIn(words, done.stdout)

    def test_check_tells_the_memory_and_touches_nothing(self):
        before = sorted(self.root.rglob("*"))
        done = self.fsdp("train", "--model", "model/config.json", "--data", "text.txt", *small_runs.SHAPE, "--ranks", 2,
                         "--checkpoint-dir", "run", "--tensorboard", "tb", "--check")
        for words in ("memory per rank (forecast)", "weights", "moments", "nothing was trained"):
            self.assertIn(words, done.stdout)
        self.assertEqual(sorted(self.root.rglob("*")), before)

    def test_the_first_step_is_on_the_first_screen_and_the_log_has_every_setting(self):
        done = self.fsdp("train", "--model", "model/config.json", "--data", "text.txt", *small_runs.SHAPE, "--steps", 200,
                         "--ranks", 2, "--checkpoint-dir", "run", "--report", "none", "--sample", "")
        lines = done.stdout.splitlines()
        first = next(i for i, line in enumerate(lines) if line.lstrip().startswith("1/200 "))
        self.assertLessEqual(first, 20, done.stdout)
        self.assertIn("settings changed (--print-config shows all): ", done.stdout)
        self.assertIn("log run/log.jsonl (with every setting)\n", done.stdout)
        # A line per hundredth of the run, and the first step.
        self.assertEqual(sum("/200 " in line for line in lines), 101, done.stdout)
        known = json.loads(self.fsdp("train", "--print-config").stdout)
        start = small_runs.log_records(self.root / "run/log.jsonl", "run")[0]
        self.assertEqual([name.replace("-", "_") for name in start["settings"]], list(known))
        self.assertEqual(start["settings"]["lr"], "0.004")
        self.assertIn("steps", start["changed"])

    @unittest.skipUnless(MPIRUN, "no mpirun")
    def test_a_mistake_of_all_processes_is_said_once(self):
        for wrong, code in ((["--batch", 7], 2), (["--batch", 8, "--strategy", "x"], 2), (["--data", "nothing"], 1),
                            (["--xyzzy"], 2)):
            with self.subTest(wrong=wrong):
                data = [] if "--data" in wrong else ["--data", "text.txt"]
                done = self.fsdp("train", "--model", "model/config.json", "--sequence", 16, *data, *wrong, mpi=2, code=code)
                said = [line for line in done.stderr.splitlines() if line.startswith("fsdp: ")]
                self.assertEqual(len(said), 1, done.stderr)


class Afterwards(Trained):
    """Uses of a run that has ended."""

    def test_generate_repeats_itself_for_the_same_seed(self):
        self.train("run", "--checkpoint-dir", "run")

        def text(*options):
            return self.fsdp("generate", "--checkpoint", "run", "--prompt", "The qu", "--tokens", 24, *options).stdout

        greedy = text()
        self.assertTrue(greedy.startswith("The qu"), greedy)
        self.assertGreater(len(greedy), len("The qu\n"))
        self.assertEqual(text(), greedy)
        drawn = text("--temperature", 1, "--seed", 5)
        self.assertTrue(drawn.startswith("The qu"), drawn)
        self.assertEqual(text("--temperature", 1, "--seed", 5), drawn)
        self.assertNotEqual(text("--temperature", 1, "--seed", 6), drawn)
        # So little of the probability is the likeliest token alone.
        self.assertEqual(text("--temperature", 1, "--seed", 5, "--top-p", 1e-6), greedy)

    def test_eval_is_the_validation_of_the_log(self):
        small_runs.write_text(self.root / "other.txt", copies=30)
        self.train("run", "--checkpoint-dir", "run", "--validation-data", "other.txt", "--validate-every", 3,
                   "--validation-batches", 5)
        logged = small_runs.log_records(self.root / "run.jsonl", "validation")[-1]
        self.assertEqual(logged["step"], STEPS)
        results = {}
        for ranks in (1, 2):
            done = self.fsdp("eval", "--checkpoint", "run", "--data", "other.txt", *small_runs.SHAPE, "--batches", 5,
                             "--json", "--ranks", ranks)
            results[ranks] = json.loads(done.stdout)
        self.assertEqual(results[1]["step"], STEPS)
        self.assertEqual(results[1]["tokens"], 5 * 8 * 16)
        self.assertAlmostEqual(results[1]["loss"], logged["loss"], delta=1e-12)
        self.assertAlmostEqual(results[2]["loss"], logged["loss"], delta=ORDER)
        self.assertAlmostEqual(results[1]["perplexity"], math.exp(logged["loss"]), delta=1e-3)

    def test_weights_of_other_tools_begin_a_run(self):
        self.train("run", "--checkpoint-dir", "run")
        self.fsdp("convert", "run", "exported", "--to", "hf")
        fresh = self.train("fresh", steps=2)
        ours = self.train("ours", "--init", "run", steps=2)
        self.assertLess(ours[1], fresh[1] - 0.1)
        self.assertEqual(self.train("theirs", "--init", "exported", "--model", "exported", steps=2), ours)
        self.assertEqual(self.train("sharded", "--init", "exported", "--ranks", 2, steps=2).keys(), ours.keys())
        # A directory of weights is meant with them, unless somebody says otherwise.
        self.assertEqual(self.train("alone", "--model", "exported", steps=2), ours)
        self.assertEqual(self.train("config", "--model", "exported/config.json", steps=2), fresh)
        self.assertEqual(self.train("scratch", "--model", "exported", "--init", "none", steps=2), fresh)
        edit_safetensors(self.root / "exported" / "model.safetensors")
        for flags, words in (([], "model.norm.weight"), (["--allow-extra"], "model.norm.weight"),
                             (["--allow-missing", "*norm.weight"], "surplus")):
            with self.subTest(flags=flags):
                done = self.fsdp("train", "--model", "model/config.json", "--data", "text.txt", "--steps", 1,
                                 *small_runs.SHAPE, "--init", "exported", *flags, code=1)
                self.assertIn(words, done.stderr)
        self.train("allowed", "--init", "exported", "--allow-extra", "--allow-missing", "model.norm.*", steps=2)


def edit_safetensors(path):
    """Takes the last norm's weight out, and puts one in that no model has."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8:8 + size]), data[8 + size:]
    metadata = header.pop("__metadata__", {})
    tensors = {name: (each, body[slice(*each["data_offsets"])]) for name, each in header.items()}
    each, _ = tensors.pop("model.norm.weight")
    tensors["surplus.weight"] = ({**each, "shape": [1]}, b"\0" * 4)
    header, body = {"__metadata__": metadata}, b""
    for name, (each, content) in tensors.items():
        header[name] = {**each, "data_offsets": [len(body), len(body) + len(content)]}
        body += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


if __name__ == "__main__":
    small_runs.main()
