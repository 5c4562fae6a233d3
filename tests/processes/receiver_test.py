"""The receiver of one file: patches written by the format's page make its weights the trainer's bits, or are refused.

Usage: receiver_test.py REPOSITORY
"""

import importlib.util
import json
import os
import pathlib
import random
import shutil
import sys
import tempfile
import unittest
import unittest.mock

try:
    import torch
except ImportError:
    print("skipped: needs Python's torch")
    sys.exit(0)

import patch_cases
import patch_writer
import small_runs

sys.path.insert(0, str(pathlib.Path(sys.argv[1]) / "python"))
import fsdp_receiver  # noqa: E402
from fsdp_receiver import Patch, PatchError, Receiver  # noqa: E402

BASE, OTHER_BASE = "90f0a3c1d2e4b587", "0123456789abcdef"
FORMS = ("skips1", "skips2", "ranges")


def same_bits(first, second):
    return first.keys() == second.keys() and all(
        torch.equal(value.contiguous().flatten().view(torch.uint8), second[name].contiguous().flatten().view(torch.uint8))
        for name, value in first.items())


def all_positions(weights):
    return {name: list(range(value.numel())) for name, value in weights.items()}


class Trainer:
    """Weights of several types that change, and the patches of it."""

    def __init__(self, directory, seed):
        self.directory, self.random, self.step = directory, random.Random(seed), 0
        torch.manual_seed(seed)
        self.weights = {"embed.weight": torch.randn(300, 7).bfloat16(), "layer.weight": torch.randn(5, 6, 7), "scale": torch.randn(()).half(),
                        "codes": torch.randn(64, 9).to(torch.float8_e4m3fn), "none": torch.zeros(0, 3)}

    def full(self, **options):
        return patch_writer.write(self.directory, self.weights, all_positions(self.weights), base=BASE, start=None, end=self.step,
                                  ranks=self.random.randint(1, 4), form="ranges", **options)

    def patch(self, steps=1, **options):
        """One patch of several steps, of a random share of the elements."""
        changed = {name: set() for name in self.weights}
        for _ in range(steps):
            density = self.random.choice([0, 0.001, 0.05, 0.9])
            for name, value in self.weights.items():
                bits = value.flatten().view(torch.uint8).view(-1, value.element_size())
                for position in range(value.numel()):
                    if self.random.random() < density:
                        bits[position] = torch.tensor([self.random.randrange(256) for _ in range(value.element_size())])
                        changed[name].add(position)
        start, self.step = self.step, self.step + steps
        return patch_writer.write(self.directory, self.weights, {name: sorted(positions) for name, positions in changed.items()}, base=BASE,
                                  start=start, end=self.step, ranks=self.random.randint(1, 4), form=self.random.choice(FORMS), **options)

    def copies(self):
        return {name: torch.zeros_like(value) for name, value in self.weights.items()}


class InAFolder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = folder.name

    def assert_refused(self, sentence, call):
        with self.assertRaises(PatchError) as caught:
            call()
        self.assertIn(sentence, str(caught.exception))
        self.assertNotIn("\n", str(caught.exception))


