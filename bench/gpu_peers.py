"""One row of bench/gpu.py's table in PyTorch, in a process of its own: prints one JSON line.

Usage: python bench/gpu_peers.py --row fsdp2 --model llama-1b [--device cuda] [--steps 20] [--peers build/peers]

A world of one rank, with its collectives issued as each library does it. --peers names a folder with an unpacked
megatron-fsdp (pip download megatron-fsdp --no-deps, then unzip), where it is not installed.
"""

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist

import gpu_llama

ROWS = ("pytorch-bf16", "fsdp2", "fsdp2-compile", "megatron-fsdp", "megatron-fsdp-double-buffer")
SEQUENCE = {"llama-1b": 2048, "llama-110m": 512}
# These are the values of gpu_rows.h and gpu.cpp, too.
ADAMW = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}
LOSS_AFTER, HOST_TOKENS, PROFILED_STEPS = 20, 16, 2


# --- the rows: each returns a model and its optimizer -----------------------------------------------------------------


def pytorch_bf16(args):
    """Unsharded; weights, gradients and moments in bf16."""
    model = gpu_llama.build(args.model, args.device, gpu_llama.compute_type(args.device))
    return model, torch.optim.AdamW(model.parameters(), lr=args.lr, **ADAMW)


def fsdp2(args, compiles=False):
    """fp32 weights that are gathered in bf16, fp32 gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = gpu_llama.build(args.model, args.device, torch.float32)
    if compiles:
        for block in model.model.layers:
            block.compile()
    policy = MixedPrecisionPolicy(param_dtype=gpu_llama.compute_type(args.device), reduce_dtype=torch.float32)
    mesh = init_device_mesh(args.device, (1,))
    for unit in (model.model.embed_tokens, *model.model.layers, model.lm_head, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=args.lr, **ADAMW)


def megatron_fsdp(args, double_buffer=False):
    """bf16 weights, fp32 main weights and main gradients."""
    import megatron_fsdp as library

    model = library.fully_shard_model(
        gpu_llama.build(args.model, args.device, gpu_llama.compute_type(args.device)),
        fsdp_unit_modules=[gpu_llama.Embedding, gpu_llama.Block, gpu_llama.Head], zero_dp_strategy=3,
        mixed_precision_policy=library.MixedPrecisionPolicy(main_params_dtype=torch.float32,
                                                            main_grads_dtype=torch.float32),
        fsdp_double_buffer=double_buffer)
    optimizer = library.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=args.lr, **ADAMW))
    # That has taken a step with zero gradients, to make the moments.
    for state in optimizer.state.values():
        state["step"].zero_()
    return model, optimizer


MAKE = {
    "pytorch-bf16": pytorch_bf16,
    "fsdp2": fsdp2,
    "fsdp2-compile": lambda args: fsdp2(args, compiles=True),
    "megatron-fsdp": megatron_fsdp,
    "megatron-fsdp-double-buffer": lambda args: megatron_fsdp(args, double_buffer=True),
}


# --- measuring, as gpu.cpp does it ------------------------------------------------------------------------------------


def read_batch(args):
    sequence = args.sequence or SEQUENCE.get(args.model, 64)
    shape = (args.batch, sequence + 1)
    if args.tokens:
        with open(args.tokens, "rb") as file:
            text = torch.frombuffer(bytearray(file.read()), dtype=torch.int32)
        text = text[:shape[0] * shape[1]].view(shape).long()
    else:
        vocab = gpu_llama.PRESETS[args.model][5]
        text = torch.randint(vocab, shape, generator=torch.Generator().manual_seed(1))
    return text[:, :-1].contiguous().to(args.device), text[:, 1:].contiguous().to(args.device)


def synchronize(device):
    if device != "cpu":
        torch.cuda.synchronize()


class Clock:
    def __init__(self, device):
        self.device, self.marks = device, []

    def mark(self):
        if self.device == "cpu":
            return self.marks.append(time.perf_counter() * 1e3)
        self.marks.append(torch.cuda.Event(enable_timing=True))
        self.marks[-1].record()

    def milliseconds(self):
        synchronize(self.device)
        pairs = zip(self.marks, self.marks[1:])
        return [b - a if self.device == "cpu" else a.elapsed_time(b) for a, b in pairs]


def host_milliseconds(step, device, steps):
    times = []
    for _ in range(steps):
        synchronize(device)
        begin = time.perf_counter()
        step()
        times.append((time.perf_counter() - begin) * 1e3)
    synchronize(device)
    return min(times)  # whatever else the machine does can only make a step slower


def memory(device):
    if device == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"peak_mb": peak / 1e6, "reserved_mb": peak / 1e6, "in_use_mb": peak / 1e6}
    free, total = torch.cuda.mem_get_info()
    return {"peak_mb": torch.cuda.max_memory_allocated() / 1e6, "reserved_mb": torch.cuda.max_memory_reserved() / 1e6,
            "in_use_mb": (total - free) / 1e6}


def profile(step, args):
    activity = torch.profiler.ProfilerActivity
    kinds = [activity.CPU] if args.device == "cpu" else [activity.CUDA]
    synchronize(args.device)
    with torch.profiler.profile(activities=kinds) as profiler:
        for _ in range(PROFILED_STEPS):
            step()
        synchronize(args.device)
    profiler.export_chrome_trace(f"{args.profile}/{args.model}-{args.row}.json")


def measure(args):
    batch = read_batch(args)
    model, optimizer = MAKE[args.row](args)
    losses = []

    def train(tokens, following):
        loss = model(tokens, following)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def step():
        losses.append(train(*batch).clone())

    if args.device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(args.warm_up):
        step()
    clock = Clock(args.device)
    clock.mark()
    for _ in range(args.steps):
        step()
        clock.mark()
    times = clock.milliseconds()
    used = memory(args.device)
    busy_host_ms = host_milliseconds(step, args.device, args.steps)
    host_ms = None  # other shapes would be compiled anew
    if args.row != "fsdp2-compile":
        few = [part[:1, :HOST_TOKENS].contiguous() for part in batch]
        host_milliseconds(lambda: train(*few), args.device, 3)
        host_ms = host_milliseconds(lambda: train(*few), args.device, args.steps)
    # Last, since what a profiler leaves behind slows every later launch.
    if args.profile:
        profile(step, args)
    values = [loss.item() for loss in losses]
    return {"row": args.row, "model": args.model, "device": args.device, "batch": batch[0].shape[0],
            "sequence": batch[0].shape[1], "units": gpu_llama.PRESETS[args.model][1] + 2,
            "ms": statistics.median(times), "step_ms": times, "host_ms": host_ms, "busy_host_ms": busy_host_ms, **used,
            "loss": values[min(LOSS_AFTER, args.warm_up + args.steps - 1)], "losses": values}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", required=True, choices=ROWS)
    parser.add_argument("--model", default="llama-1b", choices=gpu_llama.PRESETS)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=0, help="0: as the table has it")
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=3e-4, help="learning rate")
    parser.add_argument("--tokens", help="a file of batch x (sequence + 1) int32 numbers")
    parser.add_argument("--profile", help="a folder for traces of what the device ran")
    parser.add_argument("--peers", default="build/peers", help="a folder with an unpacked megatron-fsdp")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu_peers: --device is 'cuda', but PyTorch sees no GPU; use --device cpu --model tiny to try the program")
    sys.path.append(args.peers)
    with tempfile.TemporaryDirectory() as folder:
        if args.device == "cuda":
            torch.cuda.set_device(0)
        dist.init_process_group("gloo" if args.device == "cpu" else "nccl", init_method=f"file://{folder}/meet", rank=0,
                                world_size=1)
        try:
            print(json.dumps(measure(args)), flush=True)
        finally:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
