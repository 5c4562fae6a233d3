#!/usr/bin/env python3
"""`fsdp train --lora` beside PEFT, transformers and torch's AdamW: the same losses from the same adapters, files that PEFT
reads, and merged weights that are PEFT's; and what a run says where it cannot be.

    lora_test.py FSDP
"""

import json
import os
import pathlib
import re
import shutil
import sys
import tempfile
import unittest

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here needs a network

try:
    import peft
    import safetensors.torch
    import torch
    import transformers
except ImportError as error:
    print(f"skipped: {error}; make setup installs what requirements.txt names")
    sys.exit(0)

import small_runs

FSDP = sys.argv[1]
STEPS, BATCH, SEQUENCE, RANK, ALPHA, RATE = 6, 4, 16, 4, 12, 0.01
# Both sides round sums of up to a hundred products to fp32, in different orders, 6e-8 each; some steps carry that on.
TOLERANCE = 2e-5


class Lora(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.root = pathlib.Path(cls.folder.name)
        torch.manual_seed(3)
        cls.base = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(
            vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None))
        cls.base.save_pretrained(cls.root / "model")
        # Exactly as many windows as a batch has: a step sees all of them, in whatever order.
        text = "".join(f"{i * 7919 % 1000} " for i in range(BATCH * SEQUENCE))[:BATCH * SEQUENCE]
        (cls.root / "text.txt").write_text(text)
        cls.fsdp("data", "pack", "text.txt", "--output", "text.bin")

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    @classmethod
    def fsdp(cls, *words, code=0):
        return small_runs.run([FSDP, *words], cls.root, code=code, timeout=300)

    @classmethod
    def train(cls, run, *words, code=0, steps=STEPS, model="model", rate=RATE):
        return cls.fsdp("train", "--model", model, "--data", "text.bin", "--validation-fraction", 0, "--steps", steps,
                        "--batch", BATCH, "--sequence", SEQUENCE, "--lr", rate, "--warmup", 0, "--schedule", "constant",
                        "--sample", "", "--quiet", "--checkpoint-dir", run, *words, code=code)

    def losses(self, run):
        return list(small_runs.losses(self.root / run / "log.jsonl").values())

    def loaded(self, folder, **more):
        model = transformers.Qwen2ForCausalLM.from_pretrained(self.root / "model", dtype=torch.float32)
        return peft.PeftModel.from_pretrained(model, self.root / folder, **more)

    def of_peft(self, folder, base="model", **settings):
        """Adapters that PEFT wrote, none of them 0, and what the model computes with them merged."""
        torch.manual_seed(5)
        model = transformers.Qwen2ForCausalLM.from_pretrained(self.root / base, dtype=torch.float32)
        config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False,
                                 **{"r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj", "v_proj", "down_proj"], **settings})
        model = peft.get_peft_model(model, config)
        model.save_pretrained(self.root / folder)
        with torch.no_grad():
            return model.merge_and_unload().eval()(self.windows()[0]).logits

    def logits(self, folder):
        with torch.no_grad():
            model, report = transformers.AutoModelForCausalLM.from_pretrained(self.root / folder, output_loading_info=True)
            self.assertFalse(report["missing_keys"] or report["unexpected_keys"], report)
            return model(self.windows()[0]).logits

    def windows(self):
        """The tokens of the packed file: those of bytes, with an end."""
        tokens = list((self.root / "text.txt").read_bytes()) + [256]
        at = range(0, BATCH * SEQUENCE, SEQUENCE)
        return (torch.tensor([tokens[i:i + SEQUENCE] for i in at]),
                torch.tensor([tokens[i + 1:i + SEQUENCE + 1] for i in at]))

    def test_losses_and_files_are_those_of_peft(self):
        lora = ("--lora", RANK, "--lora-alpha", ALPHA, "--lora-on", "q_proj", "v_proj", "down_proj")
        self.train("begun", *lora, steps=1, rate=0)  # which changes nothing
        self.train("run", *lora, "--ranks", 2)
        self.train("codes", *lora, "--ranks", 2, "--weights", "fp8-row")
        for run in ("begun", "run"):
            self.fsdp("convert", run, f"{run}-peft", "--to", "peft")

        config = json.loads((self.root / "run-peft/adapter_config.json").read_text())
        self.assertEqual((config["r"], config["lora_alpha"], config["target_modules"]),
                         (RANK, ALPHA, ["down_proj", "q_proj", "v_proj"]))
        model = self.loaded("begun-peft", is_trainable=True)
        trained = [each for each in model.parameters() if each.requires_grad]
        self.assertEqual(len(trained), 2 * 3 * 2)
        optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
        tokens, targets = self.windows()
        theirs = []
        for _ in range(STEPS):
            loss = torch.nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())
            theirs.append(loss.item())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        ours = self.losses("run")
        self.assertLess(ours[-1], ours[0])
        for mine, other in zip(ours, theirs, strict=True):
            self.assertAlmostEqual(mine, other, delta=TOLERANCE)
        for mine, other in zip(self.losses("codes"), theirs, strict=True):
            self.assertAlmostEqual(mine, other, delta=0.02 * other)  # codes are up to 1/16 off, of both signs

        read = self.loaded("run-peft")
        with torch.no_grad():
            torch.testing.assert_close(read(tokens).logits, model(tokens).logits, rtol=1e-3, atol=1e-3)
        self.fsdp("convert", "run", "merged", "--to", "hf", "--merge")
        merged = transformers.AutoModelForCausalLM.from_pretrained(self.root / "merged", dtype="auto")
        expected = read.merge_and_unload().state_dict()
        self.assertEqual(merged.dtype, torch.float32)
        for name, value in merged.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6, msg=name)
        self.assertFalse((self.root / "merged/adapter_config.json").exists())

    def test_directories_of_peft_are_merged(self):
        self.train("ours", "--lora", RANK, steps=2)
        self.fsdp("convert", "ours", "ours-peft", "--to", "peft")
        self.fsdp("convert", "ours", "ours-merged", "--to", "hf", "--merge")
        self.fsdp("convert", "ours-peft", "again-merged", "--to", "hf", "--merge")
        one, other = (safetensors.torch.load_file(self.root / each / "model.safetensors") for each in ("ours-merged", "again-merged"))
        self.assertTrue(all(torch.equal(one[name], other[name]) for name in one) and one.keys() == other.keys())
        plain = self.logits("model")
        for folder, settings in (("theirs", {}), ("rooted", {"use_rslora": True}), ("partly", {"layers_to_transform": [1]}),
                                 ("by-pattern", {"target_modules": r".*\.1\..*_proj"}), ("all", {"target_modules": "all-linear"})):
            expected = self.of_peft(folder, **settings)
            self.assertGreater((expected - plain).abs().max(), 0.1, "adapters that change something")
            self.fsdp("convert", folder, f"{folder}-merged", "--to", "hf", "--merge", "--base", "model")
            torch.testing.assert_close(self.logits(f"{folder}-merged"), expected, rtol=1e-5, atol=1e-5, msg=folder)
            files = {path.name for path in (self.root / f"{folder}-merged").iterdir()}
            self.assertEqual(files, {path.name for path in (self.root / "model").iterdir()})
            self.fsdp("convert", folder, f"{folder}-again", "--to", "peft")
            first, second = (safetensors.torch.load_file(self.root / each / "adapter_model.safetensors")
                             for each in (folder, f"{folder}-again"))
            self.assertTrue(first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first))
            torch.testing.assert_close(self.loaded(f"{folder}-again").merge_and_unload()(self.windows()[0]).logits.detach(), expected,
                                       rtol=1e-5, atol=1e-5)

    def test_nothing_of_peft_is_lost_silently(self):
        self.of_peft("whole")
        tensors = safetensors.torch.load_file(self.root / "whole/adapter_model.safetensors")
        config = json.loads((self.root / "whole/adapter_config.json").read_text())

        def changed(folder, more, **settings):
            (self.root / folder).mkdir()
            safetensors.torch.save_file({**tensors, **more}, self.root / folder / "adapter_model.safetensors")
            (self.root / folder / "adapter_config.json").write_text(json.dumps({**config, **settings}))
            return folder

        def refused(folder):
            error = self.fsdp("convert", folder, "x", "--to", "hf", "--merge", "--base", "model", code=1).stderr
            self.assertFalse((self.root / "x").exists())
            return error

        for name in ("model.lm_head.lora_A.weight", "model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
                     "model.model.layers.7.mlp.up_proj.lora_A.weight", "model.model.layers.0.self_attn.o_proj.lora_A.weight"):
            name = "base_model." + name
            self.assertIn(f"has '{name}', which adapt no weight of model;", refused(changed(f"left-{name}", {name: torch.ones(2, 2)})))
        for name, shape in (("self_attn.q_proj.lora_A", (RANK, 31)), ("mlp.down_proj.lora_B", (33, RANK))):
            name = f"base_model.model.model.layers.0.{name}.weight"
            self.assertIn("which does not fit the weight's", refused(changed(f"shape-{name}", {name: torch.ones(shape)})))
        for setting, value in (("use_dora", True), ("fan_in_fan_out", True), ("rank_pattern", {"q_proj": 2}),
                               ("alpha_pattern", {"q_proj": 2}), ("bias", "all"), ("modules_to_save", ["lm_head"]),
                               ("lora_bias", True), ("target_parameters", ["w"]), ("layer_replication", [[0, 1]]),
                               ("init_lora_weights", "pissa"), ("peft_type", "LOHA"), ("r", 0)):
            self.assertIn(f"changed-{setting}/adapter_config.json: {setting} is {json.dumps(value, separators=(',', ':'))}; ",
                          refused(changed(f"changed-{setting}", {}, **{setting: value})))
        changed("homeless", {}, base_model_name_or_path=None)
        self.assertIn("does not say which weights the adapters belong to; name their directory with --base",
                      self.fsdp("convert", "homeless", "x", "--to", "hf", "--merge", code=1).stderr)
        self.assertIn("a run takes as they are: fsdp train --init", self.fsdp("convert", "whole", "x", "--to", "sharded", code=1).stderr)

    def test_runs_begin_with_adapters(self):
        lora = ("--lora", RANK, "--lora-alpha", ALPHA, "--lora-on", "q_proj", "v_proj", "down_proj")
        self.train("first", *lora, steps=3)
        self.fsdp("convert", "first", "first-peft", "--to", "peft")
        self.fsdp("convert", "first", "first-merged", "--to", "hf", "--merge")
        self.of_peft("from-peft")
        config = self.root / "from-peft/adapter_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": "nowhere"}))
        self.fsdp("convert", "from-peft", "from-peft-merged", "--to", "hf", "--merge", "--base", "model")
        for begin, merged in (("first", "first-merged"), ("first-peft", "first-merged"), ("from-peft", "from-peft-merged")):
            # The first loss is that of the weights with these adapters merged, on any number of ranks.
            for ranks in (1, 2):
                run = f"on-{begin}-{ranks}"
                self.train(run, *lora, "--init", begin, "--ranks", ranks, steps=2)
                self.train(f"{run}-whole", "--init", merged, steps=1)
                self.assertAlmostEqual(self.losses(run)[0], self.losses(f"{run}-whole")[0], delta=TOLERANCE)
            self.train(run, *lora, "--init", begin, "--ranks", 2, steps=3)  # goes on with its own
            self.assertEqual(len(self.losses(run)), 3)
            self.fsdp("convert", run, f"{run}-merged", "--to", "hf", "--merge")
        # Without its own weights a model takes the base that the adapters name.
        (self.root / "config-alone").mkdir()
        shutil.copy(self.root / "model/config.json", self.root / "config-alone")
        self.train("named", *lora, "--init", "first", model="config-alone", steps=1)
        self.assertIn("nowhere, which are not there; name their directory with --model",
                      self.train("never", *lora, "--init", "from-peft", model="config-alone", steps=1, code=1).stderr)

        # Its own advice works.
        for begin in ("first", "from-peft"):
            said = self.train("never", "--init", begin, code=2).stderr
            advised = re.search(r"holds adapters alone \(rank 4, alpha 12, on .*\); give (--lora .*) to train them on", said)[1]
            self.train(f"advised-{begin}", *advised.split(), "--init", begin, steps=1)
        for words, said in ((("--lora", 8), "has adapters of rank 4, alpha 12, on down_proj, q_proj, v_proj, but here are rank 8, alpha 16, on"),
                            (("--lora", RANK), "but here are rank 4, alpha 8, on")):
            for begin in ("first", "from-peft"):
                error = self.train("never", *words, "--init", begin, code=2).stderr
                self.assertIn(said, error)
                self.assertIn(f"give {advised}, or choose another --init", error)
        self.of_peft("second-layer", layers_to_transform=[1])
        self.assertIn("has adapters on 3 layers, and here are 6: 'model.layers.0.mlp.down_proj' has one in one of them alone",
                      self.train("never", *lora, "--init", "second-layer", code=2).stderr)
        self.train("second", "--lora", RANK, "--lora-alpha", ALPHA, "--lora-on", "*.1.*.q_proj", "*.1.*.v_proj", "*.1.*.down_proj",
                   "--init", "second-layer", steps=1)

    def test_adapters_of_peft_write_no_text(self):
        self.of_peft("mute")
        for words in (("generate", "--prompt", "1 "), ("eval", "--data", "text.bin")):
            said = self.fsdp(*words, "--checkpoint", "mute", "--model", "model", code=2).stderr
            advice = re.search("mute holds adapters alone, as PEFT writes them; .*: fsdp (convert mute DIR .*)\\.\n", said)[1]
            self.assertNotIn("layers.0", said)
        self.fsdp(*advice.replace("DIR", "vocal").split())
        self.fsdp("generate", "--checkpoint", "vocal", "--prompt", "1 ", "--tokens", 2)

    def test_checkpoints_have_adapters_alone(self):
        self.train("small", "--lora", RANK, "--ranks", 2, steps=3)
        self.train("small", "--lora", RANK, "--ranks", 2)
        self.train("at-once", "--lora", RANK, "--ranks", 2)
        self.assertEqual(self.losses("small"), self.losses("at-once"))
        self.train("small", "--lora", RANK, steps=STEPS + 1)  # on another number of ranks
        inspected = self.fsdp("inspect", "small", "--json").stdout
        stored = [path for path in (self.root / "small").rglob("*.safetensors")]
        names = {name for path in stored for name in small_runs.stored_tensors(path.read_bytes())}
        self.assertTrue(names and all(".lora_" in name for name in names), names)
        self.assertNotIn("embed_tokens.weight\": {", inspected)
        self.fsdp("convert", "small", "cut", "--to", "sharded", "--ranks", 3)
        for each in ("small", "cut"):
            self.fsdp("convert", each, f"{each}-peft", "--to", "peft")
        first, second = (safetensors.torch.load_file(self.root / f"{each}-peft/adapter_model.safetensors")
                         for each in ("small", "cut"))
        self.assertTrue(all(torch.equal(first[name], second[name]) for name in first))
        before = self.fsdp("eval", "--checkpoint", "small", "--data", "text.bin", "--json").stdout
        self.fsdp("convert", "small", "small-merged", "--to", "hf", "--merge")
        after = self.fsdp("eval", "--checkpoint", "small-merged", "--data", "text.bin", "--sequence", SEQUENCE, "--json").stdout
        self.assertAlmostEqual(json.loads(before)["loss"], json.loads(after)["loss"], delta=TOLERANCE)

    def test_narrow_weights_are_rounded_once(self):
        shutil.copytree(self.root / "model", self.root / "narrow")
        self.base.to(torch.bfloat16).save_pretrained(self.root / "narrow")
        self.base.to(torch.float32)
        self.train("of-narrow", "--lora", RANK, model="narrow")
        self.fsdp("convert", "of-narrow", "narrow-peft", "--to", "peft")
        self.fsdp("convert", "of-narrow", "narrow-merged", "--to", "hf", "--merge")
        adapters = safetensors.torch.load_file(self.root / "narrow-peft/adapter_model.safetensors")
        base, merged = (safetensors.torch.load_file(self.root / each / "model.safetensors") for each in ("narrow", "narrow-merged"))
        for name, weight in base.items():
            a, b = (adapters.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{x}.weight") for x in "AB")
            whole = weight.float() if a is None else weight.float() + 2 * b @ a
            self.assertEqual(merged[name].dtype, torch.bfloat16)
            # Products in another order may round to the neighbour.
            torch.testing.assert_close(merged[name], whole.bfloat16(), rtol=2**-7, atol=0, msg=name)
            self.assertLess((merged[name] != whole.bfloat16()).float().mean(), 0.01, name)

    def test_plan_knows_the_bytes(self):
        def planned(*words):
            return json.loads(self.fsdp("plan", "--model", "model", "--ranks", 1, "--json", *words).stdout)["bytes"]
        whole, lora, codes = planned(), planned("--lora", RANK), planned("--lora", RANK, "--weights", "fp8-row")
        adapters = sum(RANK * sum(each.shape) for name, each in self.base.named_parameters()
                       if name.endswith("proj.weight"))
        self.assertEqual(lora["moments"], 2 * 4 * adapters)
        self.assertEqual(lora["weight"], whole["weight"] + 2 * adapters)
        self.assertLess(codes["weight"], lora["weight"])
        self.assertEqual(codes["moments"], lora["moments"])

        self.assertIn("--tp is 2, whose ranks do not share out adapters",
                      self.fsdp("plan", "--model", "model", "--ranks", 2, "--tp", 2, "--lora", RANK, code=2).stderr)

    def test_what_cannot_be(self):
        self.train("refused", "--lora", RANK, steps=2)
        self.train("full", steps=2)
        shutil.copytree(self.root / "model", self.root / "other")
        tensors = safetensors.torch.load_file(self.root / "model/model.safetensors")
        safetensors.torch.save_file({name: value + 1 for name, value in tensors.items()}, self.root / "other/model.safetensors",
                                    metadata={"format": "pt"})
        lora = ("--lora", RANK)
        for begin, words in (
                ((*lora, "--init", "none"), "no weights are loaded; give a --model directory with weights, or --init"),
                (("--lora-alpha", 8), "--lora-alpha is given without --lora"),
                ((*lora, "--tp", 2, "--ranks", 2), "--tp is 2, whose ranks do not share out adapters"),
                ((*lora, "--optimizer", "muon"), "which is for the matrices that --lora freezes"),
                ((*lora, "--patches", "p"), "which is of weights that --lora freezes"),
                ((*lora, "--export-dir", "e"), "fsdp convert writes adapters (--to peft) and merged weights"),
                ((*lora, "--lora-on", "w_proj"), "--lora-on has 'w_proj', which names no linear layer"),
                (("--init", "refused"), "holds adapters alone (rank 4, alpha 8")):
            self.assertIn(words, self.train("never", *begin, code=2).stderr)
        for run, begin, words in (
                ("refused", (), "give --lora 4 --lora-on down_proj gate_proj k_proj o_proj q_proj up_proj v_proj to train them on"),
                ("refused", ("--lora", 8), "but here are rank 8"),
                ("refused", (*lora, "--init", "other"), "which were others than those of"),
                ("full", lora, "has whole weights and no adapters")):
            self.assertIn(words, self.train(run, *begin, code=2, steps=3).stderr)
        for given, words in (
                (("refused", "x", "--to", "hf"), "--merge makes whole weights of them, and --to peft writes them for PEFT"),
                (("full", "x", "--to", "peft"), "has no adapters; use --to hf"),
                (("full", "x", "--to", "hf", "--merge"), "has no adapters; drop --merge"),
                (("refused", "x", "--to", "hf", "--merge", "--base", "other"), "are others than those")):
            self.assertIn(words, self.fsdp("convert", *given, code=1).stderr)
        (self.root / "model").rename(self.root / "moved")
        try:
            asked = ("generate", "--checkpoint", "refused", "--prompt", "1 ", "--tokens", 3)
            self.assertIn("which are not there; name their directory with --model", self.fsdp(*asked, code=1).stderr)
            self.fsdp(*asked, "--model", "moved")
            self.fsdp("convert", "refused", "from-moved", "--to", "hf", "--merge", "--base", "moved")
        finally:
            (self.root / "moved").rename(self.root / "model")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
