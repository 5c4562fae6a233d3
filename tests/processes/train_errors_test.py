"""Every wrong input of `fsdp train`, `generate`, `eval` and `data` is answered with one sentence, and nothing is left.

Usage: train_errors_test.py FSDP
"""

import os
import pathlib
import re
import shutil
import struct
import sys
import tempfile
import unittest
from concurrent.futures import ThreadPoolExecutor

import small_runs
import train_errors_table as table

FSDP = sys.argv[1]
# A sentence for people does not have these: names of classes, places in sources, stack traces.
NOT_FOR_PEOPLE = ("std::", "c10::", "what():", "terminate", "Exception", "frame #", ".cpp:", ".h:", "core dumped", "basic_")
# These are found when the run's directory and the log in it are there already.
LEAVES = {"train --report pipe": ["new", "new/log.jsonl"],
          "train --trace pipe": ["new", "new/log.jsonl", "new/report.html"],
          "train --sequence 64 --batch 1073741824": ["new", "new/log.jsonl", "new/report.html"]}


def token_file(tokens, vocabulary, tokenizer):
    """A packed token file as docs/data.md describes it."""
    data = struct.pack(f"<{len(tokens)}H", *tokens)
    head = struct.pack("<8sIIQQQQ64sIQ", b"fsdptok\n", 1, 2, vocabulary, len(tokens), 1, 2**64 - 1, tokenizer.encode(),
                       small_runs.crc32c(data), 0)
    return head + struct.pack("<I", small_runs.crc32c(head)) + data


CONFIGS = {
    "foreign": '{"fp16": true}',
    "unknown": '{"stepz": 3}', "far": '{"zzzzzzzzzz": 3}', "dash": '{"checkpoint-dir": "a"}', "type": '{"steps": "many"}',
    "list": '{"steps": [1,2]}', "object": '{"steps": {"a": 1}}', "null": '{"steps": null}', "flag": '{"quiet": "perhaps"}',
    "twice": '{"steps": 1, "steps": 2}', "array": "[1]", "broken": '{"steps": 1', "empty": "", "zero": '{"steps": 1}\0x',
    "deep": "[" * 200}
MODELS = {
    "wide": {"hidden_size": 32}, "theta": {"rope_theta": 500.0}, "vocabulary": {"vocab_size": 100}, "odd": {"hidden_size": 15},
    "heads": {"num_attention_heads": 4, "num_key_value_heads": 3}, "text": {"hidden_size": "wide"},
    "type": {"model_type": "lama"}, "dropout": {"attention_dropout": 0.5}, "layers": {"num_hidden_layers": -1},
    "missing": {"hidden_size": None}, "rope": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "scaling": {"rope_scaling": {"rope_type": "llama3"}}, "head": {"head_dim": 0}, "deep": {"num_hidden_layers": 20000}}


def write_inputs(root):
    """Files that are wrong in one way each, and a few that are right."""
    for name, text in CONFIGS.items():
        (root / f"{name}.json").write_text(text)
    small_runs.write_model(root / "model" / "config.json")
    for name, fields in MODELS.items():
        small_runs.write_model(root / "model" / f"{name}.json", **fields)
    (root / "model" / "broken.json").write_text("{")
    missing = root / "model" / "missing.json"
    missing.write_text(missing.read_text().replace('"hidden_size": null, ', ""))
    small_runs.write_text(root / "text.txt")
    small_runs.write_text(root / "more.txt", copies=70)
    (root / "short.txt").write_text("short")
    (root / "empty.txt").write_text("")
    (root / "folder").mkdir()
    (root / "binary").mkdir()
    (root / "binary" / "a.dat").write_bytes(bytes(range(256)) * 20)
    os.mkfifo(root / "pipe")
    good = token_file([b % 256 for b in range(3000)], 257, "bytes")
    for name in ("other", "another"):
        (root / f"{name}.bin").write_bytes(token_file([b % 1000 for b in range(3000)], 1000, name))
    (root / "beyond.bin").write_bytes(token_file([7] * 2999 + [300], 257, "bytes"))
    (root / "rows.jsonl").write_text('{"text": "a rank is a process"}\n{"body": "a shard"}\n')
    tensor = b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (root / "plain").mkdir()
    (root / "plain" / "model.safetensors").write_bytes(struct.pack("<Q", len(tensor)) + tensor + bytes(4))
    (root / "bad.bin").write_text("text, and no token file at all " * 10)
    (root / "cut.bin").write_bytes(good[:-10])
    (root / "header.bin").write_bytes(good[:20] + bytes([good[20] ^ 1]) + good[21:])


