"""Patches whose checksums are right, and whose content is right or wrong: one table for the receivers in C++ and in Python.

write_all(directory) yields (name, path, whether it is a patch as docs/weights-out.md describes it). No torch here.
"""

import json
import os
import pathlib
import struct

import small_runs

BASE = "90f0a3c1d2e4b587"
TENSORS = {"a": {"dtype": "F32", "shape": [2, 3]}, "b": {"dtype": "U8", "shape": [4]}}


def values(name, numbers):
    if name == "a":
        return (f"values/{name}", "F32", [len(numbers)], struct.pack(f"<{len(numbers)}f", *numbers))
    return (f"values/{name}", "U8", [len(numbers)], bytes(numbers))


def ranges(name, *pairs, shape=None):
    flat = [number for pair in pairs for number in pair]
    return (f"ranges/{name}", "I64", shape or [len(pairs), 2], struct.pack(f"<{len(flat)}q", *flat))


def skips(name, *numbers, shape=None):
    return (f"skips/{name}", "U8", shape or [len(numbers)], bytes(numbers))


A = [values("a", range(6)), ranges("a", (0, 6))]
B = [values("b", range(4)), ranges("b", (0, 4))]
FULL, STEP = {"from": None, "to": 1}, {"from": 0, "to": 1}

# name: (facts of patch.json, the content of each file)
GOOD = {
    "a full patch": (FULL, [A + B]),
    "a full patch of two ranks": (FULL, [[values("a", [1, 2]), ranges("a", (1, 3))] + B, [values("a", [0, 3, 4, 5]), ranges("a", (0, 1), (3, 6))]]),
    "a full patch whose elements are skips": (FULL, [[values("a", range(6)), skips("a", *[0] * 6)] + B]),
    "one element": (STEP, [[values("a", [7]), skips("a", 5)]]),
    "skips of two bytes": (STEP, [[values("a", [7, 8]), skips("a", 1, 0, 2, 0, shape=[2, 2])]]),
    "nothing": (STEP, [[]]),
    "ranks that change neighbours": (STEP, [[values("a", [1, 2]), skips("a", 0, 1)], [values("a", [3, 4]), skips("a", 1, 1)]]),
}
BAD = {
    "half of a full patch": (FULL, [B + [values("a", [1, 2]), ranges("a", (1, 3))]]),
    "a full patch without a tensor": (FULL, [A]),
    "a gap in a full patch": (FULL, [B + [values("a", range(5)), ranges("a", (0, 2), (3, 6))]]),
    "as many elements as the full patch needs, one twice and one never": (FULL, [B + [values("a", range(3)), ranges("a", (0, 3))],
                                                                                 [values("a", range(3)), ranges("a", (2, 5))]]),
    "two files with the same element": (STEP, [[values("a", [1]), skips("a", 4)], [values("a", [2, 3]), skips("a", 0, 3)]]),
    "ranges that overlap": (STEP, [[values("a", range(4)), ranges("a", (0, 2), (1, 3))]]),
    "ranges that touch": (STEP, [[values("a", range(4)), ranges("a", (0, 2), (2, 4))]]),
    "ranges that descend": (STEP, [[values("a", range(4)), ranges("a", (4, 6), (0, 2))]]),
    "a negative range": (STEP, [[values("a", range(3)), ranges("a", (-1, 2))]]),
    "a range of negative length": (STEP, [[values("a", [1]), ranges("a", (0, 3), (5, 3))]]),
    "an empty range": (STEP, [[values("a", []), ranges("a", (2, 2))]]),
    "a range beyond the end": (STEP, [[values("a", range(3)), ranges("a", (4, 7))]]),
    "a skip beyond the end": (STEP, [[values("a", [1]), skips("a", 6)]]),
    "more values than positions": (STEP, [[values("a", [1, 2]), skips("a", 1)]]),
    "positions without values": (STEP, [[skips("a", 1)]]),
    "values without positions": (STEP, [[values("a", [1])]]),
    "values with two lists of positions": (STEP, [[values("a", [1]), skips("a", 1), ranges("a", (1, 2))]]),
    "values of another type": (STEP, [[("values/a", "I32", [1], bytes(4)), skips("a", 1)]]),
    "values of two dimensions": (STEP, [[("values/a", "F32", [1, 1], bytes(4)), skips("a", 1)]]),
    "ranges in threes": (STEP, [[values("a", [1, 2, 3]), ranges("a", (0, 1, 3), shape=[1, 3])]]),
    "ranges of another type": (STEP, [[values("a", [1]), ("ranges/a", "I32", [1, 2], struct.pack("<2i", 0, 1))]]),
    "skips of three bytes": (STEP, [[values("a", [1]), skips("a", 1, 0, 0, shape=[1, 3])]]),
    "skips of another type": (STEP, [[values("a", [1]), ("skips/a", "I8", [1], b"\1")]]),
    "a tensor that is not in the record": (STEP, [[values("b", [1]), skips("b", 1), ("values/c", "U8", [1], b"\1"), skips("c", 1)]]),
    "a list of another kind": (STEP, [[("more/a", "U8", [1], b"\1")]]),
    "a negative step": ({"from": -1, "to": 1}, [[]]),
    "a step back": ({"from": 3, "to": 1}, [[]]),
    "a step to itself": ({"from": 1, "to": 1}, [[]]),
    "a negative last step": ({"from": None, "to": -1}, [A + B]),
    "a step in words": ({"from": "0", "to": 1}, [[]]),
    "a base that is none": ({**STEP, "base": "../../etc/passwd"}, [[]]),
    "a huge shape": ({**STEP, "tensors": {"a": {"dtype": "F32", "shape": [1 << 40, 1 << 40]}}}, [[]]),
    "a negative shape": ({**STEP, "tensors": {"a": {"dtype": "F32", "shape": [-2, -3]}}}, [[]]),
    "an unknown type": ({**STEP, "tensors": {"a": {"dtype": "F31", "shape": [6]}}}, [[]]),
}


