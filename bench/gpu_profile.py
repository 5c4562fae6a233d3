"""Where a step's time on the device goes: traces of bench/gpu.py side by side, by kinds of kernels.

Usage: python bench/gpu_profile.py TRACE.json [TRACE.json...]

Times are milliseconds per step, summed over streams; "busy" counts time in which several kernels run once, and "idle" is
what is left of the time from the first kernel to the end of the last.
"""

import argparse
import gzip
import json
import pathlib
import re

STEPS = 2  # of a trace: gpu.cpp and gpu_peers.py
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# The first that matches counts.
KINDS = (
    ("collectives", r"nccl"),
    ("attention", r"flash|fmha|attention|sdpa"),
    ("matrix products", r"gemm|nvjet|cutlass|xmma|cublas|splitK"),
    ("optimizer", r"adam|begin_step|FusedOptimizer"),
    ("casts and copies of many tensors", r"multi_tensor_apply|chunk_cat|split_with_sizes|pack_kernel"),
    ("norms", r"(rms|layer)_?norm|GammaBeta"),
    ("softmax and loss", r"softmax|nll_loss|scatter_gather|cross_entropy"),
    ("rotary positions", r"rotate_kernel"),
    ("gated SiLU", r"gated_silu"),
    ("embedding", r"embedding|indexing_backward|index_|radix|sort|krn_partial|segment"),
    ("compiled", r"^triton_"),
    ("copies and casts", r"copy|memcpy|CatArray"),
    ("fills", r"memset|fill"),
    ("other elementwise", r"elementwise"),
    ("sums", r"reduce_kernel|sum"),
    ("other", r""),
)


def kind_of(name):
    return next(kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE))


def events_of(path):
    opener = gzip.open if str(path).endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8", errors="replace") as file:
        trace = json.load(file)
    return [event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") in DEVICE]


def union(spans):
    """The length of what at least one of them covers."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def summary(path):
    """Milliseconds per step by kind, and what the device did as a whole."""
    events = events_of(path)
    kinds, names = {}, {}
    for event in events:
        ms = event["dur"] / 1e3 / STEPS
        kind = kind_of(event["name"])
        kinds[kind] = kinds.get(kind, 0.0) + ms
        names[event["name"]] = names.get(event["name"], 0.0) + ms
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in events]
    busy = union(spans) / 1e3 / STEPS
    whole = (max(last for _, last in spans) - min(first for first, _ in spans)) / 1e3 / STEPS if spans else 0.0
    return {"kinds": kinds, "busy": busy, "idle": whole - busy, "sum": sum(kinds.values()),
            "launches": len(events) / STEPS, "streams": len({event.get("tid") for event in events}),
            "longest": sorted(names.items(), key=lambda item: -item[1])[:40]}


def table(summaries):
    """Markdown; a column per trace, with the difference to the first in brackets."""
    names, first = list(summaries), next(iter(summaries.values()))

    def row(title, value):
        cells = [f"{value(first):.2f}"]
        cells += [f"{value(s):.2f} ({value(s) - value(first):+.2f})" for s in list(summaries.values())[1:]]
        return f"| {title} | " + " | ".join(cells) + " |"

    lines = ["| ms per step | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for kind, _ in KINDS:
        if any(kind in s["kinds"] for s in summaries.values()):
            lines.append(row(kind, lambda s, kind=kind: s["kinds"].get(kind, 0.0)))
    lines += [row(title, lambda s, key=title: s[key]) for title in ("sum", "busy", "idle")]
    for title in ("launches", "streams"):
        lines.append(f"| {title} | " + " | ".join(f"{s[title]:.0f}" for s in summaries.values()) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", metavar="TRACE.json")
    parser.add_argument("--longest", type=int, default=0, help="kernels to list of each trace, by name")
    args = parser.parse_args()
    summaries = {pathlib.Path(path).name.split(".json")[0]: summary(path) for path in args.traces}
    print(table(summaries))
    for name, each in summaries.items() if args.longest else ():
        print(f"\n{name}")
        for kernel, ms in each["longest"][:args.longest]:
            print(f"{ms:9.3f}  {kernel[:150]}")


if __name__ == "__main__":
    main()
