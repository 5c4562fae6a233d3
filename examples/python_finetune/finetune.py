"""Fine-tunes a causal language model of transformers on text files, on any number of ranks.

    torchrun --nproc-per-node 8 finetune.py --model meta-llama/Llama-3.2-1B --text book.txt --output tuned
"""

import argparse
import random

import torch
import transformers

import fsdp_cpp as fsdp

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True, help="a folder, or a name that transformers knows")
parser.add_argument("--text", required=True, nargs="+", help="text files to learn")
parser.add_argument("--output", required=True, help="folder of the tuned model")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--length", type=int, default=256, help="tokens of a row")
parser.add_argument("--lr", type=float, default=2e-5)
args = parser.parse_args()

world = fsdp.world()
device = fsdp.device()
tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(device)
fsdp.fully_shard(model)
optimizer = fsdp.AdamW(model, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, max_norm=1.0)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

tokens = torch.tensor(tokenizer("\n".join(open(path).read() for path in args.text))["input_ids"])
draw = random.Random(world.rank)  # every rank its own rows
for step in range(1, args.steps + 1):
    begins = [draw.randrange(len(tokens) - args.length) for _ in range(4)]
    rows = torch.stack([tokens[begin:begin + args.length] for begin in begins]).to(device)
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if world.rank == 0 and (step == 1 or step % 10 == 0):
        print(f"step {step}  loss {loss.item():.4f}  norm {optimizer.gradient_norm():.3f}", flush=True)

weights = fsdp.state_dict(model)  # whole on rank 0, which alone saves them
if world.rank == 0:
    model.save_pretrained(args.output, state_dict=weights)
    tokenizer.save_pretrained(args.output)
