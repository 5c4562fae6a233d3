"""Small models that take and return their tensors in every form."""

import dataclasses
import typing

import torch
from torch import nn

WIDTH = 8


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks between two layers of the model's own."""

    def __init__(self, blocks=3, width=WIDTH):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x * self.scale


class Pair(typing.NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    parts: dict
    note: str = "none"


class FormBlock(Block):
    """Takes a dataclass, a named tuple, a dict and a list, and returns them."""

    def forward(self, state, *, pair, extra, flag=True):
        x = super().forward(state.hidden + pair.left * extra["factor"])
        assert flag
        return Output(x, {"list": [pair.right * x.mean(), 3], "none": None}, note=state.note), Pair(x, pair.right)


class Forms(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(FormBlock() for _ in range(2))

    def forward(self, x):
        state, pair = Output(x, {}), Pair(x, x)
        for block in self.blocks:
            state, pair = block(state, pair=pair, extra={"factor": torch.tensor(0.5)}, flag=True)
        assert state.note == "none" and state.parts["list"][1] == 3
        return state.hidden + pair.right + state.parts["list"][0]


class Repeated(nn.Module):
    """One block three times, and a block inside a unit that is called on its own, too."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for index in (0, 1, 0, 0):
            x = self.blocks[index](x)
        return x


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class WithBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Checkpointed(Stack):
    """Recomputes its blocks in the backward, in torch's two ways."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.reentrant)
        return x * self.scale
