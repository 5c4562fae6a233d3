"""Megatron-FSDP's door has every name, argument and method of Megatron-FSDP 0.6.1, and its page says what each is here."""

import ast
import dataclasses
import importlib.util
import inspect
import os
import pathlib
import re
import subprocess

import pytest
import torch

import small_models as small
from fsdp_cpp import megatron
from fsdp_cpp.megatron import MegatronFSDP, MixedPrecisionPolicy, fully_shard
from test_forms import loss_of


@pytest.fixture(scope="module")
def theirs():
    """Megatron-FSDP's own source, name -> definition; it is not imported, because that needs a GPU's libraries."""
    found = importlib.util.find_spec("megatron_fsdp")
    if found is None:
        pytest.skip("megatron-fsdp is not installed (requirements.txt): there is nothing to compare with")
    folder = pathlib.Path(found.origin).parent
    definitions = {}
    for name in ("__init__", "fully_shard", "megatron_fsdp", "mixed_precision", "utils", "distributed_data_parallel_config"):
        for node in ast.parse((folder / f"{name}.py").read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                definitions[node.name] = node
            elif isinstance(node, ast.Assign) and node.targets[0].id == "__all__":
                definitions["__all__"] = ast.literal_eval(node.value)
    return definitions


def arguments_of(function):
    """Names in their order."""
    given = function.args
    every = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    return [each.arg for each in every if each is not None and each.arg != "self"]


def methods_of(definition):
    return {node.name: node for node in definition.body
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and node.name != "forward"}


def test_every_name_of_the_package_is_here(theirs):
    names = {name for name in theirs["__all__"] if not name.startswith("__")}
    assert len(names) > 5 and names == set(megatron.__all__)


@pytest.mark.parametrize("name", ["fully_shard", "fully_shard_model", "fully_shard_optimizer"])
def test_functions_take_every_argument_in_its_place(theirs, name):
    ours = [key for key, each in inspect.signature(getattr(megatron, name)).parameters.items()
            if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert ours == arguments_of(theirs[name])


def test_arguments_may_come_by_their_places(world):
    model = small.Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    places = list(inspect.signature(fully_shard).parameters.values())[2:]
    given = [each.default for each in places if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert isinstance(fully_shard(model, optimizer, *given)[0], MegatronFSDP) and len(given) > 30


@pytest.mark.parametrize("name", ["fully_shard", "fully_shard_model", "fully_shard_optimizer"])
def test_defaults_are_theirs(theirs, name):
    given = theirs[name].args
    expected = {each.arg: ast.unparse(value) for each, value in zip(given.args[-len(given.defaults):], given.defaults)}
    ours = inspect.signature(getattr(megatron, name)).parameters
    names = {"MixedPrecisionPolicy": MixedPrecisionPolicy}
    assert expected == {key: text for key, text in expected.items() if ours[key].default == eval(text, names)}


@pytest.mark.parametrize("name", ["MegatronFSDP", "FSDPDistributedIndex"])
def test_classes_have_every_method_with_its_arguments(theirs, name):
    methods = methods_of(theirs[name])
    assert len(methods) > 5
    for method, definition in methods.items():
        ours = inspect.signature(getattr(getattr(megatron, name), method))
        if "kwargs" not in ours.parameters:  # one that is refused takes anything
            assert [key for key in ours.parameters if key != "self"] == arguments_of(definition), method


def test_the_policy_has_every_field_with_its_default(theirs):
    fields = [(node.target.id, ast.unparse(node.value)) for node in theirs["MixedPrecisionPolicy"].body
              if isinstance(node, ast.AnnAssign)]
    assert [(each.name, str(each.default)) for each in dataclasses.fields(MixedPrecisionPolicy)] == fields


def test_the_optimizer_takes_every_keyword_that_theirs_pops(world, theirs):
    popped = {node.args[0].value for node in ast.walk(theirs["fully_shard_optimizer"])
              if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "pop" and getattr(node.func.value, "id", "") == "kwargs"}
    assert popped == {"sync_grad_before_optimizer_step", "install_optimized_model_weights", "zero_grad_buffer"}
    model = small.Stack()
    _, optimizer = fully_shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss_of(model, torch.ones(2, small.WIDTH)).backward()
    optimizer.step(sync_grad_before_optimizer_step=True, install_optimized_model_weights=True)
    optimizer.zero_grad(zero_grad_buffer=True)


# --- the page --------------------------------------------------------------------------------------------------------------


PAGE = (pathlib.Path(__file__).parents[2] / "docs/from-megatron-fsdp.md").read_text()


def cells_of(heading):
    """The rows of the table after a heading, without its head."""
    table = PAGE[PAGE.index(f"## {heading}"):].split("\n\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| `") or
            line.startswith("| groups")]


def names_in(text):
    return set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]*)`", text))))


def test_the_page_has_every_argument_and_method():
    named = names_in(" ".join(row[0] for row in cells_of("Functions and methods")))
    arguments = set(inspect.signature(fully_shard).parameters) - {"module", "optimizer"}
    assert not arguments - named
    assert not {name for name in dir(MegatronFSDP) if not name.startswith("_")} - named


def test_the_page_has_every_field_of_their_configuration(theirs):
    fields = {node.target.id for node in theirs["DistributedDataParallelConfig"].body if isinstance(node, ast.AnnAssign)}
    assert len(fields) > 20 and not fields - names_in(" ".join(row[0] for row in cells_of("Names of Megatron-LM")))


def test_fsdp_train_answers_the_names_of_megatron_lm_as_the_page_says(world):
    if world.size > 1 or "FSDP_BINARY" not in os.environ:
        pytest.skip("one rank is enough, with the command fsdp in FSDP_BINARY")
    for names, _, ours in cells_of("Names of Megatron-LM"):
        for name in re.findall(r"`(\w+_\w+)`", names):
            if name in ("fsdp_dtensor",):  # a value
                continue
            option = f"--{name.replace('_', '-')}"
            said = subprocess.run([os.environ["FSDP_BINARY"], "train", option], text=True, capture_output=True).stderr
            meant = re.search(r"did you mean '(--[\w-]+)( [\w-]+)?'", said)
            if meant is None:
                assert "so leave it out" in said and re.match("always so|not there", ours), (name, said)
            else:
                assert f"`{meant[1]}" in ours and (meant[2] or "") in ours, (name, said)
