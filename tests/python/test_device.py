"""On a GPU: the same numbers as plain torch, recorded steps with the bits of eager ones, compiled blocks."""

import copy
import os

import pytest
import torch

import fsdp_cpp as fsdp
import parity
import small_models as small
from test_forms import loss_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def device(world):
    return f"cuda:{world.local_rank % max(1, torch.cuda.device_count())}"


def rows_on(device):
    return lambda generator: torch.randn(4, small.WIDTH, generator=generator).to(device)


@pytest.mark.parametrize("collectives", ["between_ranks", "always"])
def test_learns_the_same_sharded_and_plain(world, device, collectives):
    # cuBLAS may choose another algorithm for memory at another address.
    parity.check(world, small.Stack().to(device), loss_of, rows_on(device), collectives=collectives, exact_loss=False)


def steps_of(device, runs, recorded):
    torch.manual_seed(3)
    model = fsdp.fully_shard(small.Stack().to(device).bfloat16(), main_grads=torch.float32)
    optimizer = fsdp.AdamW(model, lr=1e-2, max_norm=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    batch = torch.zeros(4, small.WIDTH, device=device, dtype=torch.bfloat16)
    loss = torch.zeros((), device=device)

    def step():
        result = loss_of(model, batch).float()
        result.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.copy_(result.detach())

    return losses_of(step, model, optimizer, batch, loss, runs, recorded, schedule.step)


def losses_of(step, model, optimizer, batch, loss, runs, recorded, after=lambda: None):
    """Those of each run, and the weights in the end."""
    run = fsdp.Graph(step, model, optimizer) if recorded else step
    losses = []
    for values in runs:
        batch.copy_(values)
        run()
        after()
        losses.append(loss.item())
    assert not recorded or run.is_recorded
    return losses, fsdp.state_dict(model, on_all_ranks=True)


def refuse_ranks_that_share_a_gpu(world):
    if world.size > torch.cuda.device_count() and os.environ.get("FSDP_NCCL") != "always":
        pytest.skip("ranks that share a GPU reach each other through their host, which no graph records")


def test_a_recorded_step_has_the_bits_of_an_eager_one(world, device):
    refuse_ranks_that_share_a_gpu(world)
    runs = [torch.randn(4, small.WIDTH).bfloat16() for _ in range(8)]
    losses, weights = steps_of(device, runs, recorded=False)
    recorded_losses, recorded_weights = steps_of(device, runs, recorded=True)
    assert losses == recorded_losses and losses[-1] < losses[0]
    for name, value in weights.items():
        assert torch.equal(value, recorded_weights[name]), name


@pytest.mark.parametrize("weights", ["bf16", "fp8-row"])
def test_a_recorded_model_of_transformers_has_the_bits_of_an_eager_one(world, device, weights):
    transformers = pytest.importorskip("transformers")
    refuse_ranks_that_share_a_gpu(world)
    runs = [torch.randint(512, (2, 128), generator=torch.Generator().manual_seed(seed % 2)) for seed in range(8)]
    results = []
    for recorded in (False, True):
        torch.manual_seed(2)
        config = transformers.LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
                                          num_attention_heads=4, num_key_value_heads=2, use_cache=False)
        model = transformers.LlamaForCausalLM(config).to(device).bfloat16().train()
        fsdp.fully_shard(model, main_grads=torch.float32, kernels=True, logits=False, weights=weights)
        optimizer = fsdp.AdamW(model, lr=1e-3)
        batch, loss = torch.zeros(2, 128, device=device, dtype=torch.int64), torch.zeros((), device=device)

        def step():
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # others add in an order that changes
                result = model(input_ids=batch, labels=batch).loss
                result.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.copy_(result.detach())

        results.append(losses_of(step, model, optimizer, batch, loss, runs, recorded))
    assert results[0][0][-1] < results[0][0][0]
    assert results[0][0] == results[1][0]
    for name, value in results[0][1].items():
        assert torch.equal(value, results[1][1][name]), name


def test_compiled_blocks_inside_units(world, device):
    torch._dynamo.reset()
    plain = small.Stack().to(device)
    sharded = copy.deepcopy(plain)
    for block in sharded.blocks:
        block.compile()
    fsdp.fully_shard(sharded, collectives="always")
    theirs, ours = torch.optim.SGD(plain.parameters(), lr=0.1), fsdp.SGD(sharded, lr=0.1)
    for batches in parity.batches_of(world, rows_on(device), 4):
        parity.plain_step(plain, loss_of, batches)
        loss_of(sharded, batches[world.rank]).backward()
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
    parity.compare_weights(plain, sharded, dict(rtol=1e-4, atol=1e-5))
