"""Finds a model and its Adam state in a DCP checkpoint, under the model's own names.

Nothing is lost in silence: every tensor is used, is dropped for a reason that is listed, or is an error.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch

from . import dcp
from .._C import Error, UsageError
from .keys import drop, some_of, sorted_keys, without_wrappers
from .split_parameters import Part, Source, joined

MOMENTS = ("exp_avg", "exp_avg_sq")
SETTINGS = ("lr", "betas", "eps", "weight_decay")
STORABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
            torch.int32, torch.uint8)


class TrainingState(NamedTuple):
    model: dict     # parameter or buffer -> Source
    moments: dict   # "<parameter>.exp_avg" -> Source
    step: int       # steps that the optimizer has made
    settings: dict  # of the optimizer: "lr" -> its values, one per group at most
    dropped: dict   # key of a tensor that is not converted -> why
    objects: list   # keys of what is no tensor, and not converted either
    notes: list     # sentences about what was decided without being asked


def find_training_state(checkpoint: dcp.Checkpoint, *, prefix: str | None = None, renames: Sequence[tuple[str, str]] = (),
                        allow_extra: Sequence[str] = (), step: int | None = None, parameters: Sequence[str] | None = None,
                        keep_split: bool = False) -> TrainingState:
    """Model, moments and step under the model's names; an Error that lists what nothing here knows.

    `prefix`: what the model's keys begin with. `renames`: (from, to); * is any text, and a name without * is also the
    beginning of names below it. `allow_extra`: patterns of keys to leave out. `step`: where the checkpoint has none, or
    several. `parameters`: names in the order of the optimizer, for state by numbers. `keep_split`: leaves Megatron's split
    parameters.
    """
    found = sorted_keys(checkpoint, prefix, allow_extra)
    if not found.model:
        raise Error(f"{checkpoint.directory}: no tensor of a model was found; there are {some_of(checkpoint.tensors)}. Say "
                    "what the model's keys begin with (--prefix)")
    model = {name: _whole(checkpoint, key) for name, key in found.model.items()}
    moments = _moments(checkpoint, found, model, parameters)
    _refuse_unknown(checkpoint, found.unknown)
    _check_moments(checkpoint, moments)
    steps = _steps(checkpoint, found)
    if not keep_split:
        model = joined(model)
        moments = {moment: joined(sources) for moment, sources in moments.items()}
    model_name = _renaming(renames, model)
    named = {}
    for moment in MOMENTS:
        named.update({f"{model_name[name]}.{moment}": source for name, source in moments[moment].items()})
    _check_types(checkpoint, {**model, **named})
    return TrainingState(model={model_name[name]: source for name, source in model.items()}, moments=named,
                         step=_one_step(checkpoint, steps, step, bool(named)), settings=_settings(checkpoint, found),
                         dropped=found.dropped, objects=found.objects, notes=found.notes)


# --- names -----------------------------------------------------------------------------------------------------------------


def _refuse_unknown(checkpoint, unknown):
    if unknown:
        raise Error(f"{checkpoint.directory}: nothing here knows {some_of(unknown)}; leave them out with --allow-extra "
                    "'PATTERN', or say what the model's keys begin with (--prefix)")


def _renaming(renames, names):
    """name -> new name, after all renames in their order."""
    result = {name: name for name in names}
    for old, new in renames:
        if old.count("*") != new.count("*"):
            raise UsageError(f"--rename '{old}={new}': both sides need the same number of *")
        below = "" if "*" in old else r"((?:\..*)?)"
        pattern = re.compile("(.*)".join(re.escape(text) for text in old.split("*")) + below)
        pieces = (new if "*" in old else new + "*").split("*")
        matches = {name: pattern.fullmatch(current) for name, current in result.items()}
        if not any(matches.values()):
            raise UsageError(f"--rename '{old}={new}': no name of the model matches; there are {some_of(result.values())}")
        for name, match in matches.items():
            if match:
                result[name] = "".join(piece + text for piece, text in zip(pieces, (*match.groups(), "")))
    taken = {}
    for name, renamed in result.items():
        if renamed in taken:
            raise UsageError(f"'{name}' and '{taken[renamed]}' would both be '{renamed}'; correct --rename")
        taken[renamed] = name
    return result


# --- tensors ---------------------------------------------------------------------------------------------------------------


def _whole(checkpoint, key):
    tensor = checkpoint.tensors[key]
    return Source(tensor.dtype, tensor.shape, [Part(key, 0)])


def _moments(checkpoint, found, model, parameters):
    """{"exp_avg": {parameter: Source}, ...}; puts master weights in the places of weights."""
    moments = {moment: {} for moment in MOMENTS}
    names = _names_of_state(checkpoint, found, parameters)
    for (parameter, leaf), key in found.state.items():
        name = names.get(parameter)
        if leaf == "step":
            continue
        if key not in checkpoint.tensors:
            found.objects.append(key)
        elif name is None or leaf not in (*MOMENTS, "master_param"):
            found.unknown.append(key)
        elif leaf == "master_param":
            found.dropped[found.model[name]] = "the optimizer has the same weights as master_param"
            model[name] = _shaped(checkpoint, key, model[name].shape)
        else:
            moments[leaf][name] = _shaped(checkpoint, key, model[name].shape)
    flat = [name for name, source in moments["exp_avg"].items() if checkpoint.tensors[source.parts[0].key].shape != source.shape]
    if flat:
        found.notes.append(f"moments of {len(flat)} parameter{'' if len(flat) == 1 else 's'} have one dimension, as Megatron writes those "
                           "of an offloaded optimizer; they were given their parameters' shapes")
    return moments


def _names_of_state(checkpoint, found, parameters):
    """The optimizer's name of a parameter -> the model's name."""
    called = list(dict.fromkeys(parameter for parameter, _ in found.state))
    if called and all(each.isdigit() for each in called) and not set(called) & set(found.aliases):
        return _names_by_number(checkpoint, found, called, parameters)
    names = {}
    for each in called:
        name = without_wrappers(each)
        while name not in found.aliases and name.startswith("module."):
            name = name.removeprefix("module.")
        names[each] = found.aliases.get(name)
    return names


def _names_by_number(checkpoint, found, called, parameters):
    """A state by numbers counts the optimizer's parameters, which as a rule are the model's, in its order."""
    groups = {group for group, _ in found.groups}
    order = parameters or list(found.aliases)
    missing = [name for name in order if name not in found.aliases]
    if missing:
        raise UsageError(f"--parameters names {some_of(missing)}, which the checkpoint does not have; it has "
                         f"{some_of(found.aliases)}")
    numbers = sorted(map(int, called))
    # Parameters that never had a gradient have a number and no state.
    is_clear = numbers[-1] < len(order) if parameters else numbers == list(range(len(order))) and len(groups) <= 1
    if not is_clear:
        raise Error(f"{checkpoint.directory}: the optimizer's state is by numbers, {len(called)} of them up to {numbers[-1]} "
                    f"in {max(len(groups), 1)} groups, and there are {len(order)} names, so it is not clear whose they are; "
                    "give a file with the names of the optimizer's parameters, one per line, in its order (--parameters FILE)")
    if not parameters:
        found.notes.append("the optimizer's state is by numbers; it was taken to be in the order of the model's tensors "
                           "(--parameters gives another)")
    return {each: found.aliases[order[int(each)]] for each in called}


def _shaped(checkpoint, key, shape):
    """State of a parameter of this shape; Megatron stores that of an offloaded optimizer with its elements in one row."""
    stored = checkpoint.tensors[key]
    if stored.shape not in (shape, (torch.Size(shape).numel(),)):
        raise Error(f"{checkpoint.directory}: '{key}' has the shape {list(stored.shape)}, and its parameter "
                    f"{list(shape)}; where state is by numbers, give the right order (--parameters FILE)")
    return Source(stored.dtype, shape, [Part(key, 0)])


def _check_moments(checkpoint, moments):
    for moment, other in (MOMENTS, MOMENTS[::-1]):
        alone = [name for name in moments[moment] if name not in moments[other]]
        if alone:
            raise Error(f"{checkpoint.directory}: {some_of(alone)} have {moment} and no {other}; Adam needs both, so use "
                        "another checkpoint, or leave the state out (--allow-extra)")


def _check_types(checkpoint, sources):
    wrong = [f"{name} ({str(source.dtype).removeprefix('torch.')})" for name, source in sources.items()
             if source.dtype not in STORABLE]
    if wrong:
        raise Error(f"{checkpoint.directory}: our format has no type for {some_of(wrong)}; leave them out (--allow-extra)")


# --- the optimizer's numbers -----------------------------------------------------------------------------------------------


def _value(checkpoint, key):
    if key in checkpoint.tensors:
        return dcp.read_tensor(checkpoint, key).tolist()
    return dcp.read_object(checkpoint, key)


def _steps(checkpoint, found):
    """step -> a key that says so."""
    keys = [key for (_, leaf), key in (*found.state.items(), *found.groups.items()) if leaf == "step"]
    steps = {}
    for key in keys:
        value = _value(checkpoint, key)
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        if not isinstance(value, (int, float)) or not float(value).is_integer() or value < 0:
            raise Error(f"{checkpoint.directory}: '{key}' is {value!r}, which is no number of steps")
        steps.setdefault(int(value), key)
    return steps


def _one_step(checkpoint, steps, given, has_moments):
    if given is not None:
        return given
    if len(steps) > 1:
        some = ", ".join(f"{step} ('{key}')" for step, key in sorted(steps.items())[:3])
        raise Error(f"{checkpoint.directory}: parameters have made different numbers of steps: {some}; ours make them "
                    "together, so say which to go on with (--step N)")
    if not steps and has_moments:
        raise Error(f"{checkpoint.directory}: it has Adam's moments and not how many steps made them; say it (--step N)")
    return next(iter(steps), 0)


def _settings(checkpoint, found):
    """Settings that people set again by hand."""
    settings = {}
    for (_, leaf), key in found.groups.items():
        if leaf == "step":
            continue
        drop(checkpoint, found, key, "a setting of the optimizer")
        if leaf not in SETTINGS:
            continue
        try:
            value = _value(checkpoint, key)
        except Error:  # of a class that is not opened; a NumPy number, say
            value = "(unreadable)"
        if value not in settings.setdefault(leaf, []):
            settings[leaf].append(value)
    return settings
