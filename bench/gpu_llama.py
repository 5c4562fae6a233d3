"""The Llama of src/fsdp/nn in plain eager PyTorch, with the same first values, for the peers of bench/gpu.py."""

import math

import torch
import torch.nn.functional as F
from torch import nn

# (hidden, layers, heads, heads of keys and values, ffn, vocabulary, deviation of first values): src/fsdp/nn/config/presets.cpp
PRESETS = {
    "tiny": (192, 4, 6, 2, 512, 257, 0.06),
    "llama-110m": (512, 24, 8, 8, 1536, 32000, 0.02),
    "llama-1b": (2048, 22, 32, 4, 5632, 32000, 0.02),
}
SEED = 1


class RmsNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-5)


def rotated(x, cosine, sine):
    """[batch, heads, sequence, size], as the transformers library writes it."""
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


class Attention(nn.Module):
    def __init__(self, hidden, heads, kv_heads):
        super().__init__()
        self.size, self.is_grouped = hidden // heads, kv_heads != heads
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x, cosine, sine):
        def heads_of(y):
            return y.view(*y.shape[:2], -1, self.size).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(
            rotated(heads_of(self.q_proj(x)), cosine, sine), rotated(heads_of(self.k_proj(x)), cosine, sine),
            heads_of(self.v_proj(x)), is_causal=True, enable_gqa=self.is_grouped)
        return self.o_proj(mixed.transpose(1, 2).reshape(x.shape))


class Mlp(nn.Module):
    def __init__(self, hidden, ffn):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, ffn, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, hidden, heads, kv_heads, ffn):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(hidden), RmsNorm(hidden)
        self.self_attn, self.mlp = Attention(hidden, heads, kv_heads), Mlp(hidden, ffn)

    def forward(self, x, cosine, sine):
        x = x + self.self_attn(self.input_layernorm(x), cosine, sine)
        return x + self.mlp(self.post_attention_layernorm(x))


class Embedding(nn.Module):
    def __init__(self, vocab, hidden):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden))

    def forward(self, tokens):
        return F.embedding(tokens, self.weight)


class Head(nn.Module):
    def __init__(self, vocab, hidden):
        super().__init__()
        self.norm, self.weight = RmsNorm(hidden), nn.Parameter(torch.empty(vocab, hidden))

    def forward(self, x):
        return F.linear(self.norm(x), self.weight)


class Decoder(nn.Module):
    def __init__(self, vocab, hidden, blocks):
        super().__init__()
        self.embed_tokens, self.layers = Embedding(vocab, hidden), nn.ModuleList(blocks)


class Llama(nn.Module):
    """Called with tokens and what follows them; returns the mean cross entropy."""

    def __init__(self, name):
        super().__init__()
        hidden, layers, heads, kv_heads, ffn, vocab, _ = PRESETS[name]
        self.size = hidden // heads
        self.model = Decoder(vocab, hidden, (Block(hidden, heads, kv_heads, ffn) for _ in range(layers)))
        self.lm_head = Head(vocab, hidden)
        self.tables = None

    def forward(self, tokens, following):
        x = self.model.embed_tokens(tokens)
        cosine, sine = self.rotations(tokens.shape[1], x)
        for block in self.model.layers:
            x = block(x, cosine, sine)
        # The sum is fp32 without an fp32 copy of the logits.
        predicted = F.log_softmax(self.lm_head(x).flatten(0, 1), -1, dtype=torch.float32)
        return F.nll_loss(predicted, following.flatten())

    def rotations(self, sequence, like):
        if self.tables is None or self.tables[0].shape[0] != sequence:
            rate = 10000.0 ** -(torch.arange(0, self.size, 2, dtype=torch.float64) / self.size)
            angle = torch.outer(torch.arange(sequence, dtype=torch.float32), rate.float()).repeat(1, 2)
            self.tables = (angle.cos().to(like), angle.sin().to(like))
        return self.tables


# --- first values: those of src/fsdp/nn/layers/named_init.cpp, a function of seed, name and element ---------------------------

MASK = (1 << 64) - 1
MIX = 0xD6E8FEB86659FD93


def mixed(x):
    """Mixes a Python number."""
    for _ in range(2):
        x = ((x ^ (x >> 32)) * MIX) & MASK
    return x ^ (x >> 32)


def signed(x):
    return x - (1 << 64) if x >> 63 else x


def mixed_tensor(x):
    """Mixes an int64 tensor, which wraps around as unsigned numbers do."""
    for _ in range(2):
        x = (x ^ ((x >> 32) & 0xFFFFFFFF)) * signed(MIX)
    return x ^ ((x >> 32) & 0xFFFFFFFF)


def fill_normal(parameter, name, deviation):
    key = 0xCBF29CE484222325
    for letter in name.encode():
        key = ((key ^ letter) * 0x100000001B3) & MASK
    key = mixed(mixed(SEED) ^ key)
    # In pieces, so that no more memory is taken than training will take.
    flat, piece = parameter.detach().view(-1), 1 << 24
    for begin in range(0, flat.numel(), piece):
        count = min(piece, flat.numel() - begin)
        element = torch.arange(begin + 1, begin + 1 + count + count % 2, device=flat.device)
        bits = mixed_tensor(element * signed(0x9E3779B97F4A7C15) + signed(key))
        unit = (((bits >> 11) & ((1 << 53) - 1)).double() + 0.5) * 2.0**-53
        radius, angle = deviation * (-2.0 * unit[0::2].log()).sqrt(), 2.0 * math.pi * unit[1::2]
        values = torch.stack((radius * angle.cos(), radius * angle.sin()), 1).flatten()
        flat[begin:begin + count] = values[:count].float()


def build(name, device, dtype):
    """On a device values are rounded to bf16 whatever the type, as all rows begin with those."""
    with torch.device(device):
        model = Llama(name)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if not path.endswith("norm.weight"):
                fill_normal(parameter, path, PRESETS[name][-1])
    return model.to(compute_type(device)).to(dtype)


def compute_type(device):
    """bf16, but for CPUs, many of which cannot multiply it."""
    return torch.float32 if device == "cpu" else torch.bfloat16
