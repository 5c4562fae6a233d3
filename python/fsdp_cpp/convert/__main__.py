"""python -m fsdp_cpp.convert SRC DST: checkpoints of torch.distributed.checkpoint and Megatron's fsdp_dtensor into ours.

Python reads the metadata, checks it and finds the names; C++ then streams the elements from the `.distcp` files to ours, a
chunk at a time, so that a model of any size needs little memory.
"""

import argparse
import math
import sys
from collections.abc import Callable

import torch

from .. import _C
from . import dcp
from .keys import some_of
from .training_state import TrainingState, find_training_state

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def convert(source: str, target: str | None, *, ranks: int = 1, dtype: torch.dtype | None = None,
            model_files: str | None = None, overwrite: bool = False, on_bytes: Callable[[int, int], None] | None = None,
            **names) -> TrainingState:
    """Writes the checkpoint `target`, or nothing where it is None, and returns what is in it and what was dropped.

    `ranks`: how many ranks' files to cut into; any number of ranks can load them. `dtype`: for floating-point weights; None:
    as they are. `model_files`: a directory with config.json and the tokenizer to keep. `on_bytes(done, all)` hears of
    progress. `names`: the keywords of find_training_state().
    """
    if ranks < 1:
        raise _C.UsageError(f"ranks is {ranks}; it must be at least 1")
    checkpoint = dcp.read_metadata(source)
    state = find_training_state(checkpoint, **names)
    files: dict[str, int] = {}
    model = [_for_writer(checkpoint, name, source, files) for name, source in state.model.items()]
    moments = [_for_writer(checkpoint, name, source, files) for name, source in state.moments.items()]
    if target is None:
        return state
    total, done = written_bytes(state, dtype), 0

    def count(more):
        nonlocal done
        done += more
        if on_bytes:
            on_bytes(done, total)

    _C.convert_files(target, files=list(files), model=model, moments=moments, step=state.step, ranks=ranks, dtype=dtype,
                     model_files=model_files or "", overwrite=overwrite, on_bytes=count)
    return state


def written_bytes(state: TrainingState, dtype: torch.dtype | None = None) -> int:
    """Bytes of weights, in `dtype` where they are of a floating-point type, and of moments, which are fp32."""
    weights = sum(_numel(source) * (dtype if dtype and source.dtype.is_floating_point else source.dtype).itemsize
                  for source in state.model.values())
    return weights + sum(_numel(source) * torch.float32.itemsize for source in state.moments.values())


def _numel(source):
    return torch.Size(source.shape).numel()


def _for_writer(checkpoint, name, source, files):
    """(name, type, shape, boxes) as _C.convert_files takes them; `files` is path -> its position."""
    boxes = []
    for key, first_row in source.parts:
        for chunk in checkpoint.tensors[key].chunks:
            place = dcp.place_of(checkpoint, key, chunk)
            file = files.setdefault(place.file, len(files))
            if len(chunk.sizes) != len(source.shape):  # in one row
                boxes += ((file, place.begin + skipped * place.strides[0] * source.dtype.itemsize, *box)
                          for skipped, *box in _boxes_of_range(chunk.offsets[0], chunk.sizes[0], first_row, source.shape,
                                                               place.strides[0]))
                continue
            offsets = (chunk.offsets[0] + first_row, *chunk.offsets[1:]) if chunk.offsets else ()
            boxes.append((file, place.begin, offsets, chunk.sizes, place.strides))
    return name, source.dtype, source.shape, boxes


def _boxes_of_range(begin, count, first_row, shape, stride):
    """Elements [begin, begin + count) of rows from `first_row` on, as boxes of the shape: (elements of the range before it,
    offsets, sizes, strides). A range is a part of a row, whole rows, and a part of a row; parts of rows are cut alike."""
    if not shape:
        return [(0, (), (), ())]
    row = math.prod(shape[1:])
    strides = tuple(stride * math.prod(shape[dim + 1:]) for dim in range(len(shape)))
    boxes, at, end = [], begin, begin + count
    while at < end:
        number, within = divmod(at, row)
        if within == 0 and end - at >= row:
            rows = (end - at) // row
            boxes.append((at - begin, (number + first_row, *(0 for _ in shape[1:])), (rows, *shape[1:]), strides))
            at += rows * row
            continue
        part = min(end, (number + 1) * row) - at
        boxes += ((at - begin + skipped, (number + first_row, *offsets), (1, *sizes), (strides[0], *inner))
                  for skipped, offsets, sizes, inner in _boxes_of_range(within, part, 0, shape[1:], stride))
        at += part
    return boxes


# --- the command -----------------------------------------------------------------------------------------------------------


