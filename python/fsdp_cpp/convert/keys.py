"""Sorts the keys of a DCP checkpoint by what they are, in the forms that torch, Megatron and their users save.

    model       model.*, app.model.*, model0.* (Megatron's chunks), state_dict.*, or names without a section
    optimizer   optimizer.state.<parameter>.exp_avg, flattened or not, by names or by numbers, one optimizer or several;
                param_groups, or Megatron's param_to_group_meta
"""

import fnmatch
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from . import dcp
from .._C import Error

_MODEL = re.compile(r"model\d*|state_dict|model_state_dict")
_OPTIMIZER = re.compile(r"optim|optimizer|optimizers|optimizer_states|optimizer_state_dict")
_FLAT_OPTIMIZER = re.compile(r"(?:optim|optimizer)\.((?:state|param_groups|param_to_group_meta)\..*)")
_OF_ONE_OPTIMIZER = re.compile(r"^\d+\.(?=(?:state|param_groups|param_to_group_meta)\.)")
_STATE = re.compile(r"state\.(.+)\.([^.]+)")
_GROUP = re.compile(r"(?:param_groups|param_to_group_meta)\.(.+)\.([^.]+)")
# Sections whose tensors belong to the program that saved them.
_PROGRAM = ("rng_state", "rng", "lr_scheduler", "scheduler", "schedulers", "opt_param_scheduler", "dataloader", "train_state",
            "rerun_state_machine")
# Modules that wrap others without being part of the model.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class Found(NamedTuple):
    """Keys of the checkpoint, sorted by what they are."""
    model: dict    # name -> key
    aliases: dict  # name that the optimizer may use -> name
    state: dict    # (parameter as the optimizer calls it, "exp_avg") -> key
    groups: dict   # (group or parameter, "lr") -> key
    dropped: dict  # key of a tensor that is not converted -> why
    objects: list  # keys of what is no tensor, and not converted either
    unknown: list  # keys of tensors that nothing here knows
    notes: list    # sentences about what was decided without being asked


def some_of(names: Iterable[str]) -> str:
    """'a', 'b' and 17 more: at most 20."""
    names = list(names)
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return ", ".join(f"'{each}'" for each in names[:20]) + more


def _section(path):
    """("model" | "optimizer" | "program" | "unknown", the name in that section)."""
    parts = [str(each) for each in path]
    if len(parts) > 1 and parts[0] == "app":
        parts = parts[1:]
    if len(parts) == 1:
        flat = _FLAT_OPTIMIZER.fullmatch(parts[0])
        if flat:
            return "optimizer", flat[1]
        return ("program" if parts[0].split(".")[0] in _PROGRAM else "model"), parts[0]
    name = ".".join(parts[1:])
    if _MODEL.fullmatch(parts[0]):
        return "model", name
    if _OPTIMIZER.fullmatch(parts[0]):
        return "optimizer", _OF_ONE_OPTIMIZER.sub("", name)
    return ("program" if parts[0] in _PROGRAM else "unknown"), name


def sorted_keys(checkpoint: dcp.Checkpoint, prefix: str | None, allow_extra: Sequence[str]) -> Found:
    """`prefix` and `allow_extra` as find_training_state() takes them."""
    found = Found({}, {}, {}, {}, {}, [], [], [])
    models = {}  # key -> name in its section
    for key, path in checkpoint.paths.items():
        is_tensor = key in checkpoint.tensors
        kind, name = _section(path)
        if any(fnmatch.fnmatchcase(key, pattern) for pattern in allow_extra):
            drop(checkpoint, found, key, "allowed by --allow-extra")
        elif prefix and key.startswith(prefix) and is_tensor:
            models[key] = name
        elif kind == "optimizer" and (match := _STATE.fullmatch(name)):
            _add_once(found.state, match.groups(), key)
        elif kind == "optimizer" and (match := _GROUP.fullmatch(name)):
            found.groups[match.groups()] = key
        elif not is_tensor or kind == "program" or name.endswith("_extra_state"):
            drop(checkpoint, found, key, "not of the model")
        elif kind == "model" and not prefix:
            models[key] = name
        else:
            found.unknown.append(key)
    names = _own_names(models)
    for key, name in names.items():
        final = key.removeprefix(prefix) if prefix else name
        if final in found.model:
            raise Error(f"{checkpoint.directory}: '{key}' and '{found.model[final]}' are both '{final}'; leave one of them "
                        "out (--allow-extra)")
        found.model[final] = key
        found.aliases.setdefault(name, final)
    return found


def drop(checkpoint: dcp.Checkpoint, found: Found, key: str, why: str) -> None:
    """Notes that a key is not converted; a reason is given for tensors alone."""
    if key in checkpoint.tensors:
        found.dropped[key] = why
    else:
        found.objects.append(key)


def _add_once(state, place, key):
    if place in state:
        raise Error(f"'{key}' and '{state[place]}' are the same state of two optimizers; leave one of them out "
                    "(--allow-extra)")
    state[place] = key


def without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _own_names(models):
    """key -> the name without modules that wrap others; `module.` is one where all names begin with it."""
    names = {key: without_wrappers(name) for key, name in models.items()}
    while names and all(name.startswith("module.") for name in names.values()):
        names = {key: name.removeprefix("module.") for key, name in names.items()}
    return names
