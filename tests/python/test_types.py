"""The package's types: mypy finds no fault in them, stubs agree with the C++ module, and wrong uses are refused."""

import importlib
import inspect
import os
import pathlib
import re
import subprocess
import sys
import typing

import pytest
import torch

import fsdp_cpp as fsdp

pytest.importorskip("mypy")

PACKAGE = pathlib.Path(fsdp.__file__).parent
CONFIG = pathlib.Path(__file__).parents[2] / "pyproject.toml"

# pybind11 does this to every class: a metaclass of its own, and an __init__ of anything where there is no constructor.
OF_PYBIND11 = re.compile(r"is inconsistent, metaclass differs$|\.__init__ is inconsistent, stub does not have \*args parameter")

EXAMPLE = """
import torch
from torch import nn
import fsdp_cpp as fsdp

class LlamaDecoderLayer(nn.Module): ...

def train(model: nn.Module, x: torch.Tensor) -> None:
    model = fsdp.fully_shard(model)
    optimizer = fsdp.AdamW(model, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, max_norm=1.0)
    loss = model(input_ids=x, labels=x).loss
    loss.backward(); optimizer.step(); optimizer.zero_grad()

def options(model: nn.Module) -> None:
    fsdp.fully_shard(model, units=[LlamaDecoderLayer, "lm_head"], strategy="optim_grads+hfsdp", main_params=torch.float32)
    fsdp.fully_shard(model, fsdp.mesh(outer=2), strategy="RS/PS/SS", pool="planned", units=lambda module: True)
    mesh: fsdp.Mesh = fsdp.mesh(ep=2, tp=2)
    fsdp.fully_shard(model, mesh, expert_parameters=["*.experts.*"],
                     tensor_parameters={"*.up.weight": fsdp.TpShard(0, num_sections=2), "*.norm.*": fsdp.TpPartial(), "*": fsdp.TpEqual()})
    rows = mesh.ep.all_to_all(mesh.tp.all_gather(torch.ones(2), gradient="equal"), [1, 1], [1, 1])
    print(mesh.tp.reduce_scatter(mesh.tp.sum_gradient(rows), dim=1).shape, mesh.data_parallel_rank, mesh.data_parallel_size)
    with fsdp.unshard(model), fsdp.no_sync(model):
        print(fsdp.memory(model).peak)
    loaded = fsdp.Checkpointer("run", model, keep_last=3).load_latest()
    print(loaded.step if loaded else 0)
"""

WRONG = [
    ('fsdp.fully_shard(model, strategy="zero3")', "arg-type"),
    ('fsdp.fully_shard(model, strategy="RR/RR/RR")', "arg-type"),
    ('fsdp.fully_shard(model, pool="maxpool")', "arg-type"),
    ('fsdp.fully_shard(model, gradient="avg")', "arg-type"),
    ("fsdp.fully_shard(model, prefetch=1.5)", "arg-type"),
    ("fsdp.fully_shard(model, stratgy=1)", "call-arg"),
    ('fsdp.AdamW(model, lr="fast")', "arg-type"),
    ("fsdp.AdamW(model, betas=0.9)", "arg-type"),
    ('fsdp.AdamW(model, updates="later")', "arg-type"),
    ('fsdp.SGD(model, loss_scale="dynamo")', "arg-type"),
    ("fsdp.microbatch(model)", "call-arg"),
    ('fsdp.mesh(outer="2")', "arg-type"),
    ('fsdp.mesh(tp="2")', "arg-type"),
    ("fsdp.fully_shard(model, tensor_parameters={'*': 0})", "dict-item"),
    ("fsdp.TpShard()", "call-arg"),
    ('fsdp.mesh().tp.all_reduce(model.weight, gradient="whole")', "arg-type"),
    ("fsdp.Checkpointer(7, model)", "arg-type"),
    ("fsdp.Checkpointer('run', model).load_latest().step", "union-attr"),
    ("fsdp.world().rank = 3", "misc"),
    ("fsdp.fsdp2.fully_shard(model, reshard_after_forward='yes')", "arg-type"),
    ("fsdp.megatron.fully_shard_model(model, zero_dp_strategy=4)", "arg-type"),
]