class Weights(InAFolder):
    def test_are_the_trainers_bits_after_every_patch(self):
        for seed in range(12):
            with self.subTest(seed=seed):
                directory = os.path.join(self.root, str(seed))
                os.makedirs(directory)
                trainer = Trainer(directory, seed)
                target = trainer.copies()
                receiver = Receiver(target)
                receiver.apply(trainer.full())
                self.assertTrue(same_bits(target, trainer.weights))
                for _ in range(6):
                    receiver.apply(trainer.patch(steps=trainer.random.randint(1, 3)))
                    self.assertTrue(same_bits(target, trainer.weights))
                    self.assertEqual((receiver.base, receiver.step), (BASE, trainer.step))

    def test_of_large_tensors_need_skips_of_many_numbers(self):
        torch.manual_seed(1)
        weights = {"w": torch.randn(200_001).bfloat16()}
        start = {"w": weights["w"].clone()}
        positions = sorted({0, 254, 255, 256, 511, 66_000, 131_535, 131_536, 200_000})
        weights["w"][positions] = torch.arange(len(positions)).bfloat16()
        for number, form in enumerate(FORMS):
            path = patch_writer.write(self.root, weights, {"w": positions}, base=BASE, start=number, end=number + 1, form=form)
            target = {"w": start["w"].clone()}
            Receiver(target, base=BASE, step=number).apply(path)
            self.assertTrue(same_bits(target, weights), form)

    def test_of_modules_and_of_tensors_that_are_not_contiguous_change_in_place(self):
        module = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5))
        module[0].weight.data = torch.zeros(6, 5).t()
        before = dict(module.named_parameters())
        weights = {name: torch.randn(value.shape) if value.is_floating_point() else value.clone() for name, value in module.state_dict().items()}
        weights = {f"model.{name}": value for name, value in weights.items()}
        path = patch_writer.write(self.root, weights, all_positions(weights), base=BASE, start=None, end=3)
        Receiver(module, rename=lambda name: name.removeprefix("model.")).apply(path)
        self.assertTrue(same_bits({f"model.{name}": value for name, value in module.state_dict().items()}, weights))
        self.assertTrue(all(value is before[name] for name, value in module.named_parameters()))

    def test_apply_the_same_patch_again_after_an_interruption(self):
        trainer = Trainer(self.root, 3)
        target = trainer.copies()
        Receiver(target).apply(trainer.full())
        path = trainer.patch()
        for _ in range(2):
            Receiver(target, base=BASE, step=0).apply(path)
            self.assertTrue(same_bits(target, trainer.weights))


