"""Our optimizers, and those of others, update a sharded model as a plain one."""

import copy

import pytest
import torch

import fsdp_cpp as fsdp
import parity
import small_models as small
from conftest import each_value, every_strategy, STRATEGIES
from test_forms import loss_of, rows


def train(world, plain, sharded, theirs, ours, steps=3, between=lambda: None):
    for batches in parity.batches_of(world, rows, steps):
        parity.plain_step(plain, loss_of, batches)
        loss_of(sharded, batches[world.rank]).backward()
        theirs.step()
        theirs.zero_grad()
        ours.step()
        ours.zero_grad()
        between()
    parity.compare_weights(plain, sharded)


OTHERS = {
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
}


@each_value(name=OTHERS, strategy=STRATEGIES)
def test_optimizers_of_others_update_flat_shards(world, name, strategy):
    plain = small.Stack()
    sharded = fsdp.fully_shard(copy.deepcopy(plain), strategy=strategy)
    train(world, plain, sharded, OTHERS[name](plain.parameters()),
          fsdp.shard_optimizer(OTHERS[name](sharded.parameters())))


def test_groups_of_others_are_kept(world):
    plain = small.Stack()
    sharded = fsdp.fully_shard(copy.deepcopy(plain))

    def groups(model):
        return [{"params": list(model.blocks.parameters()), "lr": 1e-2}, {"params": [model.scale], "lr": 1e-3},
                {"params": list(model.first.parameters()), "weight_decay": 0.5}]

    theirs, ours = (torch.optim.AdamW(groups(model), lr=5e-3) for model in (plain, sharded))
    kept = list(ours.param_groups)
    fsdp.shard_optimizer(ours)
    assert all(a is b for a, b in zip(kept, ours.param_groups))
    train(world, plain, sharded, theirs, ours)


def test_ignored_parameters_are_updated_by_each_rank_itself(world):
    plain = small.Stack()
    sharded = copy.deepcopy(plain)
    fsdp.fully_shard(sharded, ignored_params=[sharded.scale])
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    ours = fsdp.shard_optimizer(torch.optim.AdamW(sharded.parameters(), lr=1e-2))
    for step in range(3):
        batch = rows(torch.Generator().manual_seed(step))  # the same on all ranks, whose gradients are then the mean
        for model, optimizer in ((plain, theirs), (sharded, ours)):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert sharded.scale.grad is None
    parity.compare_weights(plain, sharded)


def test_main_weights_in_fp32_of_others_optimizers(world):
    model = small.Stack().bfloat16()
    fsdp.fully_shard(model, main_storage="separate", main_grads=torch.float32)
    optimizer = fsdp.shard_optimizer(torch.optim.SGD(model.parameters(), lr=1e-4))
    assert all(p.dtype == torch.float32 and p.dim() == 1 for group in optimizer.param_groups for p in group["params"])
    loss_of(model, torch.ones(2, small.WIDTH, dtype=torch.bfloat16)).backward()
    optimizer.step()


def test_schedulers_of_torch_drive_ours(world):
    plain = small.Stack()
    sharded = fsdp.fully_shard(copy.deepcopy(plain))
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    ours = fsdp.AdamW(sharded, lr=1e-2, weight_decay=0.1)
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 / (1 + step)) for each in (theirs, ours)]

    def between():
        for schedule in schedules:
            schedule.step()
        assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"] < 1e-2

    train(world, plain, sharded, theirs, ours, between=between)


def test_groups_of_ours_have_rates_and_decays_of_their_own(world):
    plain = small.Stack()
    sharded = fsdp.fully_shard(copy.deepcopy(plain))

    def groups(model):
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() <= 1]
        return [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "lr": 2e-3, "weight_decay": 0.0}]

    theirs = torch.optim.AdamW(groups(plain), lr=1e-2)
    ours = fsdp.AdamW(groups(sharded), lr=1e-2)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (theirs, ours)]
    train(world, plain, sharded, theirs, ours, between=lambda: [schedule.step() for schedule in schedules])


def test_sgd(world):
    plain = small.Stack()
    sharded = fsdp.fully_shard(copy.deepcopy(plain))
    options = dict(lr=1e-2, momentum=0.9, weight_decay=0.1, nesterov=True)
    train(world, plain, sharded, torch.optim.SGD(plain.parameters(), **options), fsdp.SGD(sharded, **options))


