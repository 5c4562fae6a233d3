"""Experts and tensor parallelism: ranks that compute together train what one rank trains, and their operations have the right
gradients."""

import copy
import pathlib

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fsdp_cpp as fsdp
import parallel_models as parallel
import parity
from conftest import every_strategy
from test_checkpoint import folder  # noqa: F401, a fixture

# Sums over ranks and over tokens are rounded in another order; AdamW divides by their root.
TOLERANCE = dict(rtol=1e-4, atol=1e-5)


def grids(ranks):
    """Every (outer, ep, tp) of so many ranks with which the model can be shared out."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    return [dict(outer=outer, ep=ep, tp=tp) for outer in divisors for tp in divisors for ep in divisors
            if (ranks // outer) % tp == 0 and ((ranks // outer) % ep == 0 or ep % (ranks // outer) == 0)]


def trained_plain(data_parallel_size, steps=3):
    """Losses, norms and weights of the model without any axis, by torch alone."""
    mesh = fsdp.mesh()  # its axes ep and tp have one rank
    model = parallel.new_model(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)
    generator = torch.Generator().manual_seed(11)
    losses, norms = [], []
    for _ in range(steps):
        batches = [torch.randn(parallel.TOKENS, parallel.HIDDEN, generator=generator) for _ in range(data_parallel_size)]
        losses.append([loss.item() for loss in parity.plain_step(model, parallel.loss_of, batches)])
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, model.state_dict()


def trained(mesh, optimizer_of, **options):
    model = fsdp.fully_shard(parallel.new_model(mesh), mesh, **parallel.DECLARED, **options)
    optimizer = optimizer_of(model)
    losses, norms = [], []
    for batches in parallel.batches_of(mesh, 3):
        loss = parallel.loss_of(model, batches[mesh.data_parallel_rank])
        loss.backward()
        norms.append(fsdp.clip_grad_norm_(model, 0.5).item() if optimizer_of is open_adamw else None)
        optimizer.step()
        norms[-1] = optimizer.gradient_norm() if norms[-1] is None else norms[-1]
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, optimizer, losses, norms


def own_adamw(model):
    return fsdp.AdamW(model, lr=1e-2, eps=1e-3, weight_decay=0.1, max_norm=0.5)


def open_adamw(model):
    return fsdp.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1))


def check(mesh, model, losses, norms):
    expected_losses, expected_norms, expected = trained_plain(mesh.data_parallel_size)
    assert losses == pytest.approx([each[mesh.data_parallel_rank] for each in expected_losses], rel=1e-4)
    assert norms == pytest.approx(expected_norms, rel=1e-4)
    found = fsdp.state_dict(model, on_all_ranks=True)
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")


def test_trains_as_the_unsharded_model(world):
    for grid in grids(world.size):
        if world.size == 4 and 1 in (grid["ep"], grid["tp"]):
            continue  # two ranks show one axis alone
        mesh = fsdp.mesh(**grid)
        model, _, losses, norms = trained(mesh, own_adamw)
        check(mesh, model, losses, norms)
        with fsdp.unshard(model):
            block = model.blocks[0]
            assert block.experts.up.shape[0] == parallel.EXPERTS // grid["ep"]
            assert block.mlp.gate_up.weight.shape[0] == 2 * parallel.INNER // grid["tp"]
            assert block.router.weight.shape[0] == parallel.EXPERTS


@every_strategy
def test_trains_with_every_strategy_and_optimizers_of_others(world, strategy):
    mesh = fsdp.mesh(ep=world.size, tp=world.size)
    model, _, losses, norms = trained(mesh, open_adamw, strategy=strategy, main_storage="separate")
    check(mesh, model, losses, norms)


@pytest.mark.parametrize("how", ["recomputed", "recomputed by a node", "compiled MLPs", pytest.param("compiled", marks=pytest.mark.more)])
def test_blocks_that_run_again_or_are_compiled_have_the_same_numbers(world, how):
    mesh = fsdp.mesh(ep=world.size, tp=world.size)
    results = []
    for changed in (False, True):
        model = fsdp.fully_shard(copy.deepcopy(parallel.new_model(mesh)), mesh, **parallel.DECLARED)
        optimizer = own_adamw(model)
        results.append([])
        for block in model.blocks if changed and "compiled" in how else ():
            (block if how == "compiled" else block.mlp).compile(backend="aot_eager")
        for (x,) in parallel.batches_of(mesh, 2):
            for block in model.blocks:
                x = (checkpoint(block, x.requires_grad_(), use_reentrant=how == "recomputed by a node")
                     if changed and "compiled" not in how else block(x))
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            results[-1].append((x.detach(), optimizer.gradient_norm()))
    for (plain, plain_norm), (other, norm) in zip(*results):
        torch.testing.assert_close(other, plain)
        assert norm == pytest.approx(plain_norm, rel=1e-5)


def test_checkpoints_do_not_know_the_grids(world, folder):  # noqa: F811
    mesh = fsdp.mesh(ep=world.size, tp=world.size)
    model, optimizer, _, _ = trained(mesh, own_adamw)
    fsdp.save(folder, model, optimizer, step=3)
    plain = fsdp.mesh()
    loaded = fsdp.fully_shard(parallel.new_model(plain), plain)
    assert fsdp.load(pathlib.Path(folder) / "step-00000003", loaded, own_adamw(loaded)).step == 3
    ours, theirs = (fsdp.state_dict(each, on_all_ranks=True) for each in (loaded, model))
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def test_meta_models_begin_with_the_values_of_whole_ones(world):
    mesh = fsdp.mesh(tp=world.size)

    def init_weights(module):
        for parameter in module.parameters(recurse=False):
            torch.nn.init.normal_(parameter)

    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Linear(12, 6))
    torch.manual_seed(5)
    fsdp.fully_shard(model, mesh, tensor_parameters={"0.*": fsdp.TpShard(0), "1.weight": fsdp.TpShard(1)},
                     init_weights=init_weights)
    torch.manual_seed(5)
    plain = torch.nn.Sequential(torch.nn.Linear(6, 12, device="meta"), torch.nn.Linear(12, 6, device="meta")).to_empty(device="cpu")
    for layer in plain:
        init_weights(layer)
    found = fsdp.state_dict(model, on_all_ranks=True)
    for name, value in plain.state_dict().items():
        assert torch.equal(found[name], value), name


# --- operations -----------------------------------------------------------------------------------

def on_all(size, make):
    """Every rank's value, on every rank."""
    return [make(torch.Generator().manual_seed(rank)) for rank in range(size)]