def content(entries):
    header, data = [], b""
    for key, dtype, shape, stored in entries:  # as text, so that a key may come twice
        header.append(f"{json.dumps(key)}:" + json.dumps({"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(stored)]}))
        data += stored
    text = ("{" + ",".join(header) + "}").encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def write(path, facts, contents, names=None):
    """`contents`: the bytes of each file."""
    path = pathlib.Path(path)
    path.mkdir(parents=True)
    files = []
    for rank, stored in enumerate(contents):
        files.append({"path": names[rank] if names else f"{rank:05}.safetensors", "bytes": len(stored), "crc32c": small_runs.crc32c(stored)})
        (path / files[-1]["path"]).write_bytes(stored)
    record = {"format": "fsdp patch", "version": 1, "base": BASE, "begun": 1, "from": None, "to": 0, "names": "hf", "tensors": TENSORS,
              "files": files, **facts}
    seal(path / "patch.json", ",\n".join(f" {json.dumps(field)}: {json.dumps(value)}" for field, value in record.items()))
    return path


def seal(file, lines):
    checksum = small_runs.crc32c(f"{{\n{lines}\n}}\n".encode())
    file.write_text(f'{{\n{lines},\n "crc32c": {checksum}\n}}\n')


def write_all(directory):
    place = pathlib.Path(directory)
    for number, (name, (facts, files)) in enumerate((GOOD | BAD).items()):
        yield name, write(place / str(number), facts, [content(entries) for entries in files]), name in GOOD
    one = content([values("a", [7]), skips("a", 5)])
    yield "a file outside of the patch", write(place / "out/side", STEP, [one], names=["../file.safetensors"]), False
    yield "a file twice", write(place / "twice", STEP, [one, one], names=["x", "x"]), False
    yield "a key twice in a file", write(place / "keys", STEP, [content([values("a", [7]), skips("a", 5), skips("a", 1)])]), False
    yield "a header longer than its file", write(place / "header", STEP, [struct.pack("<Q", 1 << 60) + b"{}"]), False
    yield "an empty file", write(place / "empty", STEP, [b""]), False
    path = write(place / "fields", STEP, [one])
    lines = (path / "patch.json").read_text().split(',\n "crc32c": ')[0][2:]
    seal(path / "patch.json", lines + ',\n "to": 2')
    yield "a key twice in the record", path, False
    for file in ("patch.json", "00000.safetensors"):
        path = write(place / f"pipe-{file}", STEP, [one])
        (path / file).unlink()
        os.mkfifo(path / file)
        yield f"a pipe in place of {file}", path, False
