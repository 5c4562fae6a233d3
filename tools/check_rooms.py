#!/usr/bin/env python3
"""Checks who includes whom: a room (a folder of src/fsdp) may include only the rooms it may know.

Folders inside a room (comm/tcp) are furniture: they belong to their room, and its rule is theirs. A
room's public headers are in include/fsdp; they include public headers only.

    tools/check_rooms.py [FOLDER]      FOLDER has src/fsdp and include/fsdp; default: the project's

Prints one line per forbidden include and exits with 1 when there is one. docs/design.md explains the
rooms; this table is the rule.
"""

import pathlib
import re
import sys

LOWER = ("base", "layout", "memory", "comm")
ENGINE = LOWER + ("shard", "optim", "graph", "checkpoint", "nn", "data")

# Room -> the rooms it may know besides itself, lowest first.
MAY_KNOW = {
    "base": (),
    "layout": ("base",),
    "memory": ("base", "layout"),
    "comm": ("base",),
    "shard": LOWER,
    "optim": LOWER + ("shard",),
    "graph": LOWER + ("shard", "optim"),
    "checkpoint": LOWER + ("shard", "optim"),
    "nn": ("base", "comm", "shard"),
    "data": ("base",),
    "plan": ENGINE,
    "train": ENGINE + ("plan",),
    "cli": ENGINE + ("plan", "train"),
    "python": ENGINE,
}

# A room may narrow what it knows of another one to some headers.
ONLY_HEADERS = {("nn", "shard"): ("fsdp/shard/unit.h", "fsdp/shard/layer_weights.h", "fsdp/shard/module_roles.h",
                                  "fsdp/shard/parameter_init.h", "fsdp/shard/recompute.h"),
                ("nn", "comm"): ("fsdp/comm/communicator.h", "fsdp/comm/mesh.h")}

# Rooms that belong to the library fsdp_planning: quick to build, to fuzz and to run for 4096 ranks.
# base and memory keep their torch-using files apart by name.
TORCH_FREE = ("base", "layout", "memory", "data", "plan")
TORCH_FILES = re.compile(r"^(torch|stream|event|device)[a-z_]*\.(h|cpp)$")

# 23 s of compile time each; a header passes that on to everybody who includes it.
NOT_IN_HEADERS = ("torch/torch.h", "torch/all.h", "torch/extension.h")

# Public, and made by CMake.
GENERATED = ("fsdp/base/version.h",)

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
TORCH_PREFIXES = ("torch/", "ATen/", "c10/", "caffe2/")
SUFFIXES = (".h", ".cpp", ".cu", ".cuh", ".in")


def includes(text):
    """Yields (line number, quote, header) for each #include of a file's text."""
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE.match(line)
        if match:
            yield number, match.group(1), match.group(2)


def room_fault(room, header):
    """Why `room` may not include the project's `header`, or None."""
    other = header.split("/")[1] if header.count("/") > 1 else None
    if other is None:
        # fsdp/fsdp.h, fsdp/nn.h and fsdp/data.h, the umbrellas, include several rooms.
        return f"'{header}' is an umbrella for users; include the header that is needed"
    if other not in MAY_KNOW:
        return f"'{other}' is no room: add it to MAY_KNOW in tools/check_rooms.py"
    if other != room and other not in MAY_KNOW[room]:
        known = ", ".join(MAY_KNOW[room]) or "no other room"
        return f"room '{room}' may not know '{other}' (it knows {known})"
    allowed = ONLY_HEADERS.get((room, other))
    if allowed is not None and header not in allowed:
        return f"of room '{other}', room '{room}' may include only {', '.join(allowed)}"
    return None


def torch_fault(room, file, header):
    """Why `file` (its path inside `room`) may not include `header`, one of torch or one it spoils, or None."""
    name = file.rsplit("/", 1)[-1]
    if header == "filesystem":
        return "libtorch brings another version's std::filesystem; use base/durable_file.h or POSIX"
    if not header.startswith(TORCH_PREFIXES):
        return None
    if room in TORCH_FREE and not (room in ("base", "memory") and TORCH_FILES.match(name)):
        return f"room '{room}' is free of torch"
    if name.endswith((".h", ".cuh")) and header in NOT_IN_HEADERS:
        return f"'{header}' is too heavy for a header; include what is used (ATen/core/Tensor.h, ...)"
    return None


def faults_of_file(room, file, text):
    """Yields (line number, sentence) for each forbidden include of `file` (its path inside `room`)."""
    for number, quote, header in includes(text):
        if header.startswith("fsdp/"):
            fault = room_fault(room, header)
            if fault is None and quote == "<":
                fault = f"write the project's own header with quotes: \"{header}\""
        elif quote == '"' and "/" not in header:
            folder = "/".join(("fsdp", room, *file.split("/")[:-1]))
            fault = f"write the whole path: \"{folder}/{header}\""
        else:
            fault = torch_fault(room, file, header)
        if fault:
            yield number, fault


def public_faults(public, text):
    """Yields (line number, sentence) for each header of src that a file of `public` (include/) includes."""
    for number, _, header in includes(text):
        if header.startswith("fsdp/") and header not in GENERATED and not (public / header).is_file():
            yield number, f"'{header}' is not public: a public header may include only headers of include/"


def check(root, public=None):
    """Returns the report lines for all files below `root`, the folder that holds the rooms (.../fsdp).

    `public` is include/, if `root` is the folder of public headers in it.
    """
    lines = []
    for path in sorted(root.rglob("*")):
        if not path.is_file() or path.suffix not in SUFFIXES:
            continue
        parts = path.relative_to(root).parts
        text = path.read_text()
        if public is not None:
            lines += [f"{path}:{number}: {fault}" for number, fault in public_faults(public, text)]
        if len(parts) == 1:  # umbrella headers lie beside the rooms
            continue
        if parts[0] not in MAY_KNOW:
            lines.append(f"{path}: '{parts[0]}' is no room: add it to MAY_KNOW in tools/check_rooms.py")
            continue
        for number, fault in faults_of_file(parts[0], "/".join(parts[1:]), text):
            lines.append(f"{path}:{number}: {fault}")
    return lines


def main():
    default = pathlib.Path(__file__).resolve().parent.parent
    project = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else default
    rooms = project / "src" / "fsdp"
    if not rooms.is_dir():
        sys.exit(f"check_rooms: '{rooms}' is no folder: name the folder that has src/fsdp and include/fsdp.")
    lines = check(rooms) + check(project / "include" / "fsdp", public=project / "include")
    print("\n".join(lines), end="\n" if lines else "")
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
