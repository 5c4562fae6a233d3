"""Programs that test_ranks.py starts as ranks: rank_programs.py NAME."""

import copy
import os
import sys

import torch

import fsdp_cpp as fsdp
import small_models as small


def step(model, optimizer):
    model(torch.ones(2, small.WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained():
    torch.manual_seed(0)
    model = fsdp.fully_shard(small.Stack())
    optimizer = fsdp.AdamW(model)
    step(model, optimizer)
    return model, optimizer


def ends_with_everything_open():
    """Model, optimizer, checkpointer and a loss with its graph are alive when Python ends, updates under way."""
    global model, optimizer, loss
    model, optimizer = trained()
    loss = model(torch.ones(2, small.WIDTH)).sum()
    print(f"rank {fsdp.world().rank} of {fsdp.world().size} done", flush=True)


def one_rank_raises():
    model, optimizer = trained()
    if fsdp.world().rank == 1:
        raise ValueError("the data is gone")
    for _ in range(3):
        step(model, optimizer)


def one_rank_raises_in_a_forward():
    model, optimizer = trained()
    if fsdp.world().rank == 1:
        model.blocks[1].down.forward = lambda x: 1 / 0
    step(model, optimizer)


def one_rank_exits():
    model, optimizer = trained()
    if fsdp.world().rank == 1:
        sys.exit(3)
    for _ in range(3):
        step(model, optimizer)


def saves_where_no_directory_can_be():
    model, optimizer = trained()
    fsdp.save(os.environ["FSDP_TEST_PATH"], model, optimizer)


def one_rank_dies_during_a_save():
    model, optimizer = trained()
    checkpointer = fsdp.Checkpointer(os.environ["FSDP_TEST_PATH"], model, optimizer)
    fsdp.world().barrier()
    if fsdp.world().rank == 1:
        os._exit(9)
    checkpointer.save(1)
    checkpointer.wait()


def children_leave():
    """Forked, they end as Python ends: with a status, and by an exception; their parents go on."""
    model, optimizer = trained()
    child = os.fork()
    if child == 0:
        if fsdp.world().rank == 0:
            sys.exit(3)
        raise ValueError("of a child")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (3 if fsdp.world().rank == 0 else 1)
    step(model, optimizer)
    fsdp.world().barrier()
    print(f"rank {fsdp.world().rank} done", flush=True)


def one_rank_is_interrupted():
    model, optimizer = trained()
    if fsdp.world().rank == 1:
        raise KeyboardInterrupt
    for _ in range(3):
        step(model, optimizer)


def threads_go_on_while_a_rank_waits():
    """Rank 0 waits in C++ for rank 1, which waits at a pipe until rank 0's other thread has counted for longer than Python lets
    one thread run."""
    import threading
    trained()
    path = os.environ["FSDP_TEST_PIPE"]
    if fsdp.world().rank == 0:
        def count():
            sum(i for i in range(3_000_000))
            open(path, "w").close()

        thread = threading.Thread(target=count)
        thread.start()
        fsdp.world().barrier()
        thread.join()
    else:
        open(path).read()
        fsdp.world().barrier()
    print("both", flush=True)


def meets_through_torch_distributed():
    torch.distributed.init_process_group("gloo")
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    torch.manual_seed(0)
    model = fsdp.fully_shard(small.Stack(), mesh)
    optimizer = fsdp.AdamW(model)
    step(model, optimizer)
    assert fsdp.shard.handle(model).mesh.world.size == torch.distributed.get_world_size()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    step(model, optimizer)
    print(f"rank {fsdp.shard.handle(model).mesh.world.rank} done", flush=True)


def shards_over_parts_of_torch_distributed():
    """Four ranks: HSDP on a mesh of 2 x 2, and a group of the even ranks, whose numbers are one rank's."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    grid = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    torch.manual_seed(0)
    plain = small.Stack()
    hsdp = fsdp.fully_shard(plain.__class__(), grid, initial_values="of_rank_zero")
    found = fsdp.shard.handle(hsdp).mesh
    assert (found.outer_rank, found.inner_rank) == (rank // 2, rank % 2)
    step(hsdp, fsdp.AdamW(hsdp))
    found = fsdp.mesh(grid, tp=2)
    assert (found.outer_rank, found.tp.rank, found.tp.size, found.data_parallel_rank, found.data_parallel_size) == (rank // 2, rank % 2, 2, rank // 2, 2)
    assert found.tp.all_reduce(torch.tensor([float(rank)])).item() == 4 * (rank // 2) + 1
    torch.manual_seed(0)
    part = fsdp.fully_shard(small.Stack(), grid["inner"])
    assert fsdp.shard.handle(part).mesh.inner_size == 2 and fsdp.shard.handle(part).mesh.world.rank == rank % 2
    step(part, fsdp.AdamW(part))
    groups = [torch.distributed.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    torch.manual_seed(0)
    even_odd = fsdp.fully_shard(small.Stack(), groups[rank % 2])
    step(even_odd, fsdp.AdamW(even_odd))
    with fsdp.unshard(part), fsdp.unshard(even_odd):
        for ours, theirs in zip(part.parameters(), even_odd.parameters()):
            assert torch.equal(ours, theirs)
    print(f"rank {rank} done", flush=True)


def parts_of_a_mesh_know_their_place():
    """Groups of one rank, of the last two, and of all: a process has one place on its host."""
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if "FSDP_TEST_NO_LOCAL_RANK" in os.environ:
        del os.environ["LOCAL_RANK"]
    parts = [[each] for each in range(size)] + [list(range(size - 2, size)), list(range(size))]
    found = set()
    for part in parts:
        group = torch.distributed.new_group(part)
        if rank in part:
            found.add(fsdp.mesh(group).world.local_rank)
    torch.distributed.barrier()
    print(f"rank {rank} has local ranks {sorted(found)} and {fsdp.device()}", flush=True)


def one_rank_alone_makes_a_mesh():
    """The others say nothing, so the launcher's variable is all there is."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    os.environ["SLURM_LOCALID"] = os.environ.pop("LOCAL_RANK")
    groups = [torch.distributed.new_group([each]) for each in range(torch.distributed.get_world_size())]
    if rank == 1:
        print(f"rank {rank} has local rank {fsdp.mesh(groups[rank]).world.local_rank}", flush=True)
    torch.distributed.barrier()


def ranks_of_a_mesh_that_is_not_theirs():
    torch.distributed.init_process_group("gloo")
    group = torch.distributed.new_group([0])
    if torch.distributed.get_rank() == 1:
        try:
            fsdp.fully_shard(small.Stack(), group)
        except (fsdp.UsageError, ValueError, TypeError) as error:
            print(error, flush=True)
    torch.distributed.barrier()


def learns_what_fsdp2_learns():
    """Runs one program with FSDP2 over gloo and through its door here, in fp32 and in bf16 with fp32 main weights."""
    from torch.distributed import fsdp as theirs
    from fsdp_cpp import fsdp2 as ours
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    plain = small.Stack(width=12)
    for policy in (theirs.MixedPrecisionPolicy(),
                   theirs.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)):
        losses = {}
        for name, door, wrap in (("theirs", theirs.fully_shard, lambda made: made), ("ours", ours.fully_shard, fsdp.shard_optimizer)):
            model = copy.deepcopy(plain)
            for block in model.blocks:
                door(block, mp_policy=policy)
            door(model, mp_policy=policy)
            optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3))
            generator = torch.Generator().manual_seed(rank)
            losses[name] = []
            for _ in range(4):
                loss = model(torch.randn(4, 12, generator=generator)).float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[name].append(loss.item())
        # bf16: gradients of weights are rounded to bf16 in both, but sums over ranks are wide here.
        allowed = 1e-5 if policy.param_dtype is None else 2e-2
        for a, b in zip(losses["theirs"], losses["ours"]):
            assert abs(a - b) <= allowed * abs(a), losses
        assert losses["ours"][-1] < losses["ours"][0]
    print(f"rank {rank} done", flush=True)


globals()[sys.argv[1]]()
