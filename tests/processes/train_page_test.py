#!/usr/bin/env python3
"""The tables of docs/train.md have every setting of `fsdp train`, with its default, and no other.

    train_page_test.py FSDP PAGE
"""

import json
import pathlib
import re
import subprocess
import sys

FSDP, PAGE = sys.argv[1:]


def default_text(value):
    if isinstance(value, bool):
        return "true" if value else "false"
    return " ".join(value) if isinstance(value, list) else str(value)


def rows(page):
    """(flag, default) of each row of a table whose first cell is a flag."""
    for line in pathlib.Path(page).read_text().splitlines():
        cells = re.match(r"\| `--([a-z0-9-]+)` \| (?:`([^`]*)` )?\|", line)
        if cells:
            yield cells[1], cells[2] or ""


printed = subprocess.run([FSDP, "train", "--print-config"], check=True, stdout=subprocess.PIPE).stdout
wanted = {name.replace("_", "-"): default_text(value) for name, value in json.loads(printed).items()}
described = list(rows(PAGE))
faults = [f"--{name} is described twice" for name in {name for name, _ in described}
          if sum(other == name for other, _ in described) > 1]
faults += [f"--{name} is missing" for name in wanted.keys() - dict(described).keys()]
faults += [f"--{name} is no setting" for name, _ in described if name not in wanted]
faults += [f"--{name} has the default '{wanted[name]}', not '{text}'" for name, text in described
           if wanted.get(name, text) != text]
if faults:
    sys.exit(f"{PAGE}: " + "; ".join(sorted(faults)))
print(f"{len(described)} settings")