@every_strategy
def test_clipping_is_over_all_ranks(world, strategy):
    plain = small.Stack()
    hidden = fsdp.fully_shard(copy.deepcopy(plain), strategy=strategy)
    open_ = fsdp.fully_shard(copy.deepcopy(plain), strategy=strategy)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.5)
    ours = fsdp.SGD(hidden, lr=0.5, max_norm=0.01)
    others = fsdp.shard_optimizer(torch.optim.SGD(open_.parameters(), lr=0.5))
    for batches in parity.batches_of(world, rows, 2):
        parity.plain_step(plain, loss_of, batches)
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        for model in (hidden, open_):
            loss_of(model, batches[world.rank]).backward()
        torch.testing.assert_close(fsdp.clip_grad_norm_(open_, 0.01), expected)
        for optimizer in (theirs, ours, others):
            optimizer.step()
        assert ours.gradient_norm() == pytest.approx(expected.item(), rel=1e-5)
        for optimizer in (theirs, ours, others):
            optimizer.zero_grad()
    parity.compare_weights(plain, hidden)
    parity.compare_weights(plain, open_)


def test_compute_type_leaves_main_weights_unrounded(world):
    model = small.Stack()
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    fsdp.fully_shard(model, params=torch.bfloat16, main_grads=torch.float32)
    for each in fsdp.shard.handle(model).parameters():
        expected = whole[each.name].flatten()[each.begin:each.begin + each.main_weight.numel()]
        assert torch.equal(each.main_weight, expected), each.name
    with fsdp.unshard(model):
        for name, parameter in model.named_parameters():
            assert parameter.dtype == torch.bfloat16 and torch.equal(parameter, whole[name].bfloat16())
    loss_of(model, torch.ones(2, small.WIDTH, dtype=torch.bfloat16)).backward()
    optimizer = fsdp.AdamW(model)
    optimizer.step()


@each_value(products=[torch.float32, torch.bfloat16], adjust_lr_fn=["original", "match_rms_adamw"], strategy=STRATEGIES)
def test_muon_has_the_numbers_of_torch(world, monkeypatch, strategy, adjust_lr_fn, products):
    if products == torch.float32:  # torch's own are always bf16
        monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    plain = small.Stack()
    sharded = fsdp.fully_shard(copy.deepcopy(plain), strategy=strategy, matrices="blocks.*")
    matrices = [p for p in plain.blocks.parameters() if p.dim() > 1]
    others = [p for p in plain.parameters() if not any(p is each for each in matrices)]
    common = dict(lr=1e-2, weight_decay=0.1)
    muon = torch.optim.Muon(matrices, momentum=0.9, adjust_lr_fn=adjust_lr_fn, **common)
    adamw = torch.optim.AdamW(others, betas=(0.9, 0.95), eps=1e-3, **common)
    ours = fsdp.Muon(sharded, momentum=0.9, adjust_lr_fn=adjust_lr_fn, products_dtype=products, eps=1e-3, **common)
    for batches in parity.batches_of(world, rows, 3):
        parity.plain_step(plain, loss_of, batches)
        loss_of(sharded, batches[world.rank]).backward()
        for optimizer in (muon, adamw, ours):
            optimizer.step()
            optimizer.zero_grad()
    # Five iterations enlarge small singular values, and their roundings, up to 3.4445 times each.
    ulps = 3.4445**5 * torch.finfo(products).eps
    moved = 3 * 1e-2 * (0.2 * 4 if adjust_lr_fn == "match_rms_adamw" else 2**0.5)
    parity.compare_weights(plain, sharded, dict(rtol=0, atol=moved * min(2 * ulps, 0.1)))


def test_muon_needs_whole_matrices(world):
    with pytest.raises(fsdp.UsageError, match="Muon finds no whole matrices"):
        fsdp.Muon(fsdp.fully_shard(small.Stack()))
    with pytest.raises(fsdp.UsageError, match="matrices is 3 .int.; it must be a pattern of names"):
        fsdp.fully_shard(small.Stack(), matrices=3)
    model = fsdp.fully_shard(small.Stack(), matrices={"blocks.*.up.weight": [small.WIDTH, small.WIDTH]})
    fsdp.Muon(model)
    assert fsdp.memory(model).workspace >= 0
