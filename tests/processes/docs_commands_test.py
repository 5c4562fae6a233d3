#!/usr/bin/env python3
"""Runs every command that the documentation shows.

    docs_commands_test.py PROJECT BINARIES [PAGE...]      BINARIES: the folder with fsdp and the examples' programs

Commands are the lines of ```sh blocks, and what follows "$ " in blocks without a language. Those of a page run in their
order, in one directory that holds copies of the project's docs, examples and tools. They must succeed; where the page shows
"fsdp: ..." as the answer, they must fail with these words instead.

What follows "$ COMMAND" in its block is what it prints, line by line, where "..." stands for anything, and for any lines at
the beginning of one. Numbers, times, sizes and what depends on the machine may have other values, but not another form;
numbers of `fsdp plan` are the same everywhere.
"""

import difflib
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

import small_runs

PROJECT, BINARIES = map(pathlib.Path, sys.argv[1:3])

# Commands that are not run, and why. Each must occur in its page.
NOT_RUN = {
    "README.md": {
        "make test": "runs this",
        "export FSDP_TORCH=$(python3 -c 'import os, torch; print(os.path.dirname(torch.__file__))')": "for the build",
        'make train TRAIN="--model llama-110m"': "needs a GPU",
    },
    "docs/library.md": {
        "cmake --install build/release --prefix ~/fsdp": "install_test does, elsewhere",
        "FSDP_TORCH=$(python3 -c 'import torch, os; print(os.path.dirname(torch.__file__))') make test": "builds",
    },
    "CONTRIBUTING.md": {
        "make build": "builds",
        "make test": "runs this",
        "make python": "builds",
        "export PYTHONPATH=build/release/python": "for the next two",
        ".venv/bin/python -m pytest tests/python -k llama": "python_1_ranks does",
        ".venv/bin/python tests/processes/start_ranks.py 2 .venv/bin/python -m pytest -q tests/python -k llama":
            "python_2_ranks does",
        "cmake --preset debug": "builds",
        "cmake --build --preset debug --target unit_base": "builds",
        "ctest --preset debug -R base_test": "needs that build",
    },
    "docs/python.md": {
        "make python": "builds",
        "pip install -v .": "builds",
    },
    "docs/multi-host.md": {
        "mpirun --hostfile hosts -n 16 --bind-to none fsdp train --config run.json --outer 2 "
        "--checkpoint-dir /shared/runs/a": "needs two hosts; the command after it has this form",
        "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node01:29500 --no-python -- fsdp "
        "train --config run.json --outer 2 --checkpoint-dir /shared/runs/a": "needs two hosts; torchrun_test has this form",
    },
    "docs/gpu.md": {
        "export FSDP_TORCH=$(python3 -c 'import os, torch; print(os.path.dirname(torch.__file__))')": "for the build",
        "cmake --preset cuda": "builds",
        "cmake --build --preset cuda": "builds",
        "ctest --preset cuda": "needs that build",
        "fsdp train --model llama-110m --data docs --cuda-graph": "needs a GPU; graph_device_test records such steps",
    },
    "examples/README.md": {
        "FSDP=build/release/bin/fsdp PYTHON=.venv/bin/python examples/weights_out/run.sh runs/weights_out": "served_weights_test does",
    },
    "examples/huggingface_finetune/README.md": {
        "PYTHON=.venv/bin/python3 FSDP=build/release/bin/fsdp examples/huggingface_finetune/finetune.sh work": "finetune_test does",
    },
    "docs/data.md": {
        "fsdp data pack books rows.jsonl --tokenizer Llama-3.2-1B --output all.bin": "tokenizers_test does, with tokenizers that it makes",
        "fsdp train --model Llama-3.2-1B --data books": "tokenized_runs_test does",
        "fsdp train --model llama-110m --tokenizer Llama-3.2-1B --data books": "tokenized_runs_test does",
        "fsdp generate --checkpoint Llama-3.2-1B --prompt 'The rank of'": "tokenized_runs_test does",
        "fsdp generate --checkpoint Qwen2.5-0.5B-Instruct --chat --system 'Be brief.' --prompt 'What is a rank?'": "tokenized_runs_test does",
    },
}

# Changes to commands before they run, because a page shows what is worth doing and a test has seconds. Each must apply.
CHANGES = {
    "README.md": {
        # It runs this after building, shorter.
        "make train": "fsdp train --data docs --ranks 2 --steps 2 --validate-every 1 --checkpoint-dir runs/tiny",
    },
    "docs/library.md": {
        # Any free port in place of torchrun's usual one, which another job may have.
        "torchrun --nproc-per-node": "torchrun --standalone --nproc-per-node",
    },
    "docs/data.md": {
        "--data-weights 0.8 0.2 --steps 20": "--data-weights 0.8 0.2 --steps 20 --batch 2 --sequence 32",
    },
    "docs/train.md": {
        "--ranks 2 --checkpoint-dir runs/first": "--ranks 2 --checkpoint-dir runs/first --steps 2 --batch 4 --validate-every 1",
        "--steps 20 --lr 3e-4": "--steps 2 --batch 4 --lr 3e-4",
        "--steps 20 --lora 8": "--steps 2 --sequence 64 --lora 8",
        "--steps 30 --lora 8": "--steps 3 --sequence 64 --lora 8",
    },
}