class Refusals(InAFolder):
    def setUp(self):
        super().setUp()
        self.trainer = Trainer(self.root, 5)
        self.full = self.trainer.full()
        self.target = self.trainer.copies()
        self.receiver = Receiver(self.target)
        self.receiver.apply(self.full)
        self.before = {name: value.clone() for name, value in self.target.items()}

    def assert_refused(self, sentence, call):
        super().assert_refused(sentence, call)
        self.assertTrue(same_bits(self.target, self.before), "nothing changes")
        self.assertEqual((self.receiver.base, self.receiver.step), (BASE, 0))

    def test_of_a_gap_another_base_and_a_missing_beginning(self):
        self.trainer.patch()
        second = self.trainer.patch(steps=2)
        self.assert_refused("begins at step 1, and the weights here are of step 0; apply the patches in between, or a full one",
                            lambda: self.receiver.apply(second))
        other = patch_writer.write(self.root, self.trainer.weights, {"scale": [0]}, base=OTHER_BASE, start=0, end=9)
        self.assert_refused(f"has the base {OTHER_BASE}, and the weights here have {BASE}", lambda: self.receiver.apply(other))
        self.assert_refused("the weights here are of no known step; apply a full patch first", lambda: Receiver(self.target).apply(second))

    def test_of_every_damaged_file(self):
        path = pathlib.Path(self.trainer.patch())
        for file in sorted(path.iterdir()):
            content = file.read_bytes()
            for place in sorted(random.Random(1).sample(range(len(content)), min(len(content), 40))):
                file.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1:])
                self.assert_refused("is not what was written; it is damaged, so wait for another patch", lambda: self.receiver.apply(path))
            for shorter in (content[:-1], content[:5], content + b"\0"):
                file.write_bytes(shorter)
                self.assert_refused("is not what was written", lambda: self.receiver.apply(path))
            file.unlink()
            self.assert_refused("cannot be read: ", lambda: self.receiver.apply(path))
            file.write_bytes(content)
        self.receiver.apply(path)

    def test_of_patches_that_do_not_fit_their_own_words(self):
        weights = self.trainer.weights
        number = iter(range(10, 99))

        def patched(changed, **options):
            return patch_writer.write(self.root, weights, changed, base=BASE, start=0, end=next(number), **options)

        self.assert_refused("of version 2, and this receiver reads 'fsdp patch' up to version 1",
                            lambda: self.receiver.apply(patched({}, version=2)))
        small = {"scale": {"dtype": "F16", "shape": []}, "embed.weight": {"dtype": "BF16", "shape": [3, 7]}}
        for form in FORMS:
            self.assert_refused("its positions do not fit 1 values and the tensor's 21 elements",
                                lambda: self.receiver.apply(patched({"embed.weight": [21]}, form=form, tensors=small)))
        self.assert_refused("(ValueError: 'embed.weight' has the shape [1099511627776, 1099511627776])",
                            lambda: self.receiver.apply(patched({}, tensors={"embed.weight": {"dtype": "U8", "shape": [1 << 40, 1 << 40]}})))
        self.assert_refused("is not a patch as docs/weights-out.md describes it (KeyError: 'embed.weight')",
                            lambda: self.receiver.apply(patched({"embed.weight": [1]}, tensors={})))
        almost = all_positions(weights) | {"layer.weight": list(range(209))}
        self.assert_refused("is a full patch and has 209 of the 210 elements of 'layer.weight'",
                            lambda: self.receiver.apply(patch_writer.write(self.root, weights, almost, base=BASE, start=None, end=200)))

    def test_of_everything_that_the_table_of_patches_says(self):
        for name, path, fits in patch_cases.write_all(os.path.join(self.root, "cases")):
            with self.subTest(name):
                target = {"a": torch.full((2, 3), 9.0), "b": torch.full((4,), 9, dtype=torch.uint8)}
                receiver = Receiver(target, base=patch_cases.BASE, step=0)
                if fits:
                    receiver.apply(path)
                    continue
                with self.assertRaises(PatchError) as caught:
                    receiver.apply(path)
                self.assertNotIn("\n", str(caught.exception))
                self.assertTrue(all(bool((value == 9).all()) for value in target.values()), "nothing changes")
                self.assertEqual((receiver.base, receiver.step), (patch_cases.BASE, 0))

    def test_of_patches_that_another_secret_or_nobody_has_signed(self):
        path = self.trainer.patch()
        fsdp_receiver.sign(self.full, b"shared")
        self.receiver = Receiver(self.target, base=BASE, step=0, secret=b"shared")
        self.assertEqual(self.receiver.poll(self.root), [], "it may be signed soon")
        self.assert_refused("cannot be read", lambda: self.receiver.apply(path))
        fsdp_receiver.sign(path, b"another")
        self.assert_refused("was not signed with this receiver's secret", lambda: self.receiver.apply(path))
        self.assert_refused("was read without this receiver's secret", lambda: self.receiver.apply(Patch(path)))
        fsdp_receiver.sign(path, b"shared")
        file = pathlib.Path(path) / "patch.json"
        text = file.read_text()
        facts = text.replace('"names": "hf"', '"names": "hg"').split(',\n "crc32c": ')[0]
        patch_cases.seal(file, facts[2:])  # someone who knows the format and not the secret
        self.assert_refused("was not signed with this receiver's secret", lambda: self.receiver.apply(path))
        file.write_text(text)
        self.receiver.poll(self.root)
        self.assertTrue(same_bits(self.target, self.trainer.weights))

    def test_of_what_follows_a_full_patch_that_broke_off(self):
        class Full:  # a patch whose second tensor cannot be set
            def __init__(self, path):
                self.patch, self.num_tensors = Patch(path), 0

            def __getattr__(self, name):
                return getattr(self.patch, name)

            def put(self, name, flat):
                self.num_tensors += 1
                if self.num_tensors == 2:
                    raise MemoryError
                self.patch.put(name, flat)

        broken = Full(self.full)
        with unittest.mock.patch.object(fsdp_receiver, "Patch", Full), self.assertRaises(MemoryError):
            self.receiver.apply(broken)
        InAFolder.assert_refused(self, "the weights here are of no known step; apply a full patch first",
                                 lambda: self.receiver.apply(self.trainer.patch()))
        self.receiver.apply(self.full)

    def test_of_targets_that_are_another_model(self):
        path = self.trainer.patch()
        embed = self.target["embed.weight"]
        for name, value, sentence in (
                ("embed.weight", embed.float(), "'embed.weight' is torch.bfloat16 [300, 7], and the target's is torch.float32 [300, 7]"),
                ("embed.weight", embed[:, :6], "and the target's is torch.bfloat16 [300, 6]; make the target as the trainer's model is"),
                ("embed.weight", None, "has a tensor 'embed.weight', which the target does not have")):
            other = {**self.target, name: value}
            if value is None:
                del other[name]
            self.assert_refused(sentence, lambda: Receiver(other, base=BASE, step=0).apply(path))