def parts(tensor, size, dim):
    return tensor.chunk(size, dim)


# By name: the operation, its results given all ranks' inputs, and the gradients of all inputs given those of all results.
OPERATIONS = {
    "all_reduce": (lambda axis, x: axis.all_reduce(x), lambda xs, n: [sum(xs)] * n, lambda gs, n: gs),
    "all_reduce, partial": (lambda axis, x: axis.all_reduce(x, gradient="partial"), lambda xs, n: [sum(xs)] * n,
                            lambda gs, n: [sum(gs)] * n),
    "all_gather": (lambda axis, x: axis.all_gather(x, -1), lambda xs, n: [torch.cat(xs, 1)] * n,
                   lambda gs, n: parts(sum(gs), n, 1)),
    "all_gather, equal": (lambda axis, x: axis.all_gather(x, gradient="equal"), lambda xs, n: [torch.cat(xs)] * n,
                          lambda gs, n: [parts(g, n, 0)[rank] for rank, g in enumerate(gs)]),
    "reduce_scatter": (lambda axis, x: axis.reduce_scatter(x, 1), lambda xs, n: parts(sum(xs), n, 1),
                       lambda gs, n: [torch.cat(gs, 1)] * n),
    "split": (lambda axis, x: axis.split(x, 1), lambda xs, n: [parts(x, n, 1)[rank] for rank, x in enumerate(xs)],
              lambda gs, n: [torch.cat(gs, 1)] * n),
    "sum_gradient": (lambda axis, x: axis.sum_gradient(x), lambda xs, n: xs, lambda gs, n: [sum(gs)] * n),
    "all_to_all": (lambda axis, x: axis.all_to_all(x), lambda xs, n: [torch.cat(each) for each in zip(*(parts(x, n, 0) for x in xs))],
                   lambda gs, n: [torch.cat(each) for each in zip(*(parts(g, n, 0) for g in gs))]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_and_their_gradients(world, name):
    operation, results, gradients = OPERATIONS[name]
    for axis in (fsdp.mesh(tp=world.size).tp, fsdp.mesh(ep=world.size).ep):
        assert (axis.rank, axis.size) == (world.rank, world.size)
        inputs = on_all(world.size, lambda generator: torch.randn(12, 12, generator=generator))
        expected = results(inputs, world.size)
        directions = on_all(world.size, lambda generator: torch.randn(expected[0].shape, generator=generator))
        own = inputs[world.rank].clone().requires_grad_()
        result = operation(axis, own)
        torch.testing.assert_close(result, expected[world.rank])
        (result * directions[world.rank]).sum().backward()
        torch.testing.assert_close(own.grad, gradients(directions, world.size)[world.rank])
        with torch.no_grad():
            torch.testing.assert_close(operation(axis, own), expected[world.rank])


def test_rows_travel_in_unequal_numbers(world):
    ep = fsdp.mesh(ep=world.size).ep
    # Rank r sends r + s rows to rank s: some send none.
    sends = [ep.rank + other for other in range(ep.size)]
    rows = torch.cat([torch.full((count, 2), 10.0 * ep.rank + other) for other, count in enumerate(sends)]).requires_grad_()
    received = ep.all_to_all(rows, sends, sends)
    assert received[:, 0].tolist() == [10.0 * other + ep.rank for other in range(ep.size) for _ in range(ep.rank + other)]
    (received * (1 + received.detach())).sum().backward()
    assert torch.equal(rows.grad, 1 + rows.detach())
    numbers = ep.all_to_all(torch.arange(ep.size) + 100 * ep.rank)
    assert numbers.tolist() == [100 * other + ep.rank for other in range(ep.size)]


# --- errors ---------------------------------------------------------------------------------------

WRONG = [
    (dict(expert_parameters="*.expert.*"), "expert_parameters has '*.expert.*', which matches no parameter; did you mean "
                                           "'blocks.0.experts."),
    (dict(expert_parameters=3), "expert_parameters is 3 (int); it must be a pattern of names such as '*.experts.*', or a list"),
    (dict(expert_parameters=[3]), "its patterns must be strings"),
    (dict(tensor_parameters=["*.up"]), "it must be a dict of patterns of names, such as {'*.up.weight': TpShard(0)}"),
    (dict(tensor_parameters={"*.down.weight": 1}), "tensor_parameters has 1 (int) for '*.down.weight'; it takes patterns of names "
                                                   "with TpShard(dim), TpPartial() or TpEqual()"),
    (dict(tensor_parameters={"*.dwon.weight": fsdp.TpShard(1)}), "tensor_parameters has '*.dwon.weight', which matches no"),
    (dict(expert_parameters="*.up", tensor_parameters={"*.experts.*": fsdp.TpShard(0)}), "it can be cut over one of ep and tp"),
]


@pytest.mark.parametrize("options,sentence", WRONG, ids=[sentence[:40] for _, sentence in WRONG])
def test_wrong_declarations_are_named(world, options, sentence):
    mesh = fsdp.mesh()
    with pytest.raises(fsdp.UsageError) as caught:
        fsdp.fully_shard(parallel.new_model(mesh), mesh, **options)
    assert sentence in str(caught.value), str(caught.value)


def test_sizes_that_ranks_cannot_share_are_named(world):
    with pytest.raises(fsdp.UsageError, match=rf"tp is {world.size + 1} in a world of {world.size} ranks"):
        fsdp.mesh(tp=world.size + 1)
    with pytest.raises(fsdp.UsageError, match=rf"ep is {world.size + 1} in a world of {world.size} ranks"):
        fsdp.mesh(ep=world.size + 1)
    mesh = fsdp.mesh(ep=world.size, tp=world.size)
    with pytest.raises(fsdp.UsageError, match="made already"):
        fsdp.mesh(mesh, tp=2)
    with pytest.raises(fsdp.UsageError, match="all_gather along dim 2 of a tensor of shape \\[2, 2\\]; choose one of its 2 dims"):
        mesh.tp.all_gather(torch.ones(2, 2), 2)
    with pytest.raises(fsdp.UsageError, match="gradient is 'whole'"):
        mesh.tp.all_reduce(torch.ones(2), gradient="whole")
    if world.size == 1:
        return
    for options, sentence in [(dict(expert_parameters="weight"), "has one slice per expert, 7, which ep"),
                              (dict(tensor_parameters={"weight": fsdp.TpShard(0)}), "has a size of 7 along dim 0, which tp")]:
        with pytest.raises(fsdp.UsageError, match=sentence):
            fsdp.fully_shard(torch.nn.Linear(3, 7), mesh, **options)
    with pytest.raises(fsdp.UsageError, match=rf"split along dim 0 .* its size 7, which tp {world.size} ranks cannot share evenly"):
        mesh.tp.split(torch.ones(7))
    with pytest.raises(fsdp.UsageError, match="input_counts of 1 ranks, but ep is"):
        mesh.ep.all_to_all(torch.ones(2, 2), [2] * world.size, [2])
    with pytest.raises(fsdp.UsageError, match="whose sum is 0, but 2 rows"):
        mesh.ep.all_to_all(torch.ones(2, 2), [0] * world.size, [0] * world.size)
    layer = fsdp.fully_shard(torch.nn.Linear(12, 12), mesh, tensor_parameters={"weight": fsdp.TpShard(0)})
    with pytest.raises(fsdp.UsageError, match="shard the whole model in one call"):
        fsdp.fully_shard(torch.nn.Sequential(layer), mesh)
