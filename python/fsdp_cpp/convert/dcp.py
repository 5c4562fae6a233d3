"""Reads directories of torch.distributed.checkpoint (DCP), `.metadata` and `*.distcp`, of any program and number of ranks.

Neither torch.distributed nor a free unpickler is needed: `.metadata` is a pickle, which dcp_pickle.py reads; tensors are
torch.save streams inside the `.distcp` files, which torch.load reads with weights_only. read_metadata() checks the whole
directory without reading data; place_of() says at which byte of its file a chunk's elements begin, so that C++ can stream
them; read_tensor() and read_object() read what is small.
"""

import io
import os
import pickle
from typing import NamedTuple

import torch

from .._C import Error
from .metadata_pickle import unpickled

METADATA_NAME = ".metadata"


class Stream(NamedTuple):
    """A torch.save stream inside a file of the checkpoint."""
    file: str
    begin: int
    length: int


class Chunk(NamedTuple):
    """A box of a tensor, and the stream that holds it."""
    offsets: tuple
    sizes: tuple
    stream: Stream


class StoredTensor(NamedTuple):
    dtype: torch.dtype
    shape: tuple
    chunks: list  # together exactly the tensor; none without elements


class Place(NamedTuple):
    """Where a chunk's elements are: element [i, j] is `strides[0] * i + strides[1] * j` elements after byte `begin`."""
    file: str
    begin: int
    strides: tuple


class Checkpoint(NamedTuple):
    directory: str
    tensors: dict  # key -> StoredTensor
    objects: dict  # key -> Stream, of what is no tensor
    paths: dict    # key -> the path in the saved dict that the key was made of; in the order of the saved dict


def read_metadata(directory: str) -> Checkpoint:
    """Everything but data, checked: tensors are covered once, and their streams are inside of files that are there."""
    path = os.path.join(directory, METADATA_NAME)
    metadata = unpickled(path)
    tensors, objects = {}, {}
    try:
        streams = {_key_of(index): _stream_of(info) for index, info in metadata.storage_data.items()}
        for key, entry in metadata.state_dict_metadata.items():
            if hasattr(entry, "chunks"):
                tensors[key] = _tensor_of(key, entry, streams)
            else:
                objects[key] = streams[key, None]
        mapping = dict(getattr(metadata, "planner_data", None) or {})
        paths = {key: tuple(each) for key, each in mapping.items() if key in tensors or key in objects}
        paths.update({key: (key,) for key in (*tensors, *objects) if key not in paths})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Error(f"{path}: this is no metadata of torch.distributed.checkpoint ({type(error).__name__}: {error}); give a "
                    "directory that its save() wrote") from error
    checkpoint = Checkpoint(directory, tensors, objects, paths)
    _check_files(checkpoint)
    for key, tensor in tensors.items():
        _check_cover(key, tensor)
    return checkpoint


def place_of(checkpoint: Checkpoint, key: str, chunk: Chunk) -> Place:
    """Reads the head of the chunk's stream, and no data."""
    tensor = checkpoint.tensors[key]
    found = _load_chunk(checkpoint, key, chunk, device="meta")
    storage = found.untyped_storage()
    begin = storage._checkpoint_offset + found.storage_offset() * found.element_size()
    last = sum((size - 1) * stride for size, stride in zip(chunk.sizes, found.stride()))
    end = begin + (last + 1) * tensor.dtype.itemsize
    if end > chunk.stream.length:
        raise Error(f"{_file_of(checkpoint, chunk.stream)}: the chunk of '{key}' at {list(chunk.offsets)} reaches beyond its "
                    "stream; the file is damaged, so use another checkpoint")
    return Place(_file_of(checkpoint, chunk.stream), chunk.stream.begin + begin, tuple(found.stride()))


def read_tensor(checkpoint: Checkpoint, key: str) -> torch.Tensor:
    """The whole tensor, with one chunk beside it in memory."""
    tensor = checkpoint.tensors[key]
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for chunk in tensor.chunks:
        box = tuple(slice(begin, begin + size) for begin, size in zip(chunk.offsets, chunk.sizes))
        whole[box] = _load_chunk(checkpoint, key, chunk, device="cpu")
    return whole


def read_object(checkpoint: Checkpoint, key: str):
    """A number, text, list or dict; an Error for what torch.load(weights_only=True) refuses."""
    stream = checkpoint.objects[key]
    return _load(checkpoint, key, stream, device="cpu")


# --- records ---------------------------------------------------------------------------------------------------------------


def _whole_numbers(values):
    values = tuple(values)
    if not all(type(each) is int and each >= 0 for each in values):
        raise ValueError(f"{values} are not sizes or offsets")
    return values


def _key_of(index):
    offset = getattr(index, "offset", None)
    return index.fqn, None if offset is None else _whole_numbers(offset)


def _stream_of(info):
    transforms = getattr(info, "transform_descriptors", None)
    if transforms:
        raise Error(f"file '{info.relative_path}' was written through {list(transforms)}, which is not read here; save the "
                    "checkpoint without extensions")
    begin, length = _whole_numbers((info.offset, info.length))
    name = info.relative_path
    if not isinstance(name, str) or os.path.isabs(name) or ".." in name.replace("\\", "/").split("/"):
        raise Error(f"file '{name}' is outside of the checkpoint's directory; such a checkpoint is not read")
    return Stream(name, begin, length)


