"""A model that ranks compute together: a gated MLP of a tp group, and a mixture of experts of an ep group."""

import torch
from torch import nn
from torch.nn import functional

import fsdp_cpp as fsdp

HIDDEN, INNER, EXPERTS, TOKENS = 8, 12, 12, 12  # 2, 3 and 4 ranks share each of them, or two thirds


class Mlp(nn.Module):
    """Columns, then rows: each rank of the tp group has a part of the inner channels, of gate and up each."""

    def __init__(self, tp):
        super().__init__()
        self.tp = tp
        self.gate_up = nn.Linear(HIDDEN, 2 * INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN)

    def forward(self, x):
        gate, up = self.gate_up(self.tp.sum_gradient(x)).chunk(2, dim=-1)
        parts = functional.linear(functional.silu(gate) * up, self.down.weight)
        return self.tp.all_reduce(parts) + self.down.bias


class Experts(nn.Module):
    """One expert for each token, on the rank of the ep group that has it."""

    def __init__(self, ep):
        super().__init__()
        self.ep = ep
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN) / INNER**0.5)

    def forward(self, x, expert):
        order = expert.argsort(stable=True)
        sent = expert.bincount(minlength=EXPERTS).view(self.ep.size, -1)  # [rank, its experts]
        received = self.ep.all_to_all(sent)                               # [from rank, own experts]
        sends, receives = sent.sum(1).tolist(), received.sum(1).tolist()
        rows = self.ep.all_to_all(x[order], receives, sends)
        own = torch.arange(received.shape[1]).repeat(self.ep.size).repeat_interleave(received.flatten())
        by_expert = own.argsort(stable=True)
        results = [torch.relu(part @ up) @ down
                   for part, up, down in zip(rows[by_expert].split(received.sum(0).tolist()), self.up, self.down)]
        back = torch.cat(results)[by_expert.argsort()]
        return self.ep.all_to_all(back, sends, receives)[order.argsort()]


class Block(nn.Module):
    """The ranks of a tp group have all tokens for the MLP, and tokens of their own for router and experts."""

    def __init__(self, mesh):
        super().__init__()
        self.tp = mesh.tp
        self.mlp_norm = nn.LayerNorm(HIDDEN)
        self.mlp = Mlp(mesh.tp)
        self.router_norm = nn.LayerNorm(HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = Experts(mesh.ep)

    def forward(self, x):
        x = x + self.mlp(self.mlp_norm(x))
        own = self.router_norm(self.tp.split(x))
        weight, expert = self.router(own).softmax(-1).max(-1)
        mixed = weight[:, None] * self.experts(own, expert)
        return x + self.tp.all_gather(mixed, gradient="equal")


class Model(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.blocks = nn.ModuleList(Block(mesh) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


DECLARED = dict(expert_parameters="*.experts.*",
                tensor_parameters={"*.gate_up.weight": fsdp.TpShard(0, num_sections=2), "*.down.weight": fsdp.TpShard(1),
                                   "*.router*": fsdp.TpPartial()})


def new_model(mesh):
    torch.manual_seed(3)
    return Model(mesh)


def batches_of(mesh, steps):
    """[step][loss], on every rank."""
    generator = torch.Generator().manual_seed(11)
    return [[torch.randn(TOKENS, HIDDEN, generator=generator) for _ in range(mesh.data_parallel_size)] for _ in range(steps)]


def loss_of(model, x):
    return model(x).square().mean()
