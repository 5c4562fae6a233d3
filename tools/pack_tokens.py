#!/usr/bin/env python3
"""Packs text with a HuggingFace tokenizer into a token file for fsdp.cpp (docs/data.md has the format).

    tools/pack_tokens.py INPUT... --tokenizer tokenizer.json --output FILE.bin

INPUTs are UTF-8 text files, or directories (files in and below them by path; hidden, empty and binary ones
are left out). A document is a file, or with --field what each line of it, a JSON object, has under that name; the token
of --end-of-document follows it. Needs the Python packages `tokenizers` and `numpy`; after `make setup`,
.venv/bin/python3 has them.
"""

import argparse
import json
import os
import pathlib
import struct
import sys
import tempfile

import numpy
import tokenizers

HEADER_BYTES = 128
NAME_BYTES = 64
POLYNOMIAL = 0x82F63B78  # CRC32C, bits reversed
NONE = -1


def times_x(values, times):
    """CRC registers (an array) after `times` zero bits."""
    for _ in range(times):
        values = (values >> numpy.uint32(1)) ^ numpy.where(values & 1, numpy.uint32(POLYNOMIAL), numpy.uint32(0))
    return values


BYTE_TABLE = times_x(numpy.arange(256, dtype=numpy.uint32), 8)


def zero_bytes_tables(tables):
    """The four tables that do twice what `tables` do: tables[k][v] is the register v << 8k after zero bytes."""
    return [apply_tables(tables, table) for table in tables]


def apply_tables(tables, values):
    return (tables[0][values & 255] ^ tables[1][values >> 8 & 255] ^ tables[2][values >> 16 & 255] ^ tables[3][values >> 24])


def one_zero_byte():
    shifts = [numpy.arange(256, dtype=numpy.uint32) << numpy.uint32(8 * k) for k in range(4)]
    return [times_x(values, 8) for values in shifts]


