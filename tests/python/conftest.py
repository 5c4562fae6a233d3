"""All ranks of a job run these tests in step: every rank calls everything, and each compares with plain torch on its own.

    start_ranks.py 2 python -m pytest tests/python      or, on one rank, python -m pytest tests/python
"""

import os

import pytest
import torch

import fsdp_cpp as fsdp

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


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