def write_runs(root):
    """Runs of four steps: whole ones, and what damage makes of them."""
    for name, model in (("done", "model/config.json"), ("other", "model/wide.json")):
        words = table.arguments_of((f"train --steps 4 --checkpoint-dir {name} --model {model}",))
        small_runs.run([FSDP, *words], cwd=root)
    for name in ("damaged", "gone", "incomplete", "future"):
        shutil.copytree(root / "done", root / name)
    weights = "step-00000004/model/00000-0.safetensors"
    data = bytearray((root / "damaged" / weights).read_bytes())
    data[-5] ^= 1
    (root / "damaged" / weights).write_bytes(data)
    (root / "gone" / weights).unlink()
    (root / "incomplete" / "step-00000004" / "manifest.json").unlink()
    manifest = root / "future" / "step-00000004" / "manifest.json"
    text = manifest.read_text()
    newer = text.replace('"version": 2', '"version": 99').replace('"crc32c"', '"checksum"')
    assert newer != text
    manifest.write_text(newer)


def tree(root):
    """Every file and directory with what shows that it was touched."""
    found = {}
    for path in root.rglob("*"):
        status = path.lstat()
        found[str(path.relative_to(root))] = None if path.is_dir() else (status.st_size, status.st_mtime_ns)
    return found


class WrongInputs(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.root = pathlib.Path(folder.name)
        write_inputs(cls.root)
        write_runs(cls.root)
        # One for each row would be slow, so two are used by turns: rows run side by side must not see each other.
        cls.copies = []
        for number in range(2):
            copy = cls.root.parent / f"{cls.root.name}-{number}"
            shutil.copytree(cls.root, copy, ignore=lambda *_: ["pipe"])
            os.mkfifo(copy / "pipe")
            cls.addClassCleanup(shutil.rmtree, copy)
            cls.copies.append(copy)

    def check(self, row, code, root):
        """Returns what is wrong with an answer; "" for nothing."""
        before = tree(root)
        environment = row[2] if len(row) > 2 else {}
        done = small_runs.run([FSDP, *table.arguments_of(row)], cwd=root, code=None, timeout=60, **environment)
        faults = []
        if done.returncode != code:
            faults.append(f"exit code {done.returncode}, not {code}")
        lines = done.stderr.splitlines()
        if len(lines) != 1:
            faults.append(f"{len(lines)} lines")
        elif not re.fullmatch(r"fsdp: .*[^.?][.?]", lines[0]):
            faults.append("not one sentence of fsdp")
        if row[1] not in done.stderr:
            faults.append(f"'{row[1]}' is not in it")
        faults += [f"'{each}' is in it" for each in NOT_FOR_PEOPLE if each in done.stderr]
        after = tree(root)
        new = sorted(each for each in after if each not in before)
        if new != LEAVES.get(row[0], []):
            faults.append(f"left behind: {new}")
        faults += [f"{each} was changed" for each in before if after.get(each, "") != before[each]]
        if "new" in new:
            shutil.rmtree(root / "new")
        return f"{row[0]} {environment or ''}: {'; '.join(faults)}\n    {done.stderr}" if faults else ""

    def check_all(self, rows, code):
        def check_share(number):
            return [self.check(row, code, self.copies[number]) for row in rows[number::2]]

        with ThreadPoolExecutor(2) as pool:
            faults = [fault for share in pool.map(check_share, range(2)) for fault in share if fault]
        self.assertEqual(faults, [], "\n" + "\n".join(faults))

    def test_wrong_use_ends_with_2(self):
        self.check_all(table.USE, 2)

    def test_what_cannot_be_done_ends_with_1(self):
        self.check_all(table.FAILURES, 1)

    def test_no_row_is_there_twice(self):
        rows = [(row[0], str(row[2:])) for row in table.USE + table.FAILURES]
        self.assertEqual(len(set(rows)), len(rows))
        self.assertGreater(len(rows), 180)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
