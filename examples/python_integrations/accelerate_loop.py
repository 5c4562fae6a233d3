"""A loop written for accelerate, on a sharded model: gradients add up over microbatches, are clipped, and the run is saved.

    python accelerate_loop.py runs/loop                             or on two ranks, which go on with it:
    torchrun --nproc-per-node 2 accelerate_loop.py runs/loop
"""

import argparse
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fsdp_cpp.integrations.accelerate import Accelerator

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("output", help="folder of the run's state; if it is there, the run goes on")
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()

torch.manual_seed(0)  # every rank builds the same weights
inputs = torch.rand(256, 2) * 4 - 2
targets = (inputs.prod(1, keepdim=True)).sin()
model = nn.Sequential(nn.Linear(2, 32), *(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=64 * args.epochs)

accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2, shard_options={"strategy": "optim_grads_params"})
loader = DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True)
model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
if os.path.isdir(args.output):
    accelerator.load_state(args.output)
    accelerator.print(f"goes on from {args.output}")

for epoch in range(args.epochs):
    total = torch.zeros((), device=accelerator.device)
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        total += loss.detach()
    mean = accelerator.gather(total.reshape(1)).mean().item() / len(loader)
    accelerator.print(f"epoch {epoch + 1}  loss {mean:.5f}")
accelerator.save_state(args.output)
