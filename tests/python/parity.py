"""Trains a model sharded and plain, and compares losses, gradients and weights."""

import copy

import torch

import fsdp_cpp as fsdp

# Sums over ranks are rounded in another order than autograd's; everything else is the same arithmetic.
TOLERANCE = dict(rtol=2e-5, atol=2e-6)


def batches_of(world, make_batch, steps):
    """Every rank's batches, on every rank: [step][rank]."""
    generator = torch.Generator().manual_seed(11)
    return [[make_batch(generator) for _ in range(world.size)] for _ in range(steps)]


def plain_step(model, loss_of, batches):
    """Losses per rank; the gradient is that of their mean."""
    losses = []
    for batch in batches:
        loss = loss_of(model, batch)
        (loss / len(batches)).backward()
        losses.append(loss.detach())
    return losses


def check(world, model, loss_of, make_batch, *, steps=3, tolerance=TOLERANCE, optimizer_options=None, exact_loss=True,
          prepare=lambda model: model, **options):
    """Shards a copy of the model with these options, and trains both with AdamW on the same batches."""
    plain = model
    sharded = fsdp.fully_shard(prepare(copy.deepcopy(model)), **options)
    # A large eps: where gradients nearly vanish, AdamW would make numbers of their rounding.
    adamw = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)
    theirs = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], **adamw)
    ours = fsdp.AdamW(sharded, **adamw, **(optimizer_options or {}))
    for step, batches in enumerate(batches_of(world, make_batch, steps)):
        expected = plain_step(plain, loss_of, batches)
        loss = loss_of(sharded, batches[world.rank])
        if step == 0 and exact_loss:
            assert torch.equal(loss.detach(), expected[world.rank]), "the first loss has the same bits"
        torch.testing.assert_close(loss.detach(), expected[world.rank], **tolerance)
        loss.backward()
        compare_gradients(plain, sharded, tolerance)
        theirs.step()
        theirs.zero_grad()
        ours.step()
        ours.zero_grad()
    compare_weights(plain, sharded, tolerance)
    return sharded


def compare_gradients(plain, sharded, tolerance=TOLERANCE):
    expected = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
    parts = {each.name: each for each in fsdp.shard.handle(sharded).parameters() if each.is_trainable}
    fsdp.shard.handle(sharded).wait_gradients()
    assert set(parts) == set(expected), "names are those of the model"
    for name, part in parts.items():
        whole = expected[name] if expected[name] is not None else torch.zeros(part.shape)
        mine = whole.flatten()[part.begin:part.begin + part.gradient.numel()]
        torch.testing.assert_close(part.gradient, mine.to(part.gradient.dtype), **tolerance, msg=lambda m, n=name: f"{n}: {m}")


def compare_weights(plain, sharded, tolerance=TOLERANCE):
    with fsdp.unshard(sharded):
        theirs = dict(plain.named_parameters())
        for name, parameter in sharded.named_parameters():
            torch.testing.assert_close(parameter, theirs[name], **tolerance, msg=lambda m, n=name: f"{n}: {m}")
