"""The page and the goals of bench/gpu.py, from its figures alone.

Usage: python bench/gpu_report.py RESULTS.json    prints the page again
"""

import json
import statistics
import sys

import gpu_profile

EAGER_PEERS = ("fsdp2", "megatron-fsdp", "megatron-fsdp-double-buffer")
SHARDED = ("ours", "ours-collectives")
# Two runs that round differently drift apart: pure bf16 and fp32 main weights by a percent or two in 20 steps.
SAME_LOSS = 0.01


def ms_of(rows, name):
    return rows.get(name, {}).get("ms")


def fastest_peer(rows):
    times = {name: ms_of(rows, name) for name in EAGER_PEERS if ms_of(rows, name)}
    return min(times, key=times.get) if times else None


def ratio(rows, name, base):
    """The ratio of medians within a round, so that what slows a whole round drops out."""
    mine, theirs = (rows.get(each, {}).get("round_ms") for each in (name, base))
    pairs = [(a, b) for a, b in zip(mine or [], theirs or []) if a and b]
    if not pairs:
        return None
    quotients = sorted(a / b for a, b in pairs)
    half = len(quotients) // 2
    return quotients[half] if len(quotients) % 2 else (quotients[half - 1] + quotients[half]) / 2


def host_cost(rows, name):
    """Milliseconds of the host per unit and step beyond the unsharded model of the same language."""
    base = "pytorch-bf16" if name in EAGER_PEERS else "plain-same-aten" if name.endswith("-aten") else "plain-same"
    mine, plain = (rows.get(each, {}).get("host_turns_ms") for each in (name, base))
    if mine and plain:
        return statistics.median(a - b for a, b in zip(mine, plain)) / rows[name]["units"]
    mine, plain = (rows.get(each, {}).get("host_ms") for each in (name, base))
    return None if mine is None or plain is None else (mine - plain) / rows[name]["units"]


def goal(text, value, limit, form="{:.3f}"):
    if value is None:
        return {"goal": text, "measured": None, "met": None}
    return {"goal": text, "measured": form.format(value), "met": value <= limit}


def goals_of(model, rows):
    result = []
    for name in SHARDED:
        if ms_of(rows, name) is None:
            continue
        peer = fastest_peer(rows)
        host = host_cost(rows, name)
        if model == "llama-1b":
            result += [
                goal(f"{name} <= 1.00 x plain-same", ratio(rows, name, "plain-same"), 1.0),
                goal(f"{name} <= 0.95 x the fastest eager peer ({peer or 'none measured'})",
                     ratio(rows, name, peer) if peer else None, 0.95),
                goal(f"{name} <= 1.03 x plain-bf16 (dream: 1.00)", ratio(rows, name, "plain-bf16"), 1.03),
            ]
        result.append(goal(f"{name}: host cost of sharding <= 0.1 ms per unit and step", host, 0.1, "{:.3f} ms"))
        theirs = rows.get("fsdp2", {}).get("peak_mb")
        result.append(goal(f"{name}: peak memory below FSDP2's", rows[name]["peak_mb"] / theirs if theirs else None, 1.0,
                           "{:.3f} of it"))
        plain = rows.get("plain-same", {}).get("loss")
        difference = abs(rows[name]["loss"] - plain) / plain if plain else None
        result.append(goal(f"{name}: loss of plain-same within {SAME_LOSS:.0%}", difference, SAME_LOSS, "{:.3%}"))
    if model == "llama-1b" and ms_of(rows, "ours-aten"):
        peer = fastest_peer(rows)
        result += [goal("ours-aten <= 1.00 x plain-same-aten", ratio(rows, "ours-aten", "plain-same-aten"), 1.0),
                   goal(f"ours-aten <= 0.95 x the fastest eager peer ({peer or 'none measured'})",
                        ratio(rows, "ours-aten", peer) if peer else None, 0.95)]
    result.append(goal("ours-graph <= 1.02 x plain-same-graph", ratio(rows, "ours-graph", "plain-same-graph"), 1.02))
    return result


