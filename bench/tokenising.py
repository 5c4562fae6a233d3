#!/usr/bin/env python3
"""How fast `fsdp data pack` tokenises chats: 20 MB of English, made of the docstrings of the Python packages here.

    tokenising.py FSDP

There is no network on the machines that bench, so the tokenizers are trained on the same text, with 30,000 tokens: as
Qwen 2.5 and Llama 3 cut words, and in their templates.
"""

import ast
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "processes"))
import tokenizer_files

BYTES = 20_000_000
WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CUTS = {"qwen2.5": WORDS.replace("DIGITS", r"\p{N}"), "llama3": WORDS.replace("DIGITS", r"\p{N}{1,3}")}


def docstrings():
    """Each once, in the same order on every machine with the same packages."""
    found = {}
    for path in sorted(pathlib.Path(os.__file__).parent.rglob("*.py")) + sorted(pathlib.Path(sys.prefix).rglob("*.py")):
        try:
            tree = ast.parse(path.read_text())
        except (ValueError, SyntaxError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
                text = ast.get_docstring(node)
                if text and len(text) > 60:
                    found[text] = len(text)
        if sum(found.values()) > 1.4 * BYTES:
            break
    texts = list(found)
    random.Random(1).shuffle(texts)
    return texts


def write_chats(path, texts):
    draw = random.Random(2)
    rest = iter(texts)
    with path.open("w") as file:
        while file.tell() < BYTES:
            messages = [{"role": role, "content": next(rest)[:limit]} for _ in range(draw.randint(1, 3))
                        for role, limit in (("user", 400), ("assistant", 2000))]
            file.write(json.dumps({"messages": messages}) + "\n")


with tempfile.TemporaryDirectory() as name:
    root = pathlib.Path(name)
    texts = docstrings()
    write_chats(root / "chats.jsonl", texts)
    size = (root / "chats.jsonl").stat().st_size
    for model, cut in CUTS.items():
        tokenizer_files.make_chat_tokenizer(root / model, model, cut=cut, texts=texts[:20000], vocabulary=30000)
        start = time.monotonic(), os.times()
        subprocess.run([sys.argv[1], "data", "pack", root / "chats.jsonl", "--tokenizer", root / model, "--output",
                        root / f"{model}.bin"], check=True, capture_output=True, env={**os.environ, "FSDP_PYTHON": sys.executable})
        after = os.times()
        wall = time.monotonic() - start[0]
        core = after.children_user + after.children_system - start[1].children_user - start[1].children_system
        print(f"{model}: {size / 1e6:.1f} MB in {wall:.1f} s, {size / wall / 1e6:.2f} MB/s; {core:.1f} s of cores, "
              f"{size / core / 1e6:.2f} MB/s on one")