class Polling(InAFolder):
    def steps(self, receiver):
        return [(patch.start, patch.end) for patch in receiver.poll(self.root)]

    def test_applies_what_continues_and_a_newer_full_patch_after_a_gap(self):
        trainer = Trainer(self.root, 7)
        target = trainer.copies()
        receiver = Receiver(target)
        self.assertEqual(receiver.poll(os.path.join(self.root, "not-there-yet")), [])
        self.assertEqual(self.steps(receiver), [])
        first = trainer.full()
        trainer.patch(steps=2)
        trainer.patch()
        os.makedirs(os.path.join(self.root, ".patch-00000003-00000004.x.tmp"))  # being written
        self.assertEqual(self.steps(receiver), [(None, 0), (0, 2), (2, 3)])
        self.assertTrue(same_bits(target, trainer.weights))
        self.assertEqual(self.steps(receiver), [])
        shutil.rmtree(trainer.patch())
        trainer.patch()
        self.assert_refused("has a patch from step 4 on, and none from step 3, which the weights are at; let the trainer write a full patch",
                            lambda: receiver.poll(self.root))
        trainer.full()
        self.assertEqual(self.steps(receiver), [(None, 5)])
        self.assertTrue(same_bits(target, trainer.weights))
        shutil.rmtree(first)
        trainer.patch()
        self.assertEqual(self.steps(receiver), [(5, 6)])
        self.assertEqual(self.steps(receiver), [], "never back to the full patch")

    def test_passes_over_a_damaged_patch_where_a_newer_full_one_is_there(self):
        trainer = Trainer(self.root, 9)
        target = trainer.copies()
        receiver = Receiver(target)
        trainer.full()
        damaged = trainer.patch()
        trainer.patch()
        file = pathlib.Path(damaged) / "patch.json"
        file.write_bytes(file.read_bytes().replace(b'"names": "hf"', b'"names": "hg"'))
        self.assert_refused("patch.json is not what was written; it is damaged", lambda: receiver.poll(self.root))
        self.assertEqual(receiver.step, 0)
        trainer.full()
        self.assertEqual(self.steps(receiver), [(None, 2)])
        self.assertTrue(same_bits(target, trainer.weights))
        os.remove(os.path.join(trainer.patch(), "00000.safetensors"))
        self.assert_refused("cannot be read", lambda: receiver.poll(self.root))

    def test_passes_over_patches_of_another_training_until_that_has_a_full_one(self):
        trainer = Trainer(self.root, 8)
        receiver = Receiver(trainer.copies())
        trainer.full()
        self.assertEqual(self.steps(receiver), [(None, 0)])
        patch_writer.write(self.root, trainer.weights, {}, base=OTHER_BASE, start=0, end=1)
        self.assertEqual(self.steps(receiver), [])
        for begun, end in ((1_600_000_000, 5), (1_700_000_005, 1)):  # an earlier training, and a later one
            patch_writer.write(self.root, trainer.weights, all_positions(trainer.weights), base=f"{begun:016x}", start=None, end=end, begun=begun)
        self.assertEqual(self.steps(receiver), [(None, 1)])
        self.assertEqual(receiver.base, f"{1_700_000_005:016x}")
        trainer.patch(steps=2)
        self.assertEqual(self.steps(receiver), [])


