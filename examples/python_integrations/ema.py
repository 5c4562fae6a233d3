"""A moving average of the weights, which each rank keeps of its own shard: evaluated, saved and loaded.

    python ema.py runs/ema                or      torchrun --nproc-per-node 2 ema.py runs/ema
"""

import sys

import torch
from torch import nn

import fsdp_cpp as fsdp

world = fsdp.world()
torch.manual_seed(0)  # every rank builds the same weights
model = fsdp.fully_shard(nn.Sequential(nn.Linear(8, 32), *(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2)), nn.Linear(32, 1)))
optimizer = fsdp.AdamW(model, lr=3e-2)
ema = fsdp.EMA(model, decay=0.95)


def batch(generator, noise):
    x = torch.randn(16, 8, generator=generator)
    return x, x.sum(1, keepdim=True) + noise * torch.randn(16, 1, generator=generator)


@torch.no_grad()
def evaluate():
    generator = torch.Generator().manual_seed(1000)
    return sum(nn.functional.mse_loss(model(x), y).item() for x, y in (batch(generator, noise=0.0) for _ in range(20))) / 20


draws = torch.Generator().manual_seed(world.rank)  # every rank its own rows
for step in range(300):
    x, y = batch(draws, noise=2.0)  # the last weights follow it, and the average evens it out
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    ema.update()

last = evaluate()
with ema.applied():  # the model has the averaged weights in here, and its own again behind it
    averaged = evaluate()
if world.rank == 0:
    print(f"loss {last:.4f}  averaged {averaged:.4f}")

if len(sys.argv) > 1:
    ema.save(sys.argv[1], step=300)
    again = fsdp.EMA(model)
    again.load(sys.argv[1])  # on any number of ranks
    with again.applied():
        loaded = evaluate()
    if world.rank == 0:
        print(f"loaded {loaded:.4f}")