def _arguments(given):
    parser = argparse.ArgumentParser(prog="python -m fsdp_cpp.convert", formatter_class=argparse.RawDescriptionHelpFormatter,
                                     description="Convert a checkpoint of torch.distributed.checkpoint (DCP), or Megatron's "
                                     "fsdp_dtensor, into one of fsdp.cpp:\nweights, Adam's moments and step.",
                                     epilog="DST appears when it is complete, and not at all when something fails.\n"
                                     "Exit codes: 0 fine; 1 failed; 2 called wrongly. docs/python.md tells more.")
    add = parser.add_argument
    add("source", metavar="SRC", help="the directory with .metadata in it")
    add("target", metavar="DST", nargs="?", help="the directory to write; may be left out with --dry-run")
    add("--dry-run", action="store_true", help="check everything and print the list; write nothing")
    add("--ranks", metavar="N", type=int, default=1,
        help="how many ranks' files to cut into; any number of ranks can load them (default 1)")
    add("--dtype", choices=DTYPES, help="type of floating-point weights (default: as they are)")
    add("--prefix", metavar="TEXT", help="what the model's keys begin with; it is removed (default: found by itself)")
    add("--rename", metavar="FROM=TO", action="append", default=[],
        help="rename parameters: 'a.b=c' for a.b and what is below it, or * for any text on both sides; may be given again")
    add("--allow-extra", metavar="PATTERN", action="append", default=[],
        help="leave out these keys of SRC, which would be an error or would be converted; * is any text; may be given again")
    add("--keep-split", action="store_true",
        help="leave Megatron's split SwiGLU and gated delta net parameters apart (default: joined, as models have them)")
    add("--parameters", metavar="FILE", help="names in the optimizer's order, one per line, where its state is by numbers")
    add("--step", metavar="N", type=int, help="steps made, where SRC does not say it, or says several numbers")
    add("--model-files", metavar="DIR", help="keep config.json and the tokenizer of this directory with the checkpoint")
    add("--overwrite", action="store_true", help="replace DST if it is a checkpoint")
    options = parser.parse_args(given)
    if not options.target and not options.dry_run:
        parser.error("DST is missing; give the directory to write, or --dry-run")
    if options.step is not None and options.step < 0:
        parser.error(f"--step is {options.step}; it must be 0 or more")
    for each in options.rename:
        if each.count("=") != 1:
            parser.error(f"--rename is '{each}'; it must be FROM=TO")
    return options


def _counted(count, what):
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _report(state, out):
    numel = sum(map(_numel, state.model.values()))
    types = sorted({str(source.dtype).removeprefix("torch.") for source in state.model.values()})
    print(f"model      {_counted(len(state.model), 'tensor')}, {_counted(numel, 'parameter')}, {', '.join(types)}", file=out)
    if state.moments:
        count = _counted(len(state.moments) // 2, "parameter")
        print(f"optimizer  exp_avg and exp_avg_sq of {count} after {_counted(state.step, 'step')}", file=out)
    else:
        print("optimizer  none", file=out)
    if state.settings:
        settings = "; ".join(f"{name} {' or '.join(map(str, values))}" for name, values in state.settings.items())
        print(f"settings   {settings} (dropped: give them to the optimizer again)", file=out)
    for reason in dict.fromkeys(state.dropped.values()):
        keys = [key for key, why in state.dropped.items() if why == reason]
        print(f"dropped    {_counted(len(keys), 'tensor')} ({reason}): {', '.join(keys)}", file=out)
    if state.objects:
        sections = list(dict.fromkeys(key.split(".")[0] for key in state.objects))
        print(f"dropped    {_counted(len(state.objects), 'object')} without tensors, of {some_of(sections)}", file=out)
    for note in state.notes:
        print(f"note       {note}", file=out)


def _progress():
    """Draws the percentage on a terminal, and nothing elsewhere."""
    if not sys.stderr.isatty():
        return None
    return lambda done, total: print(f"\rconvert {100 * done // max(total, 1)} %", end="\n" if done >= total else "",
                                     file=sys.stderr, flush=True)


def main(given: list[str] | None = None) -> int:
    options = _arguments(given)
    try:
        parameters = None
        if options.parameters:
            with open(options.parameters, encoding="utf-8") as file:
                parameters = file.read().split()
        state = convert(options.source, None if options.dry_run else options.target, ranks=options.ranks,
                        dtype=DTYPES.get(options.dtype), model_files=options.model_files, overwrite=options.overwrite,
                        on_bytes=_progress(), prefix=options.prefix, allow_extra=options.allow_extra, step=options.step,
                        renames=[tuple(each.split("=")) for each in options.rename], parameters=parameters,
                        keep_split=options.keep_split)
    except _C.UsageError as error:
        print(f"convert: {error}", file=sys.stderr)
        return 2
    except (_C.Error, OSError) as error:
        print(f"convert: {error}", file=sys.stderr)
        return 1
    _report(state, sys.stdout)
    written = f"wrote {options.target}" if not options.dry_run else "wrote nothing (--dry-run); it would be"
    print(f"{written}: {written_bytes(state, DTYPES.get(options.dtype)) / 2**20:,.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
