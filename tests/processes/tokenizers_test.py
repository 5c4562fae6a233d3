#!/usr/bin/env python3
"""`fsdp data pack` with tokenizers of others: the ids are theirs, rows become documents, wrong input is one sentence.

    tokenizers_test.py FSDP
"""

import importlib.util
import json
import os
import pathlib
import random
import sys
import tempfile

try:
    import numpy
    import small_runs
    import tokenizer_files
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(0)

FSDP = sys.argv[1]
NOT_LEARNT = 1 << 15  # the highest bit of a token of two bytes


def run(*command, **environment):
    return small_runs.run([FSDP, *command], ".", code=None, **{"FSDP_PYTHON": sys.executable, **environment})


def check(condition, words):
    if not condition:
        sys.exit(f"tokenizers_test: {words}")


def packed(folder, *inputs, tokenizer, **environment):
    """The tokens of a file that is packed and verified, and what it says of itself."""
    output = folder / "out.bin"
    done = run("data", "pack", *inputs, "--tokenizer", tokenizer, "--output", output, "--overwrite", **environment)
    check(done.returncode == 0, done.stderr)
    info = run("data", "info", output, "--verify", "--json")
    check(info.returncode == 0, info.stderr)
    facts = json.loads(info.stdout)
    return numpy.fromfile(output, f"<u{facts['token_bytes']}", offset=128).tolist(), facts


def refused(*command, words, **environment):
    done = run(*command, **environment)
    lines = done.stderr.strip().splitlines()
    check(done.returncode != 0 and len(lines) == 1 and words in done.stderr, f"{words!r} is not in: {done.stderr!r}")


def check_ids_of_every_kind(folder):
    texts = {"a.txt": "the rank of\n\n  a tensor", "sub/b.txt": "\u65e5\u672c\u8a9e \U0001f680 na\u00efve </s> x\n"}
    for name, text in texts.items():
        (folder / "text" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "text" / name).write_text(text)
    for kind in tokenizer_files.KINDS:
        theirs = tokenizer_files.make_tokenizer(folder / kind, kind, config={"eos_token": "</s>"})
        end = theirs.token_to_id("</s>")
        expected = [token for text in texts.values() for token in [*theirs.encode(text).ids, end]]
        tokens, facts = packed(folder, folder / "text", tokenizer=folder / kind)
        check(tokens == expected, f"{kind}: {tokens} is not {expected}")
        check(facts["documents"] == 2 and facts["end_of_document"] == end, facts)
        check(facts["vocabulary"] == theirs.get_vocab_size(), facts)
        check(facts["tokenizer"].startswith(f"hf-{kind}-"), facts)


def check_begin_tokens_and_the_given_end(folder):
    """Tokens that the tokenizer puts around a text are kept; --end-of-document chooses another end."""
    theirs = tokenizer_files.make_tokenizer(folder / "bos", special=["<s>", "</s>", "<x>"], bos="<s>")
    (folder / "one.txt").write_text("one two")
    tokens, _ = packed(folder, folder / "one.txt", tokenizer=folder / "bos" / "tokenizer.json")
    check(tokens == [*theirs.encode("one two").ids, theirs.token_to_id("</s>")] and
          tokens[0] == theirs.token_to_id("<s>"), tokens)
    done = run("data", "pack", folder / "one.txt", "--tokenizer", folder / "bos", "--end-of-document", "<x>",
               "--output", folder / "x.bin")
    check(done.returncode == 0, done.stderr)
    tokens = numpy.fromfile(folder / "x.bin", "<u2", offset=128).tolist()
    check(tokens[-1] == theirs.token_to_id("<x>"), tokens)


def check_long_text(folder):
    """A text that comes in pieces has the tokens of the whole one."""
    theirs = tokenizer_files.make_tokenizer(folder / "long", config={"eos_token": "</s>"})
    text = tokenizer_files.sentences(3000, seed=2) * 40
    check(len(text.encode()) > 4 << 20, "the text is too short to be cut")
    (folder / "long.txt").write_text(text)
    tokens, facts = packed(folder, folder / "long.txt", tokenizer=folder / "long")
    check(tokens == [*theirs.encode(text).ids, theirs.token_to_id("</s>")], "a long text has other tokens")
    check(facts["documents"] == 1, facts)


# The cuts of GPT-2, Llama 3, Qwen 2.5 and GPT-4o; and one that is not known, so that it gets whole texts.
CUTS = [None, *(cut.replace("SUFFIX", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)") for cut in (
    r"SUFFIX|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"SUFFIX|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+SUFFIX?|[^\r\n\p{L}\p{N}]?"
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*SUFFIX?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
    r"\p{L}+ \p{L}+|\s+|\S"))]


