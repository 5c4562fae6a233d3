"""What docs/python.md shows works: its Python runs, block by block, and its tables have every keyword with its default."""

import inspect
import os
import pathlib
import re

import pytest

import fsdp_cpp as fsdp
from test_checkpoint import folder  # noqa: F401, a fixture

PAGE = pathlib.Path(__file__).parents[2] / "docs/python.md"


def python_blocks():
    """(line, text) of each, in the order of the page."""
    text = PAGE.read_text()
    for found in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, found.start()) + 1, found[1]


def test_the_python_of_the_page_runs(world, folder, monkeypatch):  # noqa: F811
    pytest.importorskip("transformers")
    monkeypatch.chdir(folder)
    names = {}
    for line, block in python_blocks():
        # Empty lines before it, so that an error names the page's own line.
        exec(compile("\n" * line + block, str(PAGE), "exec"), names)
    if world.rank == 0:
        assert os.path.exists("runs/small/step-00000004") and os.path.exists("exported/config.json")
    assert len(names) > 10, "the page has blocks"


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
            assert len(defaults) == 1 and eval(defaults[0], {"torch": __import__("torch")}) == parameter.default, name


def test_the_tables_have_every_keyword_with_its_default(world):
    sharding, updating = rows_after("Options of fully_shard"), rows_after("Optimizers")
    check_rows(sharding, fsdp.fully_shard, "")
    assert set(sharding) <= set(inspect.signature(fsdp.fully_shard).parameters)
    for kind in (fsdp.AdamW, fsdp.SGD):
        check_rows(updating, kind.__init__, kind.__name__)
