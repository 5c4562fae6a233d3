"""All ranks of a job run these tests in step: every rank calls everything, and each compares with plain torch on its own.

    start_ranks.py 2 python -m pytest tests/python      or, on one rank, python -m pytest tests/python
"""

import itertools
import os

import pytest
import torch

import fsdp_cpp as fsdp

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


def each_value(*, once=None, **axes):
    """Parametrizes by all combinations of the axes. `make test` runs `once` of them, by default so many that each value comes once
    (the last ones first, which shard most); `make test-all` runs the rest."""
    values = [list(axis) for axis in axes.values()]
    count = max(map(len, values)) if once is None else once
    first = {tuple(len(axis) - 1 - index % len(axis) for axis in values) for index in range(count)}
    return pytest.mark.parametrize(",".join(axes), [
        pytest.param(*(axis[place] for axis, place in zip(values, places)), marks=() if places in first else pytest.mark.more)
        for places in itertools.product(*(range(len(axis)) for axis in values))])


every_strategy = each_value(strategy=STRATEGIES, once=1)


@pytest.fixture(scope="session")
def world():
    if os.environ.get("FSDP_TEST_MEETING") == "torch.distributed":  # else the launcher's variables
        torch.distributed.init_process_group("gloo")
    return fsdp.world()


@pytest.fixture(autouse=True)
def _same_start():
    torch.manual_seed(7)


def pytest_configure(config):
    torch.set_num_threads(1)
    if int(os.environ.get("RANK", "0")) > 0:  # rank 0 speaks for all; of the others failures alone are shown
        config.option.verbose = -2
    if os.environ.get("FSDP_NCCL") == "always":
        # NCCL takes one process per GPU and host; ranks that share a GPU are told that they are hosts of their own.
        os.environ["NCCL_HOSTID"] = f"host{os.environ['RANK']}"
    config.addinivalue_line("markers", "more: left to `make test-all`, because others prove the same at less cost")


def pytest_collection_modifyitems(items):
    """Tests that need no other rank run on rank 0. FSDP_TESTS names those to run: once, more, or all."""
    wanted = os.environ.get("FSDP_TESTS", "all")
    is_first = os.environ.get("RANK", "0") == "0"
    items[:] = [item for item in items if (is_first or "world" in item.fixturenames)
                and wanted in ("all", "more" if item.get_closest_marker("more") else "once")]


def pytest_sessionfinish(session, exitstatus):
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and os.environ.get("RANK", "0") != "0":
        session.exitstatus = pytest.ExitCode.OK