def check_words(folder):
    """Words that are encoded once and put together have the tokens of whole texts, masks included."""
    draw = random.Random(11)
    parts = [*"ab1 9\n\t.'/<|_-", "  ", "\n\n", "'s", "'S", "Don't", "</s>", "<s", "</s", "\u0301", "\u00e9", "e\u0301", "\u3000",
             "\u00a0", "\u2003", "\u65e5\u672c", "\u0440\u0443\u0441", "\U0001f680", "\u212a", "\x1c", "\x7f", " the rank", "ab", "1234"]
    texts = ["".join(draw.choices(parts, k=draw.randint(1, 25))) for _ in range(1500)]
    rows = write_rows(folder / "words.jsonl", *({"text": text} for text in texts))
    pairs = write_rows(folder / "words_pairs.jsonl", *({"prompt": a, "completion": b} for a, b in zip(texts, texts[1:])))
    for number, cut in enumerate(CUTS):
        theirs = tokenizer_files.make_tokenizer(folder / f"words{number}", special=["<s>", "</s>"], bos="<s>", cut=cut)
        end = theirs.token_to_id("</s>")
        expected = [[*theirs.encode(text).ids] for text in texts]
        tokens, _ = packed(folder, rows, tokenizer=folder / f"words{number}")
        check(tokens == [t for ids in expected for t in (ids if ids[-1] == end else [*ids, end])], f"other tokens with {cut}")
        masked = []
        for prompt, completion in zip(texts, texts[1:]):
            found = theirs.encode(prompt + completion)
            row = [t | (0 if max(last, first + 1) > len(prompt) and (first or last) else NOT_LEARNT)
                   for t, (first, last) in zip(found.ids, found.offsets)]
            if found.ids[-1] != end:
                row.append(end)
            row[-1] &= ~NOT_LEARNT
            masked.extend(row)
        check(packed(folder, pairs, tokenizer=folder / f"words{number}")[0] == masked, f"another mask with {cut}")


