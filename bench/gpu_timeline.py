"""Shows what ran when in a trace of bench_gpu --profile, as a picture in text, and what went over the bus.

Usage: python bench/gpu_timeline.py [--columns 100] [--elements N] TRACE.json [TRACE.json...]

Rows: the stream that computes, that of updates on the device, copies down and up, and updates on the host (from the file
beside the trace). `#` where a row is busy for most of a column's time, `.` where it is for some of it.
"""

import argparse
import json
import pathlib
import re
import statistics

STEPS = 2  # of a trace: gpu.cpp
COMPUTING = r"gemm|nvjet|cutlass|xmma|flash|fmha"
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def merged(spans):
    """In order, without overlaps."""
    result = []
    for first, last in sorted(spans):
        if result and first <= result[-1][1]:
            result[-1][1] = max(result[-1][1], last)
        else:
            result.append([first, last])
    return result


def length(spans):
    return sum(last - first for first, last in spans)


def common(some, others):
    result, i, j = [], 0, 0
    while i < len(some) and j < len(others):
        first, last = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if first < last:
            result.append([first, last])
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return result


def rows_of(path):
    """Microseconds since the epoch, by row, and the bytes of both directions."""
    with open(path, encoding="utf-8", errors="replace") as file:
        trace = json.load(file)
    base = trace.get("baseTimeNanoseconds", 0) / 1e3
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") in DEVICE]

    def span(event):
        return [base + event["ts"], base + event["ts"] + event["dur"]]

    def streams_with(pattern):
        return {event["args"]["stream"] for event in events if re.search(pattern, event["name"])}

    def on(streams):
        return merged(span(event) for event in events if event["args"]["stream"] in streams)

    def copies(direction):
        chosen = [event for event in events if f"Memcpy {direction}" in event["name"]]
        return merged(map(span, chosen)), sum(event["args"].get("bytes", 0) for event in chosen), {e["name"] for e in chosen}

    down, down_bytes, down_kinds = copies("DtoH")
    up, up_bytes, up_kinds = copies("HtoD")
    host, chunks = [], []
    beside = pathlib.Path(str(path).removesuffix(".json") + ".host.json")
    if beside.exists():
        chunks = sorted([each["begin_ns"] / 1e3, each["end_ns"] / 1e3] for each in json.loads(beside.read_text())
                        if each["name"] == "fsdp::update_on_host")
        host = merged(chunks)
    rows = {"computing": on(streams_with(COMPUTING)), "updates on the device": on(streams_with("adamw")),
            "gradients down": down, "updates on the host": host, "weights up": up}
    return rows, {"down": down_bytes, "up": up_bytes}, sorted(down_kinds | up_kinds), chunks


def picture(rows, columns):
    spans = [span for row in rows.values() for span in row]
    begin, end = min(first for first, _ in spans), max(last for _, last in spans)
    width = (end - begin) / columns
    lines = []
    for name, row in rows.items():
        line = ""
        for column in range(columns):
            window = [[begin + column * width, begin + (column + 1) * width]]
            part = length(common(row, window)) / width
            line += "#" if part > 0.5 else "." if part > 0 else " "
        lines.append(f"{name:<22}|{line}| {length(row) / 1e3 / STEPS:7.1f} ms a step")
    return "\n".join([f"{(end - begin) / 1e3:.1f} ms, {STEPS} steps", *lines])


def report(path, columns, elements):
    rows, moved, kinds, chunks = rows_of(path)
    lines = [picture(rows, columns)]
    for name, row in (("down", rows["gradients down"]), ("up", rows["weights up"])):
        per_step = moved[name] / STEPS
        rate = moved[name] / (length(row) * 1e3) if row else 0.0
        beside = length(common(row, rows["computing"])) / length(row) if row else 0.0
        lines.append(f"{name}: {per_step:,.0f} bytes a step" + (f" ({per_step / elements:.3f} per element)" if elements else "")
                     + f", {rate:.1f} GB/s while copying, {100 * beside:.0f} % of the time while the model computes")
    host = rows["updates on the host"]
    if host:
        lines.append(f"host updates: {100 * length(common(host, rows['computing'])) / length(host):.0f} % of their time while the "
                     "model computes")
        gaps = [after[0] - before[1] for before, after in zip(chunks, chunks[1:])]
        lines.append(f"{len(chunks) / STEPS:.0f} chunks a step: {statistics.median(b - a for a, b in chunks):.0f} us each, "
                     f"{statistics.median(gaps) if gaps else 0:.0f} us between them (medians)")
    return "\n".join([*lines, "copies: " + ", ".join(kinds)])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", metavar="TRACE.json")
    parser.add_argument("--columns", type=int, default=100)
    parser.add_argument("--elements", type=int, default=0, help="of the model, to give bytes per element")
    args = parser.parse_args()
    for path in args.traces:
        print(f"{pathlib.Path(path).name.removesuffix('.json')}: {report(path, args.columns, args.elements)}")


if __name__ == "__main__":
    main()
