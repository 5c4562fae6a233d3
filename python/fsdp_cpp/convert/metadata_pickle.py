"""Reads the pickle `.metadata` of torch.distributed.checkpoint without running anything that the pickle names.

A pickle can name any function to be called. This unpickler knows the classes of DCP's metadata alone, makes plain records in
their places, and refuses everything else by name.
"""

import pickle

import torch

from .._C import Error

# DCP's classes, and the modules that they were in since torch 2.1.
_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem",
            "torch.distributed._shard.sharded_tensor.metadata")
_RECORDS = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex",
            "StorageMeta", "_StorageInfo")
_MEMORY_FORMATS = ("_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING")
_PATH_MODULES = ("pathlib", "pathlib._local")  # the latter in Python 3.13
_PATHS = ("Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath", "PureWindowsPath")


def unpickled(path: str):
    """The record Metadata with the fields of DCP's class; what is inside of it is as the file says, unchecked."""
    try:
        with open(path, "rb") as file:
            return _MetadataUnpickler(file, path).load()
    except FileNotFoundError:
        raise Error(f"{path} is missing; give the directory of one checkpoint, the one that has it (DCP writes it last: "
                    "without it a save did not finish)") from None
    except Error:
        raise
    except OSError as error:
        raise Error(f"{path}: cannot read it: {error.strerror}") from error
    except Exception as error:  # a damaged pickle raises anything
        raise Error(f"{path}: this is no pickle of DCP's metadata ({type(error).__name__}: {error}); use another "
                    "checkpoint") from error


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file, path):
        super().__init__(file)
        self._path = path
        self._known = _known_classes()

    def find_class(self, module, name):
        if (module, name) in self._known:
            return self._known[module, name]
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        raise Error(f"{self._path}: the pickle asks for {module}.{name}, which is no class of DCP's metadata; nothing of it "
                    "was run. Give a directory that torch.distributed.checkpoint wrote")


def _known_classes():
    """Classes that a pickle may name: new stand-ins at every call, so that a pickle that changes them changes nothing that stays."""

    class Record:
        """Fields as the pickle gives them."""

    class Properties:
        """A tensor's properties; its type is all that matters, the rest is deprecated."""

        def __setstate__(self, state):
            self.dtype = state[0] if isinstance(state, tuple) else state["dtype"]

    def size(values=()):
        return tuple(values)

    def ignored(*_):
        return None

    def member(owner, name):
        # In place of getattr(), as which Python 3.11.0 to 3.11.3 writes a memory format: a member of its enum.
        if owner is not ignored:
            raise pickle.UnpicklingError(f"it asks for the attribute {name!r} of something that is no memory format")

    known = {}
    for module in _MODULES:
        known.update({(module, name): type(name, (Record,), {}) for name in _RECORDS})
        known.update({(module, name): ignored for name in _MEMORY_FORMATS})
        known[module, "TensorProperties"] = Properties
    known.update({(module, name): ignored for module in _PATH_MODULES for name in _PATHS})
    known["torch.serialization", "_get_layout"] = ignored
    known["torch", "Size"] = size
    known["builtins", "getattr"] = member
    known["collections", "OrderedDict"] = dict
    return known