def _tensor_of(key, entry, streams):
    dtype = entry.properties.dtype
    if not isinstance(key, str) or not isinstance(dtype, torch.dtype):
        raise TypeError(f"tensor {key!r} has the type {dtype!r}")
    shape = _whole_numbers(entry.size)
    chunks = {}
    for each in entry.chunks:
        offsets, sizes = _whole_numbers(each.offsets), _whole_numbers(each.sizes)
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise ValueError(f"'{key}' has the shape {list(shape)} and a chunk of {list(sizes)} at {list(offsets)}")
        if 0 in sizes:  # of a rank whose part is empty
            continue
        stream = streams.get((key, offsets))
        if stream is None:
            raise Error(f"'{key}': the metadata names no file for the chunk at {list(offsets)}; a rank did not save its part, "
                        "so use another checkpoint")
        chunks[offsets, sizes] = Chunk(offsets, sizes, stream)  # replicas may be listed more than once, with one stream
    return StoredTensor(dtype, shape, list(chunks.values()))


# --- checks ----------------------------------------------------------------------------------------------------------------


def _file_of(checkpoint, stream):
    return os.path.join(checkpoint.directory, stream.file)


def _check_files(checkpoint):
    """Every file is there, and as long as its last stream needs."""
    streams = list(checkpoint.objects.values())
    streams += [chunk.stream for tensor in checkpoint.tensors.values() for chunk in tensor.chunks]
    ends = {}
    for stream in streams:
        ends[stream.file] = max(ends.get(stream.file, 0), stream.begin + stream.length)
    for name, end in ends.items():
        path = os.path.join(checkpoint.directory, name)
        if not os.path.isfile(path):
            raise Error(f"{path} is missing, and the metadata names it; copy the whole directory, or use another checkpoint")
        found = os.path.getsize(path)
        if found < end:
            raise Error(f"{path} has {found} bytes, and its tensors need {end}: the file is cut off; copy it again, or use "
                        "another checkpoint")


def _check_cover(key, tensor):
    for chunk in tensor.chunks:
        if any(begin + size > most for begin, size, most in zip(chunk.offsets, chunk.sizes, tensor.shape)):
            raise Error(f"'{key}': a chunk of {list(chunk.sizes)} at {list(chunk.offsets)} is outside of the shape "
                        f"{list(tensor.shape)}; the metadata is wrong, so use another checkpoint")
    fault = None if 0 in tensor.shape else _cover_fault([(c.offsets, c.sizes) for c in tensor.chunks], tensor.shape)
    if fault:
        what, ranges = fault
        box = "[" + ", ".join(f"{begin}:{end}" for begin, end in ranges) + "]"
        raise Error(f"'{key}' {list(tensor.shape)}: elements {box} are {what}; the chunks must cover a tensor exactly once, "
                    "so use another checkpoint")


def _cover_fault(boxes, shape, dim=0):
    """None where boxes cover the shape exactly once, else ("missing" or "stored twice", ranges per dim)."""
    if dim == len(shape):
        return None if len(boxes) == 1 else ("stored twice" if boxes else "missing", ())
    spans = {}
    for offsets, sizes in boxes:
        spans.setdefault((offsets[dim], offsets[dim] + sizes[dim]), []).append((offsets, sizes))
    borders = [0, *(border for span in sorted(spans) for border in span), shape[dim]]
    if any(borders[i] != borders[i + 1] for i in range(0, len(borders), 2)):
        # Not slabs, one after the other: cuts at every border make such.
        cuts = sorted(set(borders))
        spans = {span: [box for box in boxes if box[0][dim] <= span[0] and span[1] <= box[0][dim] + box[1][dim]]
                 for span in zip(cuts, cuts[1:])}
    for span in sorted(spans):
        fault = _cover_fault(spans[span], shape, dim + 1)
        if fault:
            return fault[0], (span, *fault[1])
    return None


# --- streams ---------------------------------------------------------------------------------------------------------------


class _Slice(io.RawIOBase):
    """Bytes [begin, begin + length) of a file, as a file."""

    def __init__(self, file, begin, length):
        super().__init__()
        self._file, self._begin, self._length, self._position = file, begin, length, 0

    def readable(self):
        return True

    def seekable(self):
        return True

    def tell(self):
        return self._position

    def seek(self, offset, whence=os.SEEK_SET):
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        return self._position

    def readinto(self, buffer):
        count = max(0, min(len(buffer), self._length - self._position))
        self._file.seek(self._begin + self._position)
        read = self._file.readinto(memoryview(buffer)[:count])
        self._position += read
        return read


def _load(checkpoint, key, stream, device):
    path = _file_of(checkpoint, stream)
    try:
        with open(path, "rb") as file:
            return torch.load(_Slice(file, stream.begin, stream.length), map_location=device, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise Error(f"{path}: '{key}' at byte {stream.begin} cannot be read: {reason}") from error


def _load_chunk(checkpoint, key, chunk, device):
    tensor = checkpoint.tensors[key]
    found = _load(checkpoint, key, chunk.stream, device)
    if not isinstance(found, torch.Tensor) or found.dtype != tensor.dtype or tuple(found.shape) != chunk.sizes:
        what = f"{found.dtype} {list(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        raise Error(f"{_file_of(checkpoint, chunk.stream)}: the chunk of '{key}' at {list(chunk.offsets)} is {what}, and the "
                    f"metadata says {tensor.dtype} {list(chunk.sizes)}; the files are not of one checkpoint")
    return found