def write_rows(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def check_rows(folder):
    theirs = tokenizer_files.make_tokenizer(folder / "rows", config={"eos_token": "</s>"})
    end = theirs.token_to_id("</s>")
    ids = {text: theirs.encode(text).ids for text in ("one two", "three", "the rank of", " a tensor", "the rank of a tensor")}
    rows = write_rows(folder / "rows.jsonl", {"text": "one two", "id": 1}, "", {"text": "three"})
    expected = [*ids["one two"], end, *ids["three"], end]
    check(packed(folder, rows, tokenizer=folder / "rows")[0] == expected, "rows of text")
    write_rows(folder / "body.jsonl", {"body": "one two"}, {"body": "three"})
    done = run("data", "pack", folder / "body.jsonl", "--field", "body", "--tokenizer", folder / "rows",
               "--output", folder / "body.bin")
    check(done.returncode == 0, done.stderr)
    check(numpy.fromfile(folder / "body.bin", "<u2", offset=128).tolist() == expected, "rows of another field")
    pairs = write_rows(folder / "pairs.jsonl", {"prompt": "the rank of", "completion": " a tensor"})
    tokens, facts = packed(folder, pairs, tokenizer=folder / "rows")
    expected = [token | NOT_LEARNT for token in ids["the rank of"]] + [*ids[" a tensor"], end]
    check(tokens == expected and [t & ~NOT_LEARNT for t in tokens[:-1]] == ids["the rank of a tensor"], tokens)
    check(facts["documents"] == 1, facts)
    info = json.loads(run("data", "info", pairs, "--tokenizer", folder / "rows", "--json").stdout)
    check(info["fingerprint"] == facts["fingerprint"], info)
    # Bytes do as well, and a directory of rows is its rows.
    (folder / "shards").mkdir()
    write_rows(folder / "shards" / "b.jsonl", {"prompt": "q", "completion": "a"})
    write_rows(folder / "shards" / "a.jsonl", {"text": "t"})
    write_rows(folder / "shards" / "log.jsonl", {"step": 1})
    tokens, facts = packed(folder, folder / "shards", tokenizer="bytes")
    check(tokens == [ord("t"), 256, ord("q") | NOT_LEARNT, ord("a"), 256], tokens)
    # Without packing, train and info see the same tokens.
    info = json.loads(run("data", "info", folder / "shards", "--json").stdout)
    check((info["fingerprint"], info["left_out"]["rows"]) == (facts["fingerprint"], 1), info)


def check_wrong_rows(folder):
    pack = ["data", "pack", folder / "wrong.jsonl", "--output", folder / "never.bin"]
    good = {"text": "one"}
    for line, words in (("[]", "line 2 is no JSON object"), ("{", "line 2 is no JSON object"),
                        ({"id": 2}, "line 2 lacks a text named 'text', which the rows before it have"),
                        ({"text": 3}, "line 2 lacks a text named 'text'"),
                        ({"prompt": "a", "completion": "b"}, "line 2 lacks a text named 'text'")):
        write_rows(folder / "wrong.jsonl", good, line)
        refused(*pack, words=words)
    write_rows(folder / "wrong.jsonl", {"body": "x"})
    refused(*pack, words="line 1 lacks a list 'messages' of objects with a 'role', a list 'conversations'")
    refused(*pack, "--field", "text", words="line 1 lacks a text named 'text'")
    write_rows(folder / "wrong.jsonl", {"messages": [{"role": "user", "content": "x"}]})
    refused(*pack, words="line 1: a chat needs a chat template, which bytes do not have")
    tokenizer_files.make_tokenizer(folder / "plain")
    refused(*pack, "--tokenizer", folder / "plain", words="has no chat template")
    check(not list(folder.glob("*never*")) and not list(folder.glob(".*never*")), "a file is left")


def fake_python(folder, body):
    path = folder / "fake-python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def check_wrong_tokenizers(folder):
    (folder / "text.txt").write_text("one")
    pack = ["data", "pack", folder / "text.txt", "--output", folder / "never.bin", "--tokenizer"]
    refused(*pack, folder / "none", words="but there is no file")
    os.mkfifo(folder / "pipe")
    refused(*pack, folder / "pipe", words="is no regular file; write what is in it to one")
    broken = folder / "broken" / "tokenizer.json"
    broken.parent.mkdir()
    broken.write_text('{"model": 3}')
    refused(*pack, broken, words="cannot be read as a tokenizer: ")
    good = folder / "bpe"
    refused(*pack, good, "--end-of-document", "nothing", words="--end-of-document is 'nothing', which is no token of")
    refused("data", "pack", folder / "text.txt", "--output", folder / "never.bin", "--end-of-document", "</s>",
            words="but a document of bytes ends with token 256")
    (folder / "late.txt").write_bytes(b"one " * (1 << 15) + b"\xff")
    refused("data", "pack", folder / "late.txt", "--output", folder / "never.bin", "--tokenizer", good,
            words="late.txt: is not UTF-8 text (byte 0xff at 131072)")
    refused(*pack, good, FSDP_PYTHON="/nowhere/python", words="/nowhere/python cannot be started: No such file")
    # A Python without the package, and programs that are no Python.
    bare = fake_python(folder, f'exec {sys.executable} -S -E "$@"')
    refused(*pack, good, FSDP_PYTHON=bare, words="needs the Python package tokenizers, which was not found")
    for program in ("true", "yes"):
        refused(*pack, good, FSDP_PYTHON=program, words=f"({program} does not run)")


def sabotaged(folder, body):
    """A value of PYTHONPATH with which Python runs this first."""
    folder = folder / "sabotage"
    folder.mkdir(exist_ok=True)
    folder.joinpath("sitecustomize.py").write_text("import os, sys\n" + body)
    return str(folder)


def check_worker_that_dies(folder):
    """In the middle of its work: one sentence, no file, and no process is left."""
    for ending, words in (("os._exit(3)", "ended with exit code 3"),
                          ("os.kill(os.getpid(), 9)", "was ended by signal 9 (out of memory, perhaps)"),
                          ("os.write(frame.f_back.f_locals['out'].fileno(), b'x' * 16)", "gave an answer that is none")):
        path = sabotaged(folder, "def watch(frame, event, argument):\n"
                                 f"    code = frame.f_code\n"
                                 f"    if (event, code.co_filename, code.co_name) == ('call', '<string>', 'words'): {ending}\n"
                                 "sys.setprofile(watch)\n")
        refused("data", "pack", folder / "text.txt", "--output", folder / "never.bin", "--tokenizer", folder / "bpe",
                PYTHONPATH=path, words=words)
    check(not list(folder.glob("*never*")), "a file is left")
    # Prints of packages go nowhere.
    noise = sabotaged(folder, "class Noise:\n"
                              "    def find_spec(self, name, path=None, target=None):\n"
                              "        if name == 'tokenizers': os.write(1, b'x' * 64); os.write(2, b'warning')\n"
                              "sys.meta_path.insert(0, Noise())\n")
    packed(folder, folder / "text.txt", tokenizer=folder / "bpe", PYTHONPATH=noise)


def check_parquet(folder):
    path = folder / "rows.parquet"
    if importlib.util.find_spec("pyarrow") is None:
        path.write_bytes(b"PAR1\0\0\0\0PAR1")
        refused("data", "pack", path, "--output", folder / "never.bin",
                words="needs the Python package pyarrow, which was not found")
        print("parquet files are not read: there is no pyarrow")
        return
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "two"], "id": [1, 2]}), path)
    tokens, facts = packed(folder, path, tokenizer="bytes")
    check(bytes(t for t in tokens if t < 256) == b"onetwo" and facts["documents"] == 2, facts)
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["q"], "completion": ["a"]}), path)
    tokens, _ = packed(folder, path, tokenizer="bytes")
    check(tokens == [ord("q") | NOT_LEARNT, ord("a"), 256], tokens)
    path.write_bytes(b"PAR1\0\0\0\0PAR1")
    refused("data", "pack", path, "--output", folder / "never.bin", words="cannot be read as a parquet file")


with tempfile.TemporaryDirectory() as name:
    root = pathlib.Path(name)
    for action in (check_ids_of_every_kind, check_begin_tokens_and_the_given_end, check_long_text, check_words, check_rows,
                   check_wrong_rows, check_wrong_tokenizers, check_worker_that_dies, check_parquet):
        action(root)
        print(f"{action.__name__}: fine")