def crc32c(data):
    """Of an array of bytes. Many lanes at a time, since Python counts bytes slowly; then lanes are joined in pairs."""
    lane_bytes_log2 = max(0, (max(1, len(data)).bit_length() - 1) // 2)
    lane_bytes = 1 << lane_bytes_log2
    num_lanes = 1 << max(0, (-(-len(data) // lane_bytes) - 1).bit_length())
    # Zeros in front change nothing while the register is zero.
    padding = num_lanes * lane_bytes - len(data)
    lanes = numpy.concatenate([numpy.zeros(padding, numpy.uint8), data]).reshape(num_lanes, lane_bytes)
    registers = numpy.zeros(num_lanes, numpy.uint32)
    for column in lanes.T:
        registers = BYTE_TABLE[(registers ^ column) & 255] ^ (registers >> numpy.uint32(8))
    tables = one_zero_byte()
    for _ in range(lane_bytes_log2):
        tables = zero_bytes_tables(tables)
    while len(registers) > 1:
        registers = apply_tables(tables, registers[0::2]) ^ registers[1::2]
        tables = zero_bytes_tables(tables)
    # The register begins with all bits set and ends inverted: what those bits become after all the bytes is added.
    initial = numpy.array([0xFFFFFFFF], numpy.uint32)
    power, left = one_zero_byte(), len(data)
    while left:
        if left & 1:
            initial = apply_tables(power, initial)
        power, left = zero_bytes_tables(power), left >> 1
    return int(registers[0] ^ initial[0]) ^ 0xFFFFFFFF


def joined_crc32c(first, second, second_bytes):
    """The checksum of two neighbouring pieces from theirs."""
    register = numpy.array([first], numpy.uint32)
    power = one_zero_byte()
    while second_bytes:
        if second_bytes & 1:
            register = apply_tables(power, register)
        power, second_bytes = zero_bytes_tables(power), second_bytes >> 1
    return int(register[0]) ^ second


def text_files(inputs):
    for path in map(pathlib.Path, inputs):
        if not path.is_dir():
            yield path
            continue
        below = [p for p in path.rglob("*") if p.is_file() and p.stat().st_size > 0]
        for each in sorted(below, key=os.fsencode):
            hidden = any(part.startswith(".") for part in each.relative_to(path).parts)
            if not hidden and b"\0" not in each.open("rb").read(8192):
                yield each


def documents(path, field):
    """Of one file. Lines of JSON are no text, so somebody must say where the text is."""
    if field is None:
        if path.suffix in (".jsonl", ".ndjson"):
            sys.exit(f"pack_tokens: {path}: has JSON objects as lines; name the field with the text, e.g. --field text.")
        yield path.read_text(encoding="utf-8")
        return
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                text = json.loads(line)[field]
                if not isinstance(text, str):
                    raise TypeError(text)
            except (ValueError, KeyError, TypeError):
                sys.exit(f"pack_tokens: {path}: line {number} is no JSON object with a text named '{field}'.")
            yield text


def header(width, vocabulary, num_tokens, num_documents, end, name, checksum):
    packed = struct.pack("<8sIIqqqq64sIQ", b"fsdptok\n", 1, width, vocabulary, num_tokens, num_documents, end,
                         name.encode("ascii"), checksum, 0)
    return packed + struct.pack("<I", crc32c(numpy.frombuffer(packed, numpy.uint8)))


class TokenStream:
    """Tokens on their way to a file, after an empty header; a checksum of a large piece costs less per byte."""

    PIECE_TOKENS = 1 << 22

    def __init__(self, out, width):
        self.out, self.width = out, width
        self.pending, self.count, self.checksum = [], 0, 0
        out.write(bytes(HEADER_BYTES))

    def write(self, tokens):
        self.pending += tokens
        if len(self.pending) >= self.PIECE_TOKENS:
            self.flush()

    def flush(self):
        data = numpy.array(self.pending, f"<u{self.width}").view(numpy.uint8)
        self.out.write(data.tobytes())
        self.checksum = joined_crc32c(self.checksum, crc32c(data), len(data))
        self.count += len(self.pending)
        self.pending = []


def pack(options, tokenizer, out):
    vocabulary = max(tokenizer.get_vocab().values()) + 1
    width = 2 if vocabulary <= 1 << 16 else 4
    end = NONE
    if options.end_of_document:
        end = tokenizer.token_to_id(options.end_of_document)
        if end is None:
            sys.exit(f"pack_tokens: --end-of-document is '{options.end_of_document}'; the tokenizer has no such token.")
    num_documents = 0
    tokens = TokenStream(out, width)
    for path in text_files(options.inputs):
        for text in documents(path, options.field):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            tokens.write(ids + ([end] if end != NONE else []))
            num_documents += 1
    tokens.flush()
    out.seek(0)
    out.write(header(width, vocabulary, tokens.count, num_documents, end, options.name, tokens.checksum))
    return tokens.count, num_documents


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="text files and directories")
    parser.add_argument("--tokenizer", required=True, help="a tokenizer.json, or the directory that holds one")
    parser.add_argument("--output", required=True, help="the file to write, named *.bin")
    parser.add_argument("--end-of-document", metavar="TOKEN", help="what follows each document, e.g. '</s>'; default: nothing")
    parser.add_argument("--field", metavar="NAME", help="INPUTs are JSON lines; the text of each is in this field")
    parser.add_argument("--name", help="the tokenizer's name in the file; default: that of its directory")
    options = parser.parse_args()
    path = pathlib.Path(options.tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    options.name = options.name or path.resolve().parent.name
    if not (options.name.isascii() and options.name.isprintable() and 1 <= len(options.name) <= NAME_BYTES):
        sys.exit(f"pack_tokens: --name is '{options.name}'; it must be 1 to {NAME_BYTES} printable ASCII characters.")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing more special
        sys.exit(f"pack_tokens: --tokenizer is '{path}', which cannot be read: {error}.")
    output = pathlib.Path(options.output)
    with tempfile.NamedTemporaryFile(dir=output.resolve().parent, prefix=f".{output.name}.", delete=False) as out:
        try:
            num_tokens, num_documents = pack(options, tokenizer, out)
            out.flush()
            os.fsync(out.fileno())
            os.chmod(out.name, 0o644)
            os.replace(out.name, output)
        except BaseException:
            os.unlink(out.name)
            raise
    print(f"wrote {output}: {num_tokens} tokens, {num_documents} documents")


if __name__ == "__main__":
    main()
