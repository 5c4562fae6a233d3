"""Training steps of an unchanged Llama of transformers from Python: plain torch, FSDP2, Megatron-FSDP and fsdp_cpp in turns.

    .venv/bin/python bench/python.py                                   # on this machine's GPU, else on 2 CPU ranks
    .venv/bin/python bench/python.py --models llama-1b --rows plain ours --rounds 3
    .venv/bin/python bench/python.py --host                            # what sharding costs the host, per unit
    .venv/bin/python bench/python.py --learn 200                       # losses of each row over 200 steps

Every row is a job of its own, and jobs take turns, --rounds of them. A row is a system and what it is asked for, joined by "+":

    compile   every block is compiled
    kernels   fully_shard(kernels=True)              loss    fully_shard(logits=False)
    fp8       ours: fully_shard(weights="fp8-row"); fsdp2: torchao's float8 by rows (its conversion of linear layers)
    liger     liger-kernel's Llama, with its loss without logits; the head is part of the root unit
    graph     fsdp.Graph: the step is recorded and replayed

On a GPU weights are bf16 with fp32 main weights and fp32 gradients (plain: bf16 alone), and "host ms" is the time until a step
with 16 tokens has been queued, which is the program's own cost. That differs between processes by more than sharding costs, so
--host measures plain and ours by turns in one process. On CPUs everything is fp32, a process and a thread per rank, gloo for the
others. The table has medians of the rounds' medians; ratios are to the row "fsdp2" with the same compilation. Packages that are
not installed (megatron-fsdp, liger-kernel, torchao) are found in --peers, where they lie unpacked.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "processes"))
ROWS = ("plain", "fsdp2", "megatron-fsdp", "ours", "plain+compile", "fsdp2+compile", "fsdp2+liger+compile", "fsdp2+fp8+compile",
        "ours+compile", "ours+kernels", "ours+kernels+loss", "ours+kernels+loss+compile", "ours+kernels+loss+graph",
        "ours+kernels+loss+compile+graph", "ours+kernels+loss+fp8", "ours+kernels+loss+fp8+compile", "ours+kernels+loss+fp8+graph",
        "ours+kernels+loss+fp8+compile+graph")
ON_CPUS = ("plain", "fsdp2", "ours", "plain+compile", "fsdp2+compile", "ours+compile", "ours+kernels+loss")
SIZES = {  # of LlamaConfig, and the batch
    "llama-1b": (dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
                      num_key_value_heads=4, vocab_size=32000), (4, 2048)),
    "llama-110m": (dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=24, num_attention_heads=8,
                        num_key_value_heads=8, vocab_size=32000), (4, 512)),
    "llama-7m": (dict(hidden_size=256, intermediate_size=704, num_hidden_layers=8, num_attention_heads=8,
                      num_key_value_heads=8, vocab_size=4096), (2, 128)),
}
ADAMW = dict(lr=3e-5, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


# --- one row, in a process of its own per rank -----------------------------------------------------------------------------
class Row:
    """A system, and what it is asked for."""

    def __init__(self, name):
        self.system, *asked = name.split("+")
        self.asked = set(asked)

    def __contains__(self, what):
        return what in self.asked


def build(torch, row, name, device, dtype):
    from transformers import LlamaConfig, LlamaForCausalLM
    if "liger" in row:
        from liger_kernel.transformers import apply_liger_kernel_to_llama
        apply_liger_kernel_to_llama()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=4096, tie_word_embeddings=False, use_cache=False,
                                             attn_implementation="sdpa", **SIZES[name][0]))
    torch.set_default_dtype(torch.float32)
    return model.train()


def units_of(model, row):
    head = [] if "liger" in row else [model.lm_head]  # whose loss reads the head outside of the head's forward
    return [model.model.embed_tokens, *model.model.layers, *head]


def prepared(torch, row, name, device):
    """(model, optimizer) of a row; what is called in a step is the same for all."""
    on_gpu = device != "cpu"
    narrow = torch.bfloat16 if on_gpu else torch.float32
    model = build(torch, row, name, device, narrow if row.system in ("plain", "ours") else torch.float32)
    if row.system == "fsdp2" and "fp8" in row:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name("rowwise"),
                                   module_filter_fn=lambda module, name: name != "lm_head")
    if row.system == "ours":
        import fsdp_cpp as fsdp
        fsdp.fully_shard(model, main_grads=torch.float32, gradient_lifetime="step", kernels="kernels" in row, logits="loss" not in row,
                         weights="fp8-row" if "fp8" in row else "bf16")
    if "compile" in row:
        for layer in model.model.layers:
            layer.compile()
    if row.system == "plain":
        return model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    if row.system == "ours":
        return model, fsdp.AdamW(model, **ADAMW)
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    if row.system == "fsdp2":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32)
        for module in (*units_of(model, row), model):
            fully_shard(module, mp_policy=policy)
        return model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    import megatron_fsdp
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer
    policy = megatron_fsdp.MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32)
    model = megatron_fsdp.fully_shard_model(model.to(narrow), fsdp_unit_modules=[LlamaDecoderLayer], zero_dp_strategy=3,
                                            mixed_precision_policy=policy)
    return model, megatron_fsdp.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), fused=True, **ADAMW))


def chosen_device(torch):
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        return "cpu"
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    torch.cuda.set_device(device)
    return device


def step_of(model, optimizer):
    def step(tokens):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def recorded_step_of(torch, model, optimizer, example):
    import fsdp_cpp as fsdp
    tokens, loss = example.clone(), torch.zeros((), device=example.device)
    step = step_of(model, optimizer)
    graph = fsdp.Graph(lambda: loss.copy_(step(tokens)), model, optimizer)

    def run(batch):
        tokens.copy_(batch)
        graph()
        return loss

    return run


def run_row(name_of_row, name, steps, learn):
    import torch
    device, row = chosen_device(torch), Row(name_of_row)
    made = prepared(torch, row, name, device)
    rows, length = SIZES[name][1]
    batch = torch.randint(SIZES[name][0]["vocab_size"], (rows, length), device=device, generator=torch.Generator(device).manual_seed(1))
    is_recorded = "graph" in row
    step = recorded_step_of(torch, *made, batch) if is_recorded else step_of(*made)

    def wait():
        if device != "cpu":
            torch.cuda.synchronize()

    result = {}
    if learn:
        # Eight batches by turns, which a model of this size learns by heart.
        batches = [torch.randint(SIZES[name][0]["vocab_size"], (rows, length), device=device,
                                 generator=torch.Generator(device).manual_seed(seed)) for seed in range(8)]
        for group in made[1].param_groups:
            group["lr"] = 3e-4
        result["losses"] = [round(float(step(batches[i % 8])), 4) for i in range(learn)]
    else:
        for _ in range(5):
            loss = step(batch)
        wait()
        times, queued = [], []
        for _ in range(3):  # steps follow each other as in training: nothing waits for the device between them
            begin = time.perf_counter()
            for _ in range(steps):
                loss = step(batch)
            queued.append((time.perf_counter() - begin) * 1e3 / steps)
            wait()
            times.append((time.perf_counter() - begin) * 1e3 / steps)
        result |= {"ms": statistics.median(times), "host_ms": min(queued) if is_recorded else 0, "loss": round(float(loss), 4)}
        if device != "cpu" and not is_recorded:
            few, host = batch[:1, :16].contiguous(), []
            for _ in range(4):
                step(few)
            for _ in range(steps):
                wait()
                begin = time.perf_counter()
                step(few)
                host.append((time.perf_counter() - begin) * 1e3)
            result["host_ms"] = min(host)
    wait()
    result["peak_mib"] = torch.cuda.max_memory_allocated() >> 20 if device != "cpu" else 0
    if os.environ.get("RANK", "0") == "0":
        print("row " + json.dumps(result), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def run_host(name, turns, steps):
    """Plain and ours by turns in one process: a turn is the best of `steps` steps with 16 tokens."""
    import torch
    device = chosen_device(torch)
    tokens = torch.randint(SIZES[name][0]["vocab_size"], (1, 16), device=device)
    wait = torch.cuda.synchronize if device != "cpu" else lambda: None
    for compiled in ("", "+compile"):
        models = {kind: prepared(torch, Row(kind + compiled), name, device) for kind in ("plain", "ours")}
        times = {kind: [] for kind in models}
        units = len(units_of(models["ours"][0], Row("ours"))) + 1  # and the model
        for turn in range(turns + 1):
            for kind, made in models.items():
                step, best = step_of(*made), float("inf")
                for _ in range(steps):
                    wait()
                    begin = time.perf_counter()
                    step(tokens)
                    best = min(best, (time.perf_counter() - begin) * 1e3)
                if turn > 0:  # the first turn warms up
                    times[kind].append(best)
        plain, ours = (statistics.median(times[kind]) for kind in ("plain", "ours"))
        print(f"{name}: host ms of a step: plain{compiled} {plain:.2f}, ours{compiled} {ours:.2f}: "
              f"{(ours - plain) / units:.3f} per unit", flush=True)
        del models


# --- all rows --------------------------------------------------------------------------------------------------------------
def measured(row, name, args):
    import start_ranks
    command = [sys.executable, __file__, "--row", row, "--models", name, "--steps", str(args.steps), "--peers", args.peers,
               "--learn", str(args.learn)]
    processes = start_ranks.start(args.ranks, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    outputs = [process.communicate(timeout=1200) for process in processes]
    for line in outputs[0][0].splitlines():
        if line.startswith("row "):
            return json.loads(line[4:])
    said = [line for line in outputs[0][1].strip().splitlines() if not line.startswith("[rank")] or ["nothing"]
    return {"failed": said[-1]}


def table(name, found):
    print(f"\n{name}  {'x'.join(map(str, SIZES[name][1]))} tokens per rank")
    print(f"{'':36}{'ms':>9}{'of fsdp2':>10}{'host ms':>9}{'peak MiB':>10}{'loss':>9}")
    for row, results in found.items():
        good = [result for result in results if "ms" in result]
        if not good:
            print(f"{row:36}  {results[0]['failed'][:100]}")
            continue
        ms = statistics.median(result["ms"] for result in good)
        peer = found.get("fsdp2+compile" if "compile" in Row(row) else "fsdp2", [])
        peer = [result["ms"] for result in peer if "ms" in result]
        ratio = f"{ms / statistics.median(peer):10.3f}" if peer else f"{'':10}"
        print(f"{row:36}{ms:9.2f}{ratio}{min(r['host_ms'] for r in good):9.2f}{max(r['peak_mib'] for r in good):10}"
              f"{good[-1]['loss']:9.4f}")


def table_of_losses(name, found, steps):
    shown = sorted({1, 10, 50, 100, 150, steps} & set(range(1, steps + 1)))
    print(f"\n{name}: losses after steps {', '.join(map(str, shown))}; mean distance from the first row over all steps")
    first = next(iter(found.values()))[0].get("losses")
    for row, (result, *_) in found.items():
        losses = result.get("losses")
        if losses is None:
            print(f"{row:36}  {result['failed'][:100]}")
            continue
        distance = statistics.mean(abs(mine - theirs) for mine, theirs in zip(losses, first)) if first else float("nan")
        print(f"{row:36}" + "".join(f"{losses[step - 1]:9.4f}" for step in shown) + f"{distance:9.4f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SIZES, help="default: llama-1b llama-110m on a GPU, llama-7m on CPUs")
    parser.add_argument("--rows", nargs="+", choices=ROWS, help="default: all; on CPUs some of them")
    parser.add_argument("--ranks", type=int, help="default: 1 on a GPU, 2 on CPUs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="in a row, three times")
    parser.add_argument("--host", action="store_true", help="the host's time alone, of plain torch and ours")
    parser.add_argument("--learn", type=int, default=0, metavar="STEPS", help="losses over so many steps in place of times")
    parser.add_argument("--peers", default="build/peers", help="a folder with unpacked packages")
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)  # a job of its own
    args = parser.parse_args()
    sys.path.append(os.path.abspath(args.peers))
    if args.host:
        return run_host((args.models or ["llama-110m"])[0], args.rounds, args.steps)
    if args.row:
        return run_row(args.row, args.models[0], args.steps, args.learn)
    import torch
    on_gpu = torch.cuda.is_available()
    args.ranks = args.ranks or (1 if on_gpu else 2)
    for name in args.models or (["llama-1b", "llama-110m"] if on_gpu else ["llama-7m"]):
        found = {row: [] for row in args.rows or (ROWS if on_gpu else ON_CPUS)}
        for turn in range(1 if args.learn else args.rounds):
            for row in found:
                found[row].append(measured(row, name, args))
                short = {key: value for key, value in found[row][-1].items() if key != "losses"}
                print(f"{name}: round {turn + 1}, {row}: {short}", file=sys.stderr, flush=True)
        if args.learn:
            table_of_losses(name, found, args.learn)
        else:
            table(name, found)


if __name__ == "__main__":
    main()
