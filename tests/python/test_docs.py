"""Everything that the pages of the Python package show works: their Python runs, block by block, and tables have every keyword."""

import inspect
import os
import pathlib
import re

import pytest
import torch

import fsdp_cpp as fsdp
import small_models as small
from test_checkpoint import folder  # noqa: F401, a fixture

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGE = DOCS / "python.md"


def python_blocks(page):
    """(line, text) of each, in the order of the page."""
    text = page.read_text()
    for found in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, found.start()) + 1, found[1]


def run(page, block, names):
    line, text = block
    # Empty lines before it, so that an error names the page's own line.
    exec(compile("\n" * line + text, str(page), "exec"), names)


def test_the_python_of_the_page_runs(world, folder, monkeypatch):  # noqa: F811
    pytest.importorskip("transformers")
    monkeypatch.chdir(folder)
    names = {}
    for block in python_blocks(PAGE):
        run(PAGE, block, names)
    if world.rank == 0:
        assert os.path.exists("runs/small/step-00000004") and os.path.exists("exported/config.json")
    assert len(names) > 10, "the page has blocks"


class Layers(small.Stack):
    """A model with the names that the pages of the doors use."""

    @property
    def layers(self):
        return self.blocks


def main_weights(model):
    return {each.name: each.main_weight.clone() for each in fsdp.shard.handle(model).parameters() if each.main_weight.numel()}


@pytest.mark.parametrize("page", ["from-fsdp2.md", "from-megatron-fsdp.md"])
def test_models_of_the_doors_pages_train(world, page):
    for block in python_blocks(DOCS / page):
        names = {"torch": torch, "model": Layers(), "Block": small.Block}
        run(DOCS / page, block, names)
        model, optimizer = names["model"], names["optimizer"]
        before = main_weights(model)
        model(torch.full((2, small.WIDTH), world.rank + 1.0)).float().square().mean().backward()
        optimizer.step()
        assert all(not torch.equal(after, before[name]) for name, after in main_weights(model).items())


# --- tables ----------------------------------------------------------------------------------------------------------------


def rows_after(heading):
    """{keyword: cells} of the first table after a heading."""
    table = re.search(rf"^## {heading}$.*?^\|---.*?\n(.*?)\n\n", PAGE.read_text(), re.MULTILINE | re.DOTALL)[1]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
    return {re.match(r"`(\w+)`", row[0])[1]: row for row in rows}


def check_rows(rows, function, kind):
    """Every keyword of the function has a row, whose last cell is the default."""
    for name, parameter in inspect.signature(function).parameters.items():
        if name in ("self", "model"):
            continue
        assert name in rows, f"{name} has no row"
        shown = re.findall(r"`([^`]+)`(?: \((\w+)\))?", rows[name][-1])
        defaults = [value for value, of in shown if of in ("", kind)]
        if parameter.default is not parameter.empty:
            assert len(defaults) == 1 and eval(defaults[0], {"torch": torch}) == parameter.default, name


def test_the_tables_have_every_keyword_with_its_default(world):
    sharding, updating = rows_after("Options of fully_shard"), rows_after("Optimizers")
    check_rows(sharding, fsdp.fully_shard, "")
    assert set(sharding) <= set(inspect.signature(fsdp.fully_shard).parameters)
    for kind in (fsdp.AdamW, fsdp.SGD):
        check_rows(updating, kind.__init__, kind.__name__)