@pytest.fixture(autouse=True)
def _on_one_rank(world):
    if world.size > 1:
        pytest.skip("types are the same on all ranks")


def mypy(module, *arguments):
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          env={**os.environ, "MYPYPATH": str(PACKAGE.parent), "MYPY_CACHE_DIR": os.devnull})


@pytest.mark.more
def test_mypy_finds_no_fault_in_the_package(world):
    done = mypy("mypy", "--config-file", CONFIG, "-p", "fsdp_cpp")
    assert done.returncode == 0, done.stdout


def public_functions(module):
    """Those that the module itself defines, and the public methods of its public classes."""
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isclass(value):
            yield from (each for key, each in vars(value).items()
                        if inspect.isfunction(each) and each.__module__ == module.__name__
                        and (not key.startswith("_") or key in ("__init__", "__call__")))
        elif inspect.isfunction(value):
            yield value


@pytest.mark.parametrize("name", ["checkpoint", "ema", "fsdp2", "graph", "integrations.accelerate", "integrations.trainer", "megatron",
                                  "megatron_model", "optim", "other_optimizers", "ranks", "saved_optimizer", "shard", "tensors", "units"])
def test_every_public_function_says_its_types(world, name):
    pytest.importorskip({"accelerate": "accelerate", "trainer": "transformers"}.get(name.rpartition(".")[2], "torch"))
    functions = [each for each in public_functions(importlib.import_module(f"fsdp_cpp.{name}"))
                 if "_refused" not in each.__qualname__]  # made by a function: it takes anything
    assert functions
    for function in functions:
        signature = inspect.signature(function)
        silent = [key for key, each in signature.parameters.items() if key != "self" and each.annotation is each.empty]
        assert not silent and signature.return_annotation is not signature.empty, (function.__qualname__, silent)


CHOICES = [(name, value) for name, alias in fsdp.fully_shard.__annotations__.items() if name != "return"
           for part in (typing.get_args(alias) if typing.get_origin(alias) is not typing.Literal else [alias])
           if typing.get_origin(part) is typing.Literal for value in typing.get_args(part)]


@pytest.mark.parametrize("name,value", CHOICES)
def test_the_engine_takes_every_choice_that_the_types_name(world, name, value):
    if name == "user_buffers" and value != "off" and not torch.cuda.is_available():
        pytest.skip("registered memory is for GPUs")
    fsdp.fully_shard(torch.nn.Linear(32, 32), **{name: value})


@pytest.mark.more
def test_stubs_agree_with_the_module(world):
    done = mypy("mypy.stubtest", "fsdp_cpp._C", "--concise", "--mypy-config-file", CONFIG)
    problems = [line for line in done.stdout.splitlines() if line and not OF_PYBIND11.search(line)]
    assert not problems, problems
    assert "fsdp_cpp._C.World is inconsistent, metaclass differs" in done.stdout, "stubtest has looked at the module"


@pytest.mark.more
def test_the_example_passes_and_wrong_uses_are_refused(world, tmp_path):
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text(EXAMPLE)
    lines = ["import fsdp_cpp.fsdp2, fsdp_cpp.megatron", "import fsdp_cpp as fsdp", "from torch import nn",
             "model = nn.Module()"]
    wrong.write_text("\n".join(lines + [line for line, _ in WRONG]) + "\n")
    done = mypy("mypy", "--config-file", CONFIG, right)
    assert done.returncode == 0, done.stdout
    done = mypy("mypy", "--config-file", CONFIG, "--no-pretty", wrong)
    found = dict(re.findall(r"wrong\.py:(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.MULTILINE))
    expected = {str(number): code for number, (_, code) in enumerate(WRONG, len(lines) + 1)}
    assert found == expected, done.stdout
