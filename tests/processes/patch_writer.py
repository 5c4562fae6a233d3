"""Writes patches as docs/weights-out.md describes them, for tests of receivers: slowly, and with nothing of theirs."""

import json
import os
import struct

import torch

import small_runs

NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int64: "I64", torch.uint8: "U8",
         torch.float8_e4m3fn: "F8_E4M3"}


def bytes_of(tensor):
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


def skips_of(positions, width):
    """Numbers of one or two bytes, as U8 of shape [m] or [m, 2]."""
    largest = 256 ** width - 1
    numbers, place = [], 0
    for position in positions:
        skipped = position - place
        numbers += [largest] * (skipped // largest) + [skipped % largest]
        place = position + 1
    flat = [number >> (8 * byte) & 255 for number in numbers for byte in range(width)]
    return torch.tensor(flat, dtype=torch.uint8).view((-1, 2) if width == 2 else (-1,))


def ranges_of(positions):
    ranges = []
    for position in positions:
        if ranges and ranges[-1][1] == position:
            ranges[-1][1] += 1
        else:
            ranges.append([position, position + 1])
    return torch.tensor(ranges, dtype=torch.int64)


def safetensors(tensors):
    header, data = {}, b""
    for name, tensor in tensors.items():
        stored = bytes_of(tensor)
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(stored)]}
        data += stored
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def write(directory, weights, changed, *, base, start, end, ranks=1, form="skips1", begun=1_700_000_000, **facts):
    """changed: {name: ascending positions}, whose values are taken from weights. Returns the patch's path."""
    path = os.path.join(directory, f"patch-{'full' if start is None else f'{start:08}'}-{end:08}")
    hidden = os.path.join(directory, ".being-written.tmp")
    os.makedirs(hidden)
    files = []
    for rank in range(ranks):
        tensors = {}
        for name, positions in changed.items():
            mine = positions[len(positions) * rank // ranks:len(positions) * (rank + 1) // ranks]
            if not mine:
                continue
            coded = ranges_of(mine) if form == "ranges" else skips_of(mine, int(form[-1]))
            tensors[f"{'ranges' if form == 'ranges' else 'skips'}/{name}"] = coded
            tensors[f"values/{name}"] = weights[name].detach().flatten()[torch.tensor(mine)]
        content = safetensors(tensors)
        files.append({"path": f"{rank:05}.safetensors", "bytes": len(content), "crc32c": small_runs.crc32c(content)})
        with open(os.path.join(hidden, files[-1]["path"]), "wb") as file:
            file.write(content)
    record = {"format": "fsdp patch", "version": 1, "base": base, "begun": begun, "from": start, "to": end, "names": "hf",
              "tensors": {name: {"dtype": NAMES[value.dtype], "shape": list(value.shape)} for name, value in weights.items()},
              "files": files, **facts}
    write_record(os.path.join(hidden, "patch.json"), record)
    os.rename(hidden, path)
    return path


def write_record(path, record):
    lines = ",\n".join(f" {json.dumps(field)}: {json.dumps(value)}" for field, value in record.items())
    checksum = small_runs.crc32c(f"{{\n{lines}\n}}\n".encode())
    with open(path, "w") as file:
        file.write(f'{{\n{lines},\n "crc32c": {checksum}\n}}\n')