# Every run is validated on one batch and writes a short sample.
TRAINING = re.compile(r"^fsdp train (?!.*(--print-config|--check)).*$")
SHORTER = "--validation-batches 1 --sample-tokens 8"

# Blocks whose first lines, up to a command, are printed by an earlier command of the page: how they begin, and that command.
# Their lines must have the form of lines that it prints, in any order.
PRINTED_BEFORE = {
    "README.md": {"   step       loss": "make train"},
    "docs/train.md": {"   step       loss": "fsdp train --data docs --ranks 2 --checkpoint-dir runs/first"},
}

# The reader of a page is expected to have these.
GIVEN = {
    "docs/data.md": {"books/one.txt": "A rank is a process.\n" * 40, "more.txt": "More of it.\n" * 40,
                     "picture.png": "\0\1\2" * 40, "rows.jsonl": '{"text": "a", "body": "b"}\n',
                     "pairs.jsonl": '{"prompt": "a", "completion": "b"}\n'},
}


class Command:
    def __init__(self, place, text):
        self.place, self.text = place, text
        self.answer = []  # lines that the page shows after it
        self.forms = []   # lines of PRINTED_BEFORE


def without_remark(line):
    return re.sub(r"\s+#.*$", "", line).strip()


def commands_of_block(page, number, language, lines, before):
    """Whole commands: lines that end with a backslash go on."""
    found, at = [], 0
    while at < len(lines):
        line, place = lines[at], f"{page}:{number + at}"
        at += 1
        if language == "" and not line.startswith("$ "):
            if found:
                found[-1].answer.append(line)
            elif before:
                before.forms.append(line)
            continue
        text = without_remark(line.removeprefix("$ "))
        while text.endswith("\\"):
            text = text[:-1].rstrip() + " " + without_remark(lines[at])
            at += 1
        if text and not text.startswith("#"):
            found.append(Command(place, text))
    return found


def printed_before(page, lines, commands):
    """The earlier command that prints the first lines of a block, if the table names one."""
    for beginning, text in PRINTED_BEFORE.get(page, {}).items():
        if lines and lines[0].startswith(beginning):
            return next(command for command in commands if command.text == text)
    return None


def commands_of_page(page):
    found, block, language, start = [], None, "", 0
    for number, line in enumerate((PROJECT / page).read_text().splitlines(), 1):
        fence = re.match(r"\s*```(\w*)$", line)
        if fence and block is None:
            block, language, start = [], fence[1], number + 1
        elif fence:
            if language in ("", "sh"):
                found += commands_of_block(page, start, language, block, printed_before(page, block, found))
            block = None
        elif block is not None:
            block.append(line)
    assert block is None, f"{page}: a block that begins at line {start - 1} does not end"
    num_shown = sum(bool(command.forms) for command in found)
    assert num_shown == len(PRINTED_BEFORE.get(page, {})), f"{page} no longer has a block that PRINTED_BEFORE names"
    return found


def changed(page, commands):
    """Those to run, after changes; fails where a table names what the page does not have."""
    unused = set(NOT_RUN.get(page, {}))
    to_run = [command for command in commands if command.text not in NOT_RUN.get(page, {})]
    unused -= {command.text for command in commands}
    assert not unused, f"{page} no longer has these commands, which NOT_RUN names: {sorted(unused)}"
    for old, new in CHANGES.get(page, {}).items():
        assert any(old in command.text for command in to_run), f"{page} no longer has '{old}', which CHANGES names"
        for command in to_run:
            command.text = command.text.replace(old, new)
    for command in to_run:
        if TRAINING.match(command.text):
            command.text += f" {SHORTER}"
    return to_run


def search_path(*folders):
    """With Python's programs, of which torchrun is one."""
    return os.pathsep.join([*map(str, folders), os.path.dirname(sys.executable), os.environ["PATH"]])