class Checksums(unittest.TestCase):
    def test_are_crc32c_of_any_length(self):
        self.assertEqual(fsdp_receiver.crc32c(torch.tensor(list(b"123456789"), dtype=torch.uint8)), 0xE3069283)
        generator = torch.Generator().manual_seed(1)
        before = fsdp_receiver._BLOCK_BYTES
        self.addCleanup(setattr, fsdp_receiver, "_BLOCK_BYTES", before)
        for block in (before, 1000):
            fsdp_receiver._BLOCK_BYTES = block
            for numel in (0, 1, 3, 4, 5, 63, 1000, 4096, 12_345):
                data = torch.randint(0, 256, (numel,), dtype=torch.uint8, generator=generator)
                self.assertEqual(fsdp_receiver.crc32c(data), small_runs.crc32c(bytes(data.tolist())), numel)


class FusedModel(torch.nn.Module):
    """Does what vLLM's models do: tensors of a checkpoint land in a fused parameter, of which this rank has a slice."""

    def __init__(self):
        super().__init__()
        self.gate_up = torch.nn.Parameter(torch.zeros(4, 6, dtype=torch.bfloat16))

    def load_weights(self, weights):
        for name, value in weights:
            place = {"gate.weight": 0, "up.weight": 2}[name]
            self.gate_up.data[place:place + 2].copy_(value[2:4])  # the second of two tp ranks
        return {"gate_up"}


class OfVllm(InAFolder):
    """vLLM's CheckpointWeightPatch: https://docs.vllm.ai/en/latest/api/vllm/model_executor/model_loader/checkpoint_weight_patch/"""

    def setUp(self):
        super().setUp()
        torch.manual_seed(2)
        self.first = {name: torch.randn(4, 6).bfloat16() for name in ("gate.weight", "up.weight")}
        self.full = Patch(patch_writer.write(self.root, self.first, all_positions(self.first), base=BASE, start=None, end=0, ranks=3))
        self.then = {name: value.clone() for name, value in self.first.items()}
        changed = {"gate.weight": [0, 13, 23], "up.weight": [12, 14]}
        for name, positions in changed.items():
            self.then[name].view(-1)[positions] += 1
        self.patch = Patch(patch_writer.write(self.root, self.then, changed, base=BASE, start=0, end=1, ranks=2))

    def test_fields_are_those_of_its_page(self):
        self.assertEqual(fsdp_receiver.Change._fields, ("name", "shape", "dtype", "values", "indices"))
        whole = {change.name: change for change in self.full.changes()}
        for name, value in self.first.items():
            self.assertIsNone(whole[name].indices)
            self.assertTrue(torch.equal(whole[name].values.view(whole[name].shape), value))
        for name, shape, dtype, values, indices in self.patch.changes():
            self.assertEqual((shape, dtype, values.dim(), indices.dtype), ((4, 6), torch.bfloat16, 1, torch.int64))
            self.assertTrue(torch.equal(self.first[name].flatten().index_copy(0, indices, values).view(shape), self.then[name]))

    def test_its_loader_makes_the_weights_the_trainers(self):
        found = os.environ.get("FSDP_VLLM")
        spec = None if found else importlib.util.find_spec("vllm")
        root = found or (spec and os.path.dirname(spec.origin))
        file = root and os.path.join(root, "model_executor/model_loader/checkpoint_weight_patch.py")
        if not file or not os.path.exists(file):
            self.skipTest("needs vLLM, or its package's folder in FSDP_VLLM")
        spec = importlib.util.spec_from_file_location("checkpoint_weight_patch", file)  # the file alone: the package needs a GPU
        vllm = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = vllm
        spec.loader.exec_module(vllm)
        model = FusedModel()
        for patch, weights in ((self.full, self.first), (self.patch, self.then)):
            vllm.load_checkpoint_weight_patches(model, (vllm.CheckpointWeightPatch(*change) for change in patch.changes()))
            expected = torch.cat([weights["gate.weight"][2:4], weights["up.weight"][2:4]])
            self.assertTrue(torch.equal(model.gate_up, expected))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
