"""How ranks meet, and how they part: whatever ends one of them, the others end with its name, and nothing hangs."""

import os
import pathlib
import subprocess
import sys
import time

import pytest

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "processes"))
import small_runs  # noqa: E402
import start_ranks  # noqa: E402

pytestmark = pytest.mark.skipif(int(os.environ.get("WORLD_SIZE", "1")) > 1, reason="starts ranks itself")
PROGRAM = [sys.executable, str(HERE / "rank_programs.py")]


def outputs_of(processes, seconds=90):
    deadline = time.monotonic() + seconds
    found = []
    for process in processes:
        out, _ = process.communicate(timeout=max(1, deadline - time.monotonic()))
        found.append((process.returncode, out))
    return found


def run(ranks, name, **environment):
    before = dict(os.environ)
    os.environ.update(FSDP_TIMEOUT_S="60", CUDA_VISIBLE_DEVICES="", **environment)  # FSDP2 takes a GPU where one is seen
    try:
        return outputs_of(start_ranks.start(ranks, [*PROGRAM, name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_python_ends_with_everything_open():
    for ranks in (1, 2, 3):
        for rank, (status, out) in enumerate(run(ranks, "ends_with_everything_open")):
            assert status == 0 and f"rank {rank} of {ranks} done" in out, out


@pytest.mark.parametrize("name,sentence", [("one_rank_raises", "rank 1 failed: ValueError: the data is gone"),
                                           ("one_rank_raises_in_a_forward", "rank 1 failed: ZeroDivisionError: division by zero"),
                                           ("one_rank_is_interrupted", "rank 1 failed: KeyboardInterrupt")])
def test_others_end_with_the_name_and_words_of_the_rank_that_failed(name, sentence):
    (status0, out0), (status1, out1), (status2, out2) = run(3, name)
    assert status0 != 0 and status1 != 0 and status2 != 0
    assert sentence in out0 and sentence in out2, out0 + out2


def test_every_rank_names_the_one_that_failed_and_why(tmp_path):
    (tmp_path / "file").write_text("")
    for rank, (status, out) in enumerate(run(3, "saves_where_no_directory_can_be", FSDP_TEST_PATH=str(tmp_path / "file/run"))):
        said = out.strip().splitlines()[-1]
        assert status == 1 and str(tmp_path / "file") in said, out
        assert ("RemoteError: opening the directory of checkpoints failed on rank 0: " in said) == (rank > 0), out


def test_others_end_when_a_rank_dies_during_a_save(tmp_path):
    (status0, out0), (status1, _) = run(2, "one_rank_dies_during_a_save", FSDP_TEST_PATH=str(tmp_path))
    assert status1 == 9 and status0 == 1 and "rank 1" in out0, out0


def test_forked_children_leave_alone():
    for rank, (status, out) in enumerate(run(2, "children_leave")):
        assert status == 0 and f"rank {rank} done" in out, out


def test_others_end_when_a_rank_exits():
    (status0, out0), (status1, _) = run(2, "one_rank_exits")
    assert status1 == 3 and status0 == 1 and "rank 1" in out0, out0


def test_other_threads_go_on_while_a_rank_waits(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for status, out in run(2, "threads_go_on_while_a_rank_waits", FSDP_TEST_PIPE=str(tmp_path / "pipe")):
        assert status == 0 and "both" in out, out


def test_ranks_meet_through_torch_distributed():
    for rank, (status, out) in enumerate(run(2, "meets_through_torch_distributed")):
        assert status == 0 and f"rank {rank} done" in out, out


def test_meshes_and_groups_of_torch_distributed():
    for rank, (status, out) in enumerate(run(4, "shards_over_parts_of_torch_distributed")):
        assert status == 0 and f"rank {rank} done" in out, out


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("told", [{}, {"FSDP_TEST_NO_LOCAL_RANK": "1"}], ids=["by_the_launcher", "by_nobody"])
def test_parts_of_a_mesh_have_the_local_ranks_of_their_processes(ranks, told):
    for rank, (status, out) in enumerate(run(ranks, "parts_of_a_mesh_know_their_place", **told)):
        assert status == 0 and f"rank {rank} has local ranks [{rank}] and cpu" in out, out


def test_a_part_of_which_no_other_rank_knows_has_the_local_rank_of_its_launcher():
    (status0, out0), (status1, out1) = run(2, "one_rank_alone_makes_a_mesh")
    assert status0 == status1 == 0 and "rank 1 has local rank 1" in out1, out0 + out1


def test_rank_0_says_on_one_line_how_tensors_travel():
    for rank, (status, out) in enumerate(run(2, "meets_through_torch_distributed", FSDP_LOG="info")):
        lines = [line for line in out.splitlines() if "tensors travel" in line]
        assert status == 0 and lines == ["[rank 0] tensors travel through host memory over TCP: no rank sees a GPU"][rank:], out


@pytest.mark.parametrize("ranks", [2, 3])
def test_learns_what_fsdp2_learns(ranks):
    for rank, (status, out) in enumerate(run(ranks, "learns_what_fsdp2_learns")):
        assert status == 0 and f"rank {rank} done" in out, out


def test_torchrun_and_mpirun():
    launchers = [[sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint",
                  "127.0.0.1:0", *PROGRAM[1:]]]
    if subprocess.run(["sh", "-c", "command -v mpirun"], capture_output=True, check=False).returncode == 0:
        launchers.append(["mpirun", "--allow-run-as-root", "--oversubscribe", "--quiet", "-n", "2", *PROGRAM])
    for launcher in launchers:
        # The variables of the job in which this test runs are not those of the launcher.
        done = small_runs.run([*launcher, "ends_with_everything_open"], os.getcwd(), PYTHONPATH=os.environ.get("PYTHONPATH", ""))
        assert "rank 0 of 2 done" in done.stdout and "rank 1 of 2 done" in done.stdout
