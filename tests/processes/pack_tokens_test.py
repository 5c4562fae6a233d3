#!/usr/bin/env python3
"""tools/pack_tokens.py with a small tokenizer made here: `fsdp data info --verify` reads what it writes.

    pack_tokens_test.py FSDP PACK_TOKENS
"""

import json
import pathlib
import subprocess
import sys
import tempfile

try:
    import numpy
    import tokenizers
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(0)

FSDP, PACK = sys.argv[1:]
TEXTS = {"a.txt": "one two two", "sub/b.txt": "three one\n", ".hidden": "four", "zero": "one\0two"}
WORDS = ["one", "two", "three", "four", "\n"]


def run(*command):
    return subprocess.run(command, capture_output=True, text=True)


def word_tokenizer(path, extra_words=0):
    vocabulary = {word: i for i, word in enumerate(WORDS + ["</s>"] + [f"extra{i}" for i in range(extra_words)])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="four"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r" "), "removed")
    tokenizer.save(str(path))


def check(condition, words):
    if not condition:
        sys.exit(f"pack_tokens_test: {words}")


def pack_and_read(folder, width, extra_words):
    word_tokenizer(folder / "tokenizer.json", extra_words)
    output = folder / f"out{width}.bin"
    packed = run(sys.executable, PACK, str(folder / "text"), "--tokenizer", str(folder), "--output", str(output),
                 "--end-of-document", "</s>", "--name", "words")
    check(packed.returncode == 0, packed.stderr)
    info = run(FSDP, "data", "info", str(output), "--verify", "--json")
    check(info.returncode == 0, info.stderr)
    found = json.loads(info.stdout)
    expected = {"tokens": 7, "documents": 2, "tokenizer": "words", "vocabulary": 6 + extra_words, "end_of_document": 5,
                "token_bytes": width, "verified": True}
    check({key: found[key] for key in expected} == expected, f"{found} is not {expected}")
    tokens = numpy.fromfile(output, f"<u{width}", offset=128).tolist()
    check(tokens == [0, 1, 1, 5, 2, 3, 5], f"tokens are {tokens}")  # "one\n" is one unknown word


def check_checksums(folder):
    """Of data of many lengths: fsdp's own checksums are the reference."""
    word_tokenizer(folder / "tokenizer.json")
    for count in [1, 2, 3, 7, 8, 100, 1000, 4097]:
        text = folder / "long.txt"
        text.write_text(" ".join(WORDS[i % 3] for i in range(count)))
        output = folder / "long.bin"
        packed = run(sys.executable, PACK, str(text), str(text), "--tokenizer", str(folder), "--output", str(output))
        check(packed.returncode == 0, packed.stderr)
        info = run(FSDP, "data", "info", str(output), "--verify")
        check(info.returncode == 0 and f"{2 * count:,} of 2 bytes" in info.stdout, info.stdout + info.stderr)


def check_json_lines(folder):
    """A line is a document; without --field it is no text."""
    rows, output = folder / "rows.jsonl", folder / "rows.bin"
    command = [sys.executable, PACK, str(rows), "--tokenizer", str(folder), "--output", str(output),
               "--end-of-document", "</s>"]
    rows.write_text('{"text": "one two", "id": 1}\n{"text": "three"}\n')
    wrong = run(*command)
    check(wrong.returncode != 0 and "has JSON objects as lines; name the field" in wrong.stderr, wrong.stderr)
    packed = run(*command, "--field", "text")
    check(packed.returncode == 0 and "5 tokens, 2 documents" in packed.stdout, packed.stdout)
    tokens = numpy.fromfile(output, "<u2", offset=128).tolist()
    check(tokens == [0, 1, 5, 2, 5], f"tokens are {tokens}")
    for line in ("[]", "{", '{"id": 2}', '{"text": 3}'):
        rows.write_text('{"text": "one"}\n' + line + "\n")
        wrong = run(*command, "--field", "text")
        check(wrong.returncode != 0 and "line 2 is no JSON object with a text named 'text'" in wrong.stderr, wrong.stderr)


def check_errors(folder):
    wrong = run(sys.executable, PACK, str(folder / "text"), "--tokenizer", str(folder / "none"), "--output", "x.bin")
    check(wrong.returncode != 0 and "cannot be read" in wrong.stderr, wrong.stderr)
    output = folder / "never.bin"
    wrong = run(sys.executable, PACK, str(folder / "text"), "--tokenizer", str(folder), "--output", str(output),
                "--end-of-document", "nothing")
    check(wrong.returncode != 0 and "has no such token" in wrong.stderr, wrong.stderr)
    check(not list(folder.glob("*never*")) and not list(folder.glob(".*never*")), "a file is left")


with tempfile.TemporaryDirectory() as name:
    root = pathlib.Path(name)
    for path, text in TEXTS.items():
        target = root / "text" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    pack_and_read(root, 2, 0)
    pack_and_read(root, 4, 70000)
    check_checksums(root)
    check_json_lines(root)
    check_errors(root)
print("pack_tokens_test: fine")
