"""Small training runs for the tests of the command: a model, a text, and ways to start them."""

import atexit
import json
import os
import pathlib
import re
import select
import signal
import subprocess
import sys
import threading
import unittest

# Two layers are the least that has one unit gathered while another computes.
LLAMA = {"model_type": "llama", "vocab_size": 257, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
# 16 tokens in each of 8 sequences: 4 ranks have 2 each, or 1 in each of 2 microbatches.
SHAPE = ["--sequence", "16", "--batch", "8"]
# Launchers' variables of whoever started the test would be taken for the run's own.
LAUNCHERS = ("OMPI_", "PMIX_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "FSDP_")


def write_model(path, **fields):
    """A config.json of the small model, with other fields where they are given."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**LLAMA, **fields}))


def write_text(path, copies=60):
    """About 90 bytes a copy; no two lines are the same, so that no two windows are."""
    lines = (f"Line {i}: the quick brown fox number {i * 7919 % 1000} jumps over the lazy dog.\n" for i in range(copies))
    pathlib.Path(path).write_text("".join(lines))


def environment(**more):
    """Open MPI's permissions and its way to start processes stay, places in other jobs do not."""
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith(LAUNCHERS) or name.startswith(("OMPI_ALLOW", "OMPI_MCA_plm_rsh_agent"))}
    return {**kept, "OMP_NUM_THREADS": "1", "FSDP_LOG": "warning", **more}


def slow_type_warning(command):
    """The words of a run that computes in a type without quick products on this CPU, as a pattern; "" for others."""
    words = re.search("(?m)^(?:flags|Features)\\s*:(.*)$", pathlib.Path("/proc/cpuinfo").read_text())[1].split()
    needs = {"bf16": {"bf16", "avx512bw"}, "fp16": {"avx512_fp16"}}  # one of these
    slow = [name for name, any_of in needs.items() if name in command and not any_of & set(words)]
    return rf"warning: --compute is {slow[0]}, .*; use --compute fp32 here\n" if slow else ""


class CommandServer:
    """Runs `fsdp` in copies of a process that has libtorch loaded already (command_server.cpp)."""

    of_thread = threading.local()

    def __init__(self, program):
        self.job = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(),
                                    start_new_session=True)
        atexit.register(self.job.communicate)  # which ends it

    @classmethod
    def beside(cls, program):
        """That of this thread; None where the tests were not built with one."""
        server = pathlib.Path(program).with_name("command_server")
        if pathlib.Path(program).name != "fsdp" or not server.exists():
            return None
        if not hasattr(cls.of_thread, "server"):
            cls.of_thread.server = cls(server)
        return cls.of_thread.server

    def run(self, command, cwd, variables, timeout):
        asked = {"directory": str(cwd), "words": command[1:], "environment": [f"{name}={value}" for name, value in variables.items()]}
        self.job.stdin.write(json.dumps(asked).encode() + b"\n")
        self.job.stdin.flush()
        if not select.select([self.job.stdout], [], [], timeout)[0]:
            os.killpg(self.job.pid, signal.SIGKILL)
            del self.of_thread.server
            raise subprocess.TimeoutExpired(command, timeout)
        answer = json.loads(self.job.stdout.readline())
        return subprocess.CompletedProcess(command, answer["code"], answer["out"], answer["err"])


def unsaved(command):
    """A training that names no directory would make one by its date; here it saves nothing."""
    is_training = any(program.endswith("fsdp") and word == "train" for program, word in zip(command, command[1:]))
    return [*command, "--no-save"] if is_training and not {"--checkpoint-dir", "--config", "--no-save"} & set(command) else command


def run(command, cwd, code=0, timeout=120, **more):
    """Runs to the end; the exit code must be the one given."""
    command = unsaved([str(word) for word in command])
    # OpenMP reads its variables when it is loaded.
    server = None if "OMP_NUM_THREADS" in more else CommandServer.beside(command[0])
    if server:
        done = server.run(command, cwd, environment(**more), timeout)
    else:
        done = subprocess.run(command, cwd=cwd, env=environment(**more), stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, errors="replace", timeout=timeout)
    assert code is None or done.returncode == code, (
        f"exit code {done.returncode}, not {code}:\n{command}\n{done.stdout}\n{done.stderr}")
    return done


def start(command, cwd, **more):
    """Runs beside the test, in a process group of its own."""
    return subprocess.Popen(unsaved([str(word) for word in command]), cwd=cwd, env=environment(**more), stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
                            start_new_session=True)


def stop(job):
    """Ends whatever is left of a job, so that a test which failed leaves nothing running."""
    try:
        os.killpg(job.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    return job.communicate(timeout=60)


def log_records(path, kind=None):
    """The lines of a log, all or of one kind; the last one may be half written while the run goes on."""
    try:
        text = pathlib.Path(path).read_text()
    except FileNotFoundError:
        return []
    records = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [each for each in records if kind in (None, each["kind"])]


def losses(path):
    """{step: loss}; a step that is there twice, as after a crash, must be the same."""
    found = {}
    for record in log_records(path, "step"):
        before = found.setdefault(record["step"], record["loss"])
        assert before == record["loss"], f"{path}: step {record['step']} has two losses"
    return found


def stored_tensors(content):
    """{name: (type, shape, bytes)} of a safetensors file."""
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    header.pop("__metadata__", None)
    return {name: (each["dtype"], each["shape"], content[begin + each["data_offsets"][0]:begin + each["data_offsets"][1]])
            for name, each in header.items()}


def crc32c(data):
    """The checksum of token files, bit by bit."""
    remainder = 0xFFFFFFFF
    for byte in data:
        remainder ^= byte
        for _ in range(8):
            remainder = remainder >> 1 ^ (0x82F63B78 if remainder & 1 else 0)
    return remainder ^ 0xFFFFFFFF


def more(test):
    """Marks a test or a class of tests that `make test` leaves to `make test-all`: others prove the same at less cost."""
    test.is_more = True
    return test


def main():
    """Runs a file's tests: those that FSDP_TESTS names (once, more), or all."""
    wanted = os.environ.get("FSDP_TESTS", "all")

    def chosen(suite):
        for test in suite:
            if isinstance(test, unittest.TestSuite):
                yield from chosen(test)
            elif wanted == "all" or (wanted == "more") == any(
                    getattr(part, "is_more", False) for part in (type(test), getattr(test, test._testMethodName))):
                yield test

    found = unittest.defaultTestLoader.loadTestsFromModule(sys.modules["__main__"])
    result = unittest.TextTestRunner(verbosity=2).run(unittest.TestSuite(chosen(found)))
    sys.exit(not result.wasSuccessful())