def goals(results):
    return {model: goals_of(model, rows) for model, rows in results.items()}


# --- the page ---------------------------------------------------------------------------------------------------------


def text(value, form):
    return "" if value is None else form.format(value)


def row_line(rows, name):
    row = rows[name]
    spread = [ms for ms in row["round_ms"] if ms]
    cells = [f"`{name}`", f"{row['ms']:.2f}", f"{min(spread):.2f}-{max(spread):.2f}",
             text(ratio(rows, name, "plain-same"), "{:.3f}"), text(ratio(rows, name, "plain-bf16"), "{:.3f}"),
             text(ratio(rows, name, fastest_peer(rows)) if fastest_peer(rows) else None, "{:.3f}"),
             text(row["host_ms"], "{:.1f}"), text(host_cost(rows, name), "{:.3f}"), f"{row['peak_mb']:,.0f}",
             f"{row['reserved_mb']:,.0f}", f"{row['in_use_mb']:,.0f}", f"{row['losses'][0]:.3f}", f"{row['loss']:.3f}"]
    return "| " + " | ".join(cells) + " |"


HEAD = ("| row | ms | of rounds | / plain-same | / plain-bf16 | / fastest eager peer | host ms | host ms per unit | peak MB "
        "| reserved MB | device in use MB | first loss | loss after 20 |")


def model_part(report, model):
    rows = report["results"][model]
    batch, sequence = report["shapes"][model]
    lines = [f"## {model}, batch {batch} x {sequence}", "", HEAD, "|---|" + "---:|" * (HEAD.count("|") - 2)]
    lines += [row_line(rows, name) for name, row in rows.items() if "error" not in row]
    lines += ["", *(f"- `{name}` left out: {row['error']}" for name, row in rows.items() if "error" in row)]
    lines += ["", "| goal | measured | |", "|---|---:|---|"]
    for each in report["goals"][model]:
        verdict = {True: "met", False: "**missed**", None: "not measured"}[each["met"]]
        lines.append(f"| {each['goal']} | {each['measured'] or ''} | {verdict} |")
    profiles = report["profiles"].get(model)
    if profiles:
        lines += ["", "What the device ran, by kinds of kernels (two steps under the profiler, per step):", "",
                  gpu_profile.table(profiles)]
    return "\n".join(lines).replace("\n\n\n", "\n\n")


def page(report):
    found = dict(report["environment"])
    command = found.pop("command")
    lines = [f"# Training steps on one GPU, {found.pop('date')}", "",
             f"`{command}`: {report['rounds']} rounds in which every row is a process of its own, {report['steps']} timed "
             "steps each; bf16 compute, fp32 main weights, gradients and moments (but for the rows in bf16), AdamW, one rank.",
             "", "; ".join(f"{name} {value}" for name, value in found.items() if value) + ".", "",
             "- ms: median step between events on the computing stream, then of the rounds; ratios: within a round.",
             "- host ms: what the calls of a step take with 16 tokens, so that the device never makes them wait; the best, as other "
             "work can only slow them. With a graph: one replay, with all tokens. Per unit: "
             "beyond `plain-same` (C++) or `pytorch-bf16` (Python), over the number of units; `plain-same`, `ours` and "
             "`ours-collectives` take turns in one process for it, and the median difference counts.",
             "- peak: most that libtorch's allocator had handed out; reserved: had taken from the driver; in use: all of the "
             "device's memory after the last step.",
             "- -aten: the layers' element-wise parts by libtorch's operations, as the peers compute them, instead of our kernels.",
             "- loss: of the same batch again and again, before the first step and after 20.", ""]
    lines += [model_part(report, model) + "\n" for model in report["results"]]
    return "\n".join(lines)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with open(sys.argv[1]) as file:
        report = json.load(file)
    report["goals"] = goals(report["results"])
    print(page(report))


if __name__ == "__main__":
    main()
