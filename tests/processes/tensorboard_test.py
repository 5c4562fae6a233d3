#!/usr/bin/env python3
"""TensorBoard itself reads the event files of a run: every scalar, every text, over a resume.

    tensorboard_test.py WATCHED_RUN     ends with "skipped: ..." where the package is missing
"""

import json
import math
import pathlib
import struct
import subprocess
import sys
import tempfile

try:
    from tensorboard.backend.event_processing import event_accumulator
    from tensorboard.backend.event_processing import event_file_loader
except ImportError as error:
    print(f"skipped: {error}; make setup installs what requirements.txt names")
    sys.exit(0)

WATCHED_RUN = sys.argv[1]
# Tag -> key of the log's step lines.
TAGS = {"loss/train": "loss", "learning_rate": "lr", "gradient_norm": "grad_norm",
        "speed/tokens_per_s": "tokens_per_s", "speed/step_ms": "ms", "speed/tflops": "tflops", "speed/mfu": "mfu",
        "memory/peak_bytes": "peak_bytes"}


def float32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


def log_lines(folder, kind):
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def accumulated(folder):
    events = event_accumulator.EventAccumulator(str(folder / "events"), size_guidance={
        event_accumulator.SCALARS: 0, event_accumulator.TENSORS: 0})
    events.Reload()
    return events


def check_scalars(folder, num_steps):
    """Expects the steps and values of the log, whose numbers other tests check."""
    events = accumulated(folder)
    steps = log_lines(folder, "step")
    assert [line["step"] for line in steps] == list(range(1, num_steps + 1))
    found = set(events.Tags()["scalars"])
    assert found == set(TAGS) | {"loss/validation", "loss_terms/cross_entropy"}, found
    for tag, key in TAGS.items():
        scalars = events.Scalars(tag)
        assert [each.step for each in scalars] == [line["step"] for line in steps], tag
        for each, line in zip(scalars, steps):
            # The log has six digits of what is measured.
            assert math.isclose(each.value, line[key], rel_tol=1e-5), (tag, each, line[key])
            assert abs(each.wall_time - line["time"]) < 0.002, (tag, each, line["time"])
    for tag in ("loss/train", "loss_terms/cross_entropy"):
        assert [each.value for each in events.Scalars(tag)] == [float32(line["loss"]) for line in steps], tag
    validations = log_lines(folder, "validation")
    assert [(each.step, each.value) for each in events.Scalars("loss/validation")] == [
        (line["step"], float32(line["loss"])) for line in validations]
    assert len(validations) > 3


def check_texts(folder, num_steps):
    events = accumulated(folder)
    assert set(events.Tags()["tensors"]) == {"settings", "sample"}, events.Tags()
    settings = events.Tensors("settings")[-1].tensor_proto.string_val[0].decode()
    assert "| \\* | lr | 0.003 |" in settings, settings
    assert "|  | model | tiny |" in settings, settings
    sample = events.Tensors("sample")[-1]
    assert sample.step == num_steps
    assert sample.tensor_proto.string_val[0].decode().startswith("    A rank holds its shard"), sample
    assert events.SummaryMetadata("sample").plugin_data.plugin_name == "text"


def check_records(folder):
    """The loader that reads one file checks both checksums of each record, and finds no rest."""
    for path in sorted((folder / "events").iterdir()):
        events = list(event_file_loader.EventFileLoader(str(path)).Load())
        assert events[0].file_version == "brain.Event:2"
        assert len(events) > 10, path


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        subprocess.run([WATCHED_RUN, folder, "90"], check=True)
        check_scalars(folder, 90)
        check_texts(folder, 90)
        # Steps after 60 are done again: neither log nor TensorBoard shows one twice.
        subprocess.run([WATCHED_RUN, folder, "120", "60"], check=True)
        assert len(list((folder / "events").iterdir())) == 2
        check_scalars(folder, 120)
        check_texts(folder, 120)
        check_records(folder)
    print("tensorboard reads every scalar and text")


main()
