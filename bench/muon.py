"""Muon's step alone, on the matrices of a Llama: fsdp_cpp.Muon, torch.optim.Muon, and the products that both must compute.

    .venv/bin/python bench/muon.py                       # llama-1b on this machine's GPU, else llama-7m on its CPU
    .venv/bin/python bench/muon.py --model llama-110m --rounds 5

One rank, gradients that are there already. On a GPU ours has bf16 weights with fp32 main weights and fp32 gradients, torch's fp32
weights; products are bf16. On a CPU everything is fp32 but torch's products, which are always bf16, and slow where the processor
has none: so its row is left out unless --torch asks for it. The three take turns; times are the best of --rounds.
"""

import argparse
import time

import torch
from torch import nn

import fsdp_cpp as fsdp
from python import SIZES


class Layer(nn.Module):
    """The matrices of a block; the loss is linear, so that gradients are the factors that it is given."""

    def __init__(self, hidden_size, intermediate_size, key_size):
        super().__init__()
        shapes = [(hidden_size, hidden_size), (key_size, hidden_size), (key_size, hidden_size), (hidden_size, hidden_size),
                  (intermediate_size, hidden_size), (intermediate_size, hidden_size), (hidden_size, intermediate_size)]
        self.matrices = nn.ParameterList(torch.randn(shape) * 0.02 for shape in shapes)

    def forward(self, factor):
        return sum((matrix * (factor * torch.cos(matrix.detach() * 100))).sum().float() for matrix in self.matrices)


class Model(nn.Module):
    def __init__(self, name):
        super().__init__()
        size, _ = SIZES[name]
        key_size = size["hidden_size"] * size["num_key_value_heads"] // size["num_attention_heads"]
        self.layers = nn.ModuleList(Layer(size["hidden_size"], size["intermediate_size"], key_size)
                                    for _ in range(size["num_hidden_layers"]))

    def forward(self, factor):
        return sum(layer(factor) for layer in self.layers)


def multiply(matrices, products):
    """The matrix products of five iterations, and nothing else."""
    for matrix in matrices:
        x = products[matrix.shape]
        for _ in range(5):
            a = x @ x.mT if x.shape[0] <= x.shape[1] else x.mT @ x
            b = a @ a
            y = b @ x if x.shape[0] <= x.shape[1] else x @ b
    return y


def flops(matrices):
    total = 0
    for rows, columns in (matrix.shape for matrix in matrices):
        m, n = sorted((rows, columns))
        total += 5 * 2 * m * m * (2 * n + m)
    return total


def main():
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SIZES, default="llama-1b" if on_gpu else "llama-7m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--torch", action="store_true", help="torch.optim.Muon on a CPU, too")
    parser.add_argument("--products", choices=("single", "batched"), default="single")
    args = parser.parse_args()
    device = "cuda" if on_gpu else "cpu"
    narrow = torch.bfloat16 if on_gpu else torch.float32

    torch.manual_seed(0)
    plain = Model(args.model).to(device)
    model = Model(args.model).to(device)
    model.load_state_dict(plain.state_dict())
    model = fsdp.fully_shard(model, params=narrow, main_grads=torch.float32, matrices="*")
    ours = fsdp.Muon(model, lr=1e-3, updates="blocking", products=args.products)
    model(0.01).backward()
    theirs = torch.optim.Muon(plain.parameters(), lr=1e-3, adjust_lr_fn="match_rms_adamw")
    for parameter in plain.parameters():
        parameter.grad = 0.01 * torch.cos(parameter.detach() * 100)
    matrices = list(plain.parameters())
    products = {matrix.shape: torch.randn_like(matrix, dtype=narrow) * 1e-3 for matrix in matrices}

    def our_step():
        ours.step()
        ours.wait()

    rows = {"products alone": lambda: multiply(matrices, products), "fsdp_cpp.Muon": our_step}
    if on_gpu or args.torch:
        rows["torch.optim.Muon"] = theirs.step
    best = dict.fromkeys(rows, float("inf"))
    for _ in range(args.rounds + 1):  # the first one warms up
        for name, run in rows.items():
            if on_gpu:
                torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            if on_gpu:
                torch.cuda.synchronize()
            best[name] = min(best[name], time.perf_counter() - start)
    print(f"# {args.model} on {torch.cuda.get_device_name() if on_gpu else 'cpu'}: {len(matrices)} matrices, "
          f"{sum(m.numel() for m in matrices) / 1e6:.0f}M elements, {flops(matrices) / 1e12:.2f} Tflop; best of {args.rounds}")
    for name, seconds in best.items():
        print(f"{name:20} {seconds * 1e3:9.2f} ms {seconds / best['products alone']:6.2f} x the products "
              f"{flops(matrices) / seconds / 1e12:8.2f} Tflop/s")
    moved = max((b.detach() - a.float()).abs().max().item() for (a, b) in zip(whole(model), matrices))
    print(f"# largest difference of a weight: {moved:.1e}") if "torch.optim.Muon" in rows else None


def whole(model):
    with fsdp.unshard(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


if __name__ == "__main__":
    main()
