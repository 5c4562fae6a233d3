#!/usr/bin/env python3
"""The trace of a run: whole JSON, every rank, spans that nest, and the gathers that the engine asked for.

    trace_test.py FSDP [MPIRUN...]     without MPIRUN, ranks are threads alone
"""

import collections
import json
import pathlib
import signal
import sys
import tempfile

import small_runs

FSDP, *MPIRUN = sys.argv[1:]
TRAINING = [FSDP, "train", "--model", "model/config.json", "--data", "text.txt", "--sequence", "16", "--batch", "6", "--quiet",
            "--sample", ""]
# The small model's units: embedding, two layers, and what follows them.
NUM_UNITS = 4


def spans_of(path):
    """{rank: [span]} and the names of rows by rank and thread."""
    spans, rows = collections.defaultdict(list), {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "X":
            spans[event["pid"]].append(event)
        elif event["name"] == "thread_name":
            rows[event["pid"], event["tid"]] = event["args"]["name"]
    return spans, rows


def check_nested(spans):
    """On a thread, a span is inside another or apart from it."""
    threads = collections.defaultdict(list)
    for span in spans:
        threads[span["tid"]].append((span["ts"], -span["dur"]))
    for thread in threads.values():
        open_until = []
        for begin, duration in sorted(thread):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            # A thousandth is the last digit.
            assert not open_until or begin - duration <= open_until[-1] + 0.002, (begin, duration, open_until)
            open_until.append(begin - duration)


def check_trace(path, ranks, steps):
    spans, rows = spans_of(path)
    assert sorted(spans) == list(range(ranks)), sorted(spans)
    for rank, of_rank in spans.items():
        check_nested(of_rank)
        for thread, row in ((thread, row) for (of, thread), row in rows.items() if of == rank):
            # A thread is called after the work that it did first. Which threads gather is not fixed: one that waits for a gather
            # nobody has begun runs it itself, and on a busy machine that may be all of them.
            done = [span["cat"] for span in of_rank if span["tid"] == thread and span["cat"] not in ("compute", "engine", "step")]
            expected = "compute" if thread == 0 else done[0] if done else "other work"
            assert row.rstrip(" 0123456789") == expected, (row, expected)
        assert [span["name"] for span in of_rank if span["cat"] == "step"] == [f"step {step}" for step in steps], rank
        # Operators are rank 0's alone.
        assert any(span["cat"] == "compute" for span in of_rank) == (rank == 0), rank
        for each in ("fsdp::load_batches", "fsdp::forward_and_backward", "fsdp::update"):
            assert sum(span["name"] == each for span in of_rank) == len(steps), each
        for step in (span for span in of_rank if span["cat"] == "step"):
            inside = [span for span in of_rank if step["ts"] <= span["ts"] < step["ts"] + step["dur"]]
            asked = collections.Counter(span["name"].removeprefix("fsdp::all_gather ") for span in inside
                                        if span["name"].startswith("fsdp::all_gather "))
            done = collections.Counter(span["name"].removeprefix("all_gather ").removesuffix(" weight") for span in inside
                                       if span["cat"] == "gather")
            assert asked == done and len(done) == NUM_UNITS, (rank, step["name"], asked, done)
            assert sum(span["name"].startswith("reduce_scatter ") for span in inside) == NUM_UNITS, (rank, step["name"])
        assert any(span["cat"] == "update" for span in of_rank), rank


def main():
    with tempfile.TemporaryDirectory() as name:
        root = pathlib.Path(name)
        small_runs.write_model(root / "model/config.json")
        small_runs.write_text(root / "text.txt")
        small_runs.run([*TRAINING, "--steps", "8", "--ranks", "2", "--trace", "new/threads.json"], root)
        check_trace(root / "new/threads.json", 2, (3, 4, 5))
        small_runs.run([*TRAINING, "--steps", "4", "--trace", "one.json", "--trace-steps", "2"], root)
        spans, _ = spans_of(root / "one.json")
        assert [span["name"] for span in spans[0] if span["cat"] == "step"] == ["step 2"] and list(spans) == [0]
        # A run that has fewer steps left traces the last one.
        small_runs.run([*TRAINING, "--steps", "2", "--ranks", "2", "--trace", "short.json"], root)
        check_trace(root / "short.json", 2, (2,))
        if MPIRUN:
            small_runs.run([*MPIRUN, "-n", "3", *TRAINING, "--steps", "6", "--trace", "processes.json",
                            "--trace-steps", "4-5"], root)
            check_trace(root / "processes.json", 3, (4, 5))
        # One that is stopped leaves what it has, and one that is killed a whole file.
        for number in (signal.SIGTERM, signal.SIGKILL):
            job = small_runs.start([*TRAINING, "--steps", "1000000", "--ranks", "2", "--log", "log.jsonl", "--trace",
                                    "stopped.json", "--trace-steps", "2-1000"], root)
            try:
                while job.poll() is None and len(small_runs.log_records(root / "log.jsonl", "step")) < 5:
                    pass
                job.send_signal(number)
                job.wait(timeout=60)
            finally:
                small_runs.stop(job)
            spans, _ = spans_of(root / "stopped.json")
            traced = [span["name"] for span in spans[0] if span["cat"] == "step"]
            assert (len(traced) >= 4) == (number == signal.SIGTERM), (number, traced)
            (root / "log.jsonl").unlink()
    print("traces are whole, of every rank, and as the engine says")


main()
