"""The Llama of bench/llama.h in PyTorch: FSDP2 over gloo beside the same model unsharded.

Usage: .venv/bin/python bench/fsdp2.py [--ranks 2] [--rounds 5]

Every rank is a process of one thread. Plain: every rank for itself, at the same time. The two take turns in
the same processes; the medians of time and of the quotient within a round count.
"""

import argparse
import json
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

HIDDEN, LAYERS, HEADS, FFN, VOCAB, SEQUENCE, BATCH = 256, 8, 4, 768, 512, 128, 4
LEARNING_RATE = 0.05


class RmsNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x):
        return x * (x.square().mean(-1, True) + 1e-5).rsqrt() * self.weight


class Rotation:
    """Rotates pairs of channels by an angle that grows with the position."""

    def __init__(self):
        size = HIDDEN // HEADS
        rate = 10000.0 ** -(torch.arange(0, size, 2, dtype=torch.float) / size)
        angle = torch.outer(torch.arange(SEQUENCE, dtype=torch.float), rate)
        self.cosine = torch.cat((angle.cos(), angle.cos()), -1)
        self.sine = torch.cat((angle.sin(), angle.sin()), -1)

    def __call__(self, x):
        first, second = x.chunk(2, -1)
        return x * self.cosine + torch.cat((-second, first), -1) * self.sine


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.rotate = Rotation()
        self.attention_norm, self.ffn_norm = RmsNorm(), RmsNorm()
        self.query, self.key, self.value, self.output = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(HIDDEN, FFN, bias=False) for _ in range(2))
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x):
        normed = self.attention_norm(x)

        def split(y):
            return y.view(*y.shape[:2], HEADS, -1).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(
            self.rotate(split(self.query(normed))), self.rotate(split(self.key(normed))),
            split(self.value(normed)), is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(x.shape))
        normed = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = RmsNorm(), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, x):
        return self.linear(self.norm(x))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = Head()

    def forward(self, tokens, following):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), following.flatten())


def build():
    torch.manual_seed(7)
    return Llama()


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def step(model, data):
    loss = model(*data)
    loss.backward()
    # SGD on what this rank holds, written out: an optimizer would dispatch on every distributed tensor.
    with torch.no_grad():
        for parameter in model.parameters():
            local(parameter).sub_(local(parameter.grad), alpha=LEARNING_RATE)
    model.zero_grad()
    return loss.item()


def run_rank(rank, ranks, rounds, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    plain, sharded = build(), build()
    for unit in (sharded.embedding, *sharded.blocks, sharded.head, sharded):
        fully_shard(unit, mesh=mesh)
    text = torch.randint(VOCAB, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(rank))
    data = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    assert abs(step(plain, data) - step(sharded, data)) < 1e-5, "the first losses differ"
    times = {plain: [], sharded: []}
    for turn in range(rounds + 1):
        for model in (plain, sharded) if turn % 2 == 0 else (sharded, plain):
            dist.barrier()
            begin = time.perf_counter()
            step(model, data)
            dist.barrier()
            times[model].append((time.perf_counter() - begin) * 1e3)
    if rank == 0:
        # The first turn still warms up.
        ratio = statistics.median(b / a for a, b in zip(times[plain][1:], times[sharded][1:]))
        with open(f"{folder}/result.json", "w") as out:
            json.dump({"plain_ms": statistics.median(times[plain][1:]),
                       "fsdp2_ms": statistics.median(times[sharded][1:]), "over_plain": ratio}, out)
    dist.barrier()
    dist.destroy_process_group()


def measure(ranks, rounds):
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(ranks, rounds, folder), nprocs=ranks)
        with open(f"{folder}/result.json") as result:
            return json.load(result)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    result = measure(args.ranks, args.rounds)
    print(f"{'PyTorch plain':42} {result['plain_ms']:10.2f} {1:12.3f}")
    print(f"{'PyTorch FSDP2 over gloo':42} {result['fsdp2_ms']:10.2f} {result['over_plain']:12.3f}")


if __name__ == "__main__":
    main()
