"""Receives the weights of a running training of fsdp.cpp: applies its patches in place to a module or a state dict.

One file that needs torch alone, to be copied into a serving system. The format of patches is in docs/weights-out.md.

    receiver = Receiver(model)               # any torch.nn.Module, or a dict of tensors
    while serving:
        receiver.poll("runs/rl/patches")     # applies whatever is new; the weights are then the trainer's, bit for bit

vLLM takes checkpoint-coordinate patches through its own loaders, for any tensor-parallel size:

    patch = Patch(path)
    load_checkpoint_weight_patches(model, (CheckpointWeightPatch(*change) for change in patch.changes()))
"""

import functools
import hmac
import json
import math
import operator
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
           "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
           "U8": torch.uint8, "BOOL": torch.bool}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SIGNATURE = "signature"
_MAX_SLICES = 4096  # of a tensor that are copied one by one; more are one scatter


class PatchError(RuntimeError):
    """A patch that cannot be applied; nothing has been changed."""


class Change(NamedTuple):
    """New values of one tensor: the fields of vLLM's CheckpointWeightPatch, in its order."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: torch.Tensor          # one-dimensional
    indices: torch.Tensor | None  # where they belong in the flattened tensor, int64; None: values are all of it


# --- checksums --------------------------------------------------------------------------------------------------------------------

# The register of a CRC is linear in the bytes. So words of four bytes are joined in pairs, all pairs at once: what the first becomes
# while the bytes of the second pass, xor the second; then pairs of those, and so on.

_BLOCK_BYTES = 64 << 20


def _after_a_byte(register: int) -> int:
    for _ in range(8):
        register = (register >> 1) ^ (0x82F63B78 if register & 1 else 0)
    return register


@functools.cache
def _columns(level: int) -> list[int]:
    """The register that 4 * 2^level zero bytes make of each of its bits."""
    if level == 0:
        return [functools.reduce(lambda register, _: _after_a_byte(register), range(4), 1 << bit) for bit in range(32)]
    before = _columns(level - 1)
    return [functools.reduce(operator.xor, (before[bit] for bit in range(32) if column >> bit & 1)) for column in before]


@functools.cache
def _tables(level: int) -> list[torch.Tensor]:
    """The register after those bytes for all values of its lower half, and of its upper half."""
    halves = []
    for columns in (_columns(level)[:16], _columns(level)[16:]):
        table = torch.zeros(1, dtype=torch.int64)
        for column in columns:
            table = torch.cat([table, table ^ column])
        halves.append(table.to(torch.int32))  # keeps the lower 32 bits
    return halves


def _passed(level: int, registers: torch.Tensor) -> torch.Tensor:
    lower, upper = _tables(level)
    return lower.index_select(0, registers & 0xFFFF) ^ upper.index_select(0, (registers >> 16) & 0xFFFF)


def crc32c(data: torch.Tensor) -> int:
    """The CRC32C (Castagnoli) of bytes."""
    register = 0xFFFFFFFF
    for begin in range(0, data.numel(), _BLOCK_BYTES):
        block = data[begin:begin + _BLOCK_BYTES]
        num_words = block.numel() // 4
        if num_words > 0:
            words = torch.zeros(1 << (num_words - 1).bit_length(), dtype=torch.int32)  # zeros come first, and change nothing
            words[-num_words:] = block[:4 * num_words].clone().view(torch.int32)
            words[-num_words] ^= register - (register >> 31 << 32)
            level = 0
            while words.numel() > 1:
                words = _passed(level, words[0::2]) ^ words[1::2]
                level += 1
            register = int(_passed(0, words)) & 0xFFFFFFFF
        for byte in block[4 * num_words:].tolist():
            register = _after_a_byte((register ^ byte) & 255) ^ (register >> 8)
    return register ^ 0xFFFFFFFF


def _size_of(path: str) -> int:
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its other end
        raise OSError(f"{path} is no regular file")
    return status.st_size


def _read_text(path: str, most: int = -1) -> bytes:
    _size_of(path)
    with open(path, "rb") as file:
        return file.read(most)


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):  # one parser keeps the first, another one the last
        raise ValueError("an object has a key twice")
    return found


def _bytes_of(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


# --- patches ----------------------------------------------------------------------------------------------------------------------

class _Part:
    """The part of one tensor that one file has."""

    def __init__(self, where: str, numel: int, values: torch.Tensor, skips: torch.Tensor | None, ranges: torch.Tensor | None) -> None:
        self.values = values
        self._skips, self._ranges = skips, ranges
        if ranges is not None:
            ends = ranges.flatten()
            fits = (ranges.dtype == torch.int64 and ranges.dim() == 2 and ranges.shape[1] == 2
                    and (ranges.numel() == 0 or (ranges[0, 0] >= 0 and ranges[-1, 1] <= numel))
                    and bool((ends[1:] > ends[:-1]).all()) and int((ranges[:, 1] - ranges[:, 0]).sum()) == values.numel())
        else:
            assert skips is not None
            fits = skips.dtype == torch.uint8 and (skips.dim() == 1 or (skips.dim() == 2 and skips.shape[1] == 2))
            if fits:
                skipped, is_element = self._decoded()
                places = torch.cumsum(skipped + is_element, 0)[is_element]
                fits = places.numel() == values.numel() and (places.numel() == 0 or int(places[-1]) <= numel)
        if not fits or values.dim() != 1:
            raise PatchError(f"{where}: its positions do not fit {values.numel()} values and the tensor's {numel} elements; the patch is "
                             "damaged, so wait for another one")

    def _decoded(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._skips is not None
        skips = self._skips.long()
        is_wide = skips.dim() == 2  # two bytes each, the lower one first
        skipped = skips[:, 0] + 256 * skips[:, 1] if is_wide else skips
        return skipped, skipped != (65535 if is_wide else 255)

    def positions(self) -> torch.Tensor:
        if self._ranges is None:
            skipped, is_element = self._decoded()
            return (torch.cumsum(skipped + is_element, 0) - 1)[is_element]
        lengths = self._ranges[:, 1] - self._ranges[:, 0]
        starts = self._ranges[:, 0] - (lengths.cumsum(0) - lengths)
        return torch.arange(self.values.numel()) + starts.repeat_interleave(lengths)

    def elements(self) -> torch.Tensor:
        """Begin and end of each range of them, ascending."""
        if self._ranges is not None:
            return self._ranges
        positions = self.positions()
        is_first = torch.ones(positions.numel(), dtype=torch.bool)
        is_first[1:] = positions[1:] != positions[:-1] + 1
        return torch.stack([positions[is_first], positions[is_first.roll(-1)] + 1], 1)

    def put(self, flat: torch.Tensor) -> None:
        """Sets the values in the flattened tensor."""
        # Whole numbers of equal width carry the bits unseen, whatever type they are of.
        flat, values = (each.view(_BITS[each.element_size()]) for each in (flat, self.values.to(flat.device)))
        if self._ranges is None or len(self._ranges) > _MAX_SLICES:
            flat[self.positions().to(flat.device)] = values
            return
        begin = 0
        for first, last in self._ranges.tolist():
            flat[first:last] = values[begin:begin + last - first]
            begin += last - first


class Patch:
    """A patch on the disk. The constructor reads and verifies all of it, before anyone applies anything."""

    def __init__(self, path: str | os.PathLike[str], secret: bytes | None = None) -> None:
        self.path = os.fspath(path)
        self.secret = secret  # that has signed it
        self._signed = hmac.new(secret, digestmod="sha256") if secret else None
        try:
            facts = self._read_facts()
            self.base: str = facts["base"]
            self.start: int | None = facts["from"]  # a step; None: a full patch
            self.end: int = facts["to"]
            self.names: str = facts["names"]  # "hf" or "vllm"
            self.tensors = {name: (_DTYPES[each["dtype"]], tuple(each["shape"])) for name, each in facts["tensors"].items()}
            self._check_facts(facts)
            self._parts: dict[str, list[_Part]] = {}
            for file in facts["files"]:
                self._read_file(os.path.join(self.path, file["path"]), file["bytes"], file["crc32c"])
            self._check_signature()
        except OSError as error:
            raise PatchError(f"{self.path} cannot be read: {error}") from None
        except PatchError:
            raise
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RuntimeError) as error:  # torch's, too
            raise PatchError(f"{self.path} is not a patch as docs/weights-out.md describes it ({type(error).__name__}: {' '.join(str(error).split())}); "
                             "use a receiver of the trainer's version") from None
        self._check_elements()

    @property
    def is_full(self) -> bool:
        return self.start is None

    @property
    def num_values(self) -> int:
        """Elements that it sets."""
        return sum(part.values.numel() for parts in self._parts.values() for part in parts)

    def changes(self) -> Iterator[Change]:
        """Tensor by tensor: of a full patch whole tensors, of another one positions and values."""
        for name, parts in self._parts.items():
            dtype, shape = self.tensors[name]
            if self.is_full:
                values = torch.empty(math.prod(shape), dtype=dtype)
                for part in parts:
                    part.put(values)
                yield Change(name, shape, dtype, values, None)
            else:
                yield Change(name, shape, dtype, torch.cat([part.values for part in parts]),
                             torch.cat([part.positions() for part in parts]))

    def put(self, name: str, flat: torch.Tensor) -> None:
        """Sets the changed elements of one tensor, which is given flattened."""
        for part in self._parts.get(name, ()):
            part.put(flat)

    def _check_facts(self, facts) -> None:
        steps = [self.end] if self.start is None else [self.start, self.end]
        if any(type(step) is not int or not 0 <= step < 1 << 62 for step in steps) or steps != sorted(set(steps)):
            raise ValueError(f"it leads from {self.start} to {self.end}")
        if not re.fullmatch("[0-9a-f]{16}", self.base):
            raise ValueError(f"its base is {self.base!r}")
        for name, (_, shape) in self.tensors.items():
            if any(type(size) is not int or size < 0 for size in shape) or math.prod(max(size, 1) for size in shape) >= 1 << 60:
                raise ValueError(f"'{name}' has the shape {list(shape)}")
        paths = [file["path"] for file in facts["files"]]
        if len(set(paths)) < len(paths) or not all(re.fullmatch(r"\w[\w.-]*", path, re.ASCII) for path in paths):
            raise ValueError(f"its files are {paths}")

    def _read_facts(self):
        text = _read_text(os.path.join(self.path, "patch.json"))
        if self._signed:
            self._signed.update(text)
        found = re.search(rb',\n "crc32c": (\d+)\n}\n\Z', text)
        if not found or crc32c(_bytes_of(text[:found.start()] + b"\n}\n")) != int(found[1]):
            raise PatchError(f"{self.path}/patch.json is not what was written; it is damaged, so wait for another patch")
        facts = json.loads(text, object_pairs_hook=_object)
        if facts["format"] != "fsdp patch" or facts["version"] > 1:
            raise PatchError(f"{self.path} is a '{facts['format']}' of version {facts['version']}, and this receiver reads 'fsdp patch' up to "
                             "version 1; use a receiver of the trainer's version")
        return facts

    def _read_file(self, path: str, num_bytes: int, checksum: int) -> None:
        is_there = _size_of(path) == num_bytes and num_bytes >= 8
        if not is_there:
            data = torch.empty(0, dtype=torch.uint8)
        elif self._signed:  # not mapped: nobody may change it after it was read
            text = _read_text(path)
            self._signed.update(text)
            data = _bytes_of(text)
        else:
            data = torch.from_file(path, size=num_bytes, dtype=torch.uint8)
        if not is_there or crc32c(data) != checksum:
            raise PatchError(f"{path} is not what was written; it is damaged, so wait for another patch")
        header_end = 8 + int.from_bytes(bytes(data[:8].tolist()), "little")
        if header_end > num_bytes:
            raise ValueError(f"the header of {path} ends at byte {header_end}")
        header = json.loads(bytes(data[8:header_end].tolist()), object_pairs_hook=_object)
        header.pop("__metadata__", None)

        def stored(key: str) -> torch.Tensor | None:
            if key not in header:
                return None
            begin, end = header[key]["data_offsets"]
            if not 0 <= begin <= end <= num_bytes - header_end:
                raise ValueError(f"'{key}' in {path}")
            # Cloned, because a view of another type must begin at a multiple of its size.
            return data[header_end + begin:header_end + end].clone().view(_DTYPES[header[key]["dtype"]]).view(header[key]["shape"])

        for key in header:
            kind, _, name = key.partition("/")
            dtype, shape = self.tensors[name]
            if kind not in ("values", "skips", "ranges") or f"values/{name}" not in header:
                raise ValueError(f"'{key}' in {path} has no values")
            if kind != "values":
                continue
            values, skips, ranges = stored(key), stored(f"skips/{name}"), stored(f"ranges/{name}")
            if values is None or values.dtype != dtype or (skips is None) == (ranges is None):
                raise ValueError(f"'{name}' in {path}")
            part = _Part(f"'{name}' in {path}", math.prod(shape), values, skips, ranges)
            self._parts.setdefault(name, []).append(part)

    def _check_signature(self) -> None:
        if self._signed:
            there = _read_text(os.path.join(self.path, _SIGNATURE), 1 << 12)
            if not hmac.compare_digest(there, self._signed.hexdigest().encode()):
                raise PatchError(f"{self.path} was not signed with this receiver's secret; let the trainer's side sign it")

    def _check_elements(self) -> None:
        """No element comes twice, and a full patch has all."""
        for name, (_, shape) in self.tensors.items():
            parts = self._parts.get(name, [])
            if len(parts) > 1:
                ranges = torch.cat([part.elements() for part in parts])
                ranges = ranges[ranges[:, 0].argsort()]
                if bool((ranges[1:, 0] < ranges[:-1, 1]).any()):
                    raise PatchError(f"{self.path} has elements of '{name}' twice; the patch is damaged, so wait for another one")
            numel = sum(part.values.numel() for part in parts)
            if self.is_full and numel != math.prod(shape):
                raise PatchError(f"{self.path} is a full patch and has {numel} of the {math.prod(shape)} elements of '{name}'; the patch is "
                                 "damaged, so wait for another one")


def sign(path: str | os.PathLike[str], secret: bytes) -> None:
    """Signs a patch, which PatchStream.write() has returned, for receivers that have the same secret: HMAC-SHA256 of patch.json and the
    files that it lists, in their order."""
    signed = hmac.new(secret, digestmod="sha256")
    text = _read_text(os.path.join(path, "patch.json"))
    signed.update(text)
    for file in json.loads(text)["files"]:
        signed.update(_read_text(os.path.join(path, file["path"])))
    hidden = os.path.join(path, f".{_SIGNATURE}.tmp")
    with open(hidden, "w") as out:
        out.write(signed.hexdigest())
    os.replace(hidden, os.path.join(path, _SIGNATURE))


# --- the receiver -----------------------------------------------------------------------------------------------------------------

class Receiver:
    """Keeps the tensors of a module or a dict equal to a trainer's.

    base and step: of the weights that the target has already; without them it waits for a full patch. rename: the target's name of
    a tensor, given the patch's. secret: that patches must be signed with (sign()); without it nobody asks who has written them. Tensors of
    the target that no patch names stay as they are.
    """

    def __init__(self, target: torch.nn.Module | Mapping[str, torch.Tensor], *, base: str | None = None, step: int | None = None,
                 rename: Callable[[str], str] = lambda name: name, secret: bytes | None = None) -> None:
        if isinstance(target, torch.nn.Module):
            parameters = dict(target.named_parameters(remove_duplicate=False))
            target = parameters | dict(target.named_buffers(remove_duplicate=False))
        self._target = target
        self._rename = rename
        self._secret = secret
        self.base = base
        self.step = step

    @torch.no_grad()
    def apply(self, patch: Patch | str | os.PathLike[str]) -> Patch:
        """Applies one patch in place, or raises a PatchError before anything is changed."""
        if not isinstance(patch, Patch):
            patch = Patch(patch, self._secret)
        if self._secret and patch.secret != self._secret:
            raise PatchError(f"{patch.path} was read without this receiver's secret; give its path")
        self._check_place(patch)
        targets = self._targets(patch)
        if patch.is_full:
            # Should it break off, the weights are of no step until a full patch has been applied.
            self.base = self.step = None
        for name, target in targets.items():
            flat = target.contiguous().view(-1)
            patch.put(name, flat)
            if not target.is_contiguous():
                target.copy_(flat.view(target.shape))
        self.base, self.step = patch.base, patch.end
        return patch

    def poll(self, directory: str | os.PathLike[str]) -> list[Patch]:
        """Applies the patches in a directory that continue what the target has, in their order; where none does, or one is damaged, a
        full patch of a later step, or of a training that began later. Returns those applied. PatchError if one in between is lost."""
        applied = []
        damaged: dict[str, PatchError] = {}
        while (path := self._next(os.fspath(directory), damaged)) is not None:
            try:
                patch = Patch(path, self._secret)
            except PatchError as error:  # a newer full one may do
                damaged[path] = error
                continue
            applied.append(self.apply(patch))
        return applied

    def _next(self, directory: str, damaged: Mapping[str, PatchError]) -> str | None:
        entries = [entry for entry in _entries(directory) if not self._secret or os.path.exists(os.path.join(entry.path, _SIGNATURE))]
        own = [entry for entry in entries if entry.base == self.base]
        began = max((entry.begun for entry in own), default=-1)
        following = [entry for entry in own if entry.start is not None and entry.start == self.step]
        ahead = [entry for entry in entries if entry.start is None and entry.base != self.base and entry.begun > began]
        ahead += [entry for entry in own if entry.start is None and (self.step is None or entry.end > self.step)]
        for choice in (following, ahead):
            if whole := [entry for entry in choice if entry.path not in damaged]:
                return max(whole, key=lambda entry: (entry.begun, entry.end)).path
        for entry in following + ahead:
            raise damaged[entry.path]
        later = [entry.start for entry in own if None not in (entry.start, self.step) and entry.start > self.step]
        if later:
            raise PatchError(f"{directory} has a patch from step {min(later)} on, and none from step {self.step}, which the weights are at; "
                             "let the trainer write a full patch")
        return None

    def _check_place(self, patch: Patch) -> None:
        if patch.is_full:
            return
        if self.base is None or self.step is None:
            raise PatchError(f"{patch.path} begins at step {patch.start}, and the weights here are of no known step; apply a full patch first")
        if patch.base != self.base:
            raise PatchError(f"{patch.path} has the base {patch.base}, and the weights here have {self.base}; apply a full patch of that training")
        if patch.start != self.step:
            raise PatchError(f"{patch.path} begins at step {patch.start}, and the weights here are of step {self.step}; apply the patches in "
                             "between, or a full one")

    def _targets(self, patch: Patch) -> dict[str, torch.Tensor]:
        targets = {}
        for name, (dtype, shape) in patch.tensors.items():
            own = self._rename(name)
            if own not in self._target:
                raise PatchError(f"{patch.path} has a tensor '{own}', which the target does not have; give a rename that tells its name there")
            target = self._target[own].detach()
            if target.dtype != dtype or tuple(target.shape) != shape:
                raise PatchError(f"{patch.path}: '{own}' is {dtype} {list(shape)}, and the target's is {target.dtype} {list(target.shape)}; "
                                 "make the target as the trainer's model is")
            targets[name] = target
        return targets


class _Entry(NamedTuple):
    start: int | None
    end: int
    base: str
    begun: int
    path: str


def _entries(directory: str) -> list[_Entry]:
    """The patches in a directory, by their names and first fields."""
    entries = []
    for name in os.listdir(directory) if os.path.isdir(directory) else ():
        if found := re.fullmatch(r"patch-(full|\d+)-(\d+)", name):
            path = os.path.join(directory, name)
            base, begun = _stream_of(path)
            entries.append(_Entry(None if found[1] == "full" else int(found[1]), int(found[2]), base, begun, path))
    return entries


def _stream_of(path: str) -> tuple[str, int]:
    """The stream a patch belongs to: its base, and when that began."""
    try:
        text = _read_text(os.path.join(path, "patch.json"), 1 << 12)
    except OSError:  # removed meanwhile
        return "", -1
    base, begun = re.search(rb'\n "base": "([0-9a-f]+)"', text), re.search(rb'\n "begun": (\d+)', text)
    return base[1].decode() if base else "", int(begun[1]) if begun else 0