def environment(shims):
    """Open MPI refuses root unless it is told otherwise, as the pages say."""
    return {**os.environ, "PATH": search_path(shims), "OMP_NUM_THREADS": "1", "FSDP_TIMEOUT_S": "60", "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",  # what the pages show was printed without a GPU
            "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def prepare(folder, page):
    for name in ("docs", "examples", "tools"):
        shutil.copytree(PROJECT / name, folder / name)
    shutil.copy(PROJECT / "README.md", folder)
    (folder / "build/release").mkdir(parents=True)
    (folder / "build/release/bin").symlink_to(BINARIES.resolve())
    for name, text in GIVEN.get(page, {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


# These may differ between machines and runs: each is compared by the word in its place.
VARYING = [
    (r"(?<![\w./])/[\w./-]+", "PATH"),
    (r"^math .*", "math LIBRARIES"),
    (r"\b(GNU|Clang)\b", "COMPILER"),
    (r"\b(mpi|nccl), ", ""),
    (r"\b(\d+ h )?(\d+ min )?[\d.]+ (ms|s|min|h)\b", "TIME"),
]
NUMBERS = [
    (r"\b[\d.]+ [KMGT]?i?B\b", "SIZE"),
    (r"(?<!\w)[-+]?\d[\d,.]*(e[-+]\d+)?", "NUMBER"),
]


def form_of(line, exact_numbers):
    for pattern, word in VARYING + ([] if exact_numbers else NUMBERS):
        line = re.sub(pattern, word, line)
    return " ".join(line.split())


def is_gap(line):
    return line.lstrip().startswith("...")


def matches(shown, printed):
    """Whether lines are those that a page shows; a line "..." stands for any number of them."""
    if not shown:
        return not printed
    if is_gap(shown[0]):
        return any(matches(shown[1:], printed[at:]) for at in range(len(printed) + 1))
    pattern = ".*".join(map(re.escape, shown[0].split("...")))
    return bool(printed) and re.fullmatch(pattern, printed[0]) is not None and matches(shown[1:], printed[1:])


def problem_of(command, status, output, errors):
    """The differences from what the page says; "": none."""
    if command.answer and command.answer[0].startswith("fsdp: "):
        return "" if status != 0 and command.answer[0] in errors else f"wanted '{command.answer[0]}'"
    if status != 0:
        return "wanted success"
    exact = "fsdp plan " in command.text
    printed = [form_of(line, exact) for line in output.rstrip("\n").split("\n")]
    shown = [form_of(line, exact) for line in command.answer]
    if shown and not matches(shown, printed):
        difference = difflib.unified_diff(shown, printed, "page", "printed", n=0, lineterm="")
        return "\n".join(["it does not print what the page shows:", *difference])
    # Four spaces are before what a model wrote.
    unlike = [line for line in command.forms
              if not is_gap(line) and not line.startswith("    ") and form_of(line, exact) not in printed]
    return f"it prints no line with the form of {unlike}" if unlike else ""


def words_of(text):
    """Those of a command `fsdp ...` that needs no shell; None of others."""
    needs_shell = re.search(r"[|&;<>()$`*?~\[\]{}=#!]", re.sub(r"'[^']*'|--[\w-]+=", "", text))
    words = shlex.split(text) if not needs_shell else []
    return words if words[:1] == ["fsdp"] else None


def run(command, folder, shims):
    begin = time.monotonic()
    server = small_runs.CommandServer.beside(BINARIES / "fsdp")
    words = words_of(command.text) if server else None
    if words:
        done = server.run([str(BINARIES / "fsdp"), *words[1:]], folder, environment(shims), timeout=300)
    else:
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", command.text], cwd=folder, env=environment(shims), text=True,
                              errors="replace", stdin=subprocess.DEVNULL, capture_output=True, timeout=300)
    output, errors = done.stdout, done.stderr
    print(f"{command.place}: {time.monotonic() - begin:4.1f} s  {command.text}", flush=True)
    problem = problem_of(command, done.returncode, output, errors)
    if not problem:
        return 0
    print(f"  FAILED: exit status {done.returncode}, {problem}")
    print(output[-1500:] + errors[-1500:])
    return 1


def check_page(page):
    to_run = changed(page, commands_of_page(page))
    for launcher in ("mpirun", "torchrun"):
        if not shutil.which(launcher, path=search_path()):
            print(f"{page}: commands with {launcher} are left out, since it is not here")
            to_run = [command for command in to_run if launcher not in command.text]
    if not to_run:
        return 0
    with tempfile.TemporaryDirectory() as place:
        folder, shims = pathlib.Path(place, "fsdp"), pathlib.Path(place, "bin")
        folder.mkdir()
        shims.mkdir()
        (shims / "fsdp").symlink_to((BINARIES / "fsdp").resolve())
        prepare(folder, page)
        return sum(run(command, folder, shims) for command in to_run)


def main():
    pages = sorted(str(path.relative_to(PROJECT)) for path in
                   [*PROJECT.glob("*.md"), *PROJECT.glob("docs/*.md"), *PROJECT.glob("examples/**/*.md")])
    unknown = (set(NOT_RUN) | set(CHANGES) | set(GIVEN) | set(PRINTED_BEFORE)) - set(pages)
    assert not unknown, f"no such pages: {sorted(unknown)}"
    num_failed = sum(check_page(page) for page in sys.argv[3:] or pages)
    sys.exit(f"{num_failed} commands failed" if num_failed else 0)


if __name__ == "__main__":
    main()
