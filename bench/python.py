"""Training steps of an unchanged Llama of transformers from Python: plain torch, FSDP2, Megatron-FSDP and fsdp_cpp in turns.

    .venv/bin/python bench/python.py                                   # on this machine's GPU, else on 2 CPU ranks
    .venv/bin/python bench/python.py --models llama-1b --rows plain ours --rounds 3
    .venv/bin/python bench/python.py --host                            # what sharding costs the host, per unit

Every row is a job of its own, and jobs take turns, --rounds of them. A row with "+compile" compiles every block. On a GPU
weights are bf16 with fp32 main weights and fp32 gradients (plain: bf16 alone), and "host ms" is the time until a step with 16
tokens has been queued, which is the program's own cost. That differs between processes by more than sharding costs, so --host
measures plain and ours by turns in one process. On CPUs everything is fp32, a process and a thread per rank, gloo for
the others. The table has medians of the rounds' medians; ratios are to the row "fsdp2" with the same compilation.
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
ROWS = ("plain", "fsdp2", "megatron-fsdp", "ours", "plain+compile", "fsdp2+compile", "ours+compile")
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
def build(torch, name, device, dtype):
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=4096, tie_word_embeddings=False, use_cache=False,
                                             attn_implementation="sdpa", **SIZES[name][0]))
    torch.set_default_dtype(torch.float32)
    return model.train()


def units_of(model):
    return [model.model.embed_tokens, *model.model.layers, model.lm_head]


def prepared(torch, row, name, device):
    """(model, optimizer) of a row; what is called in a step is the same for all."""
    kind, _, compiled = row.partition("+")
    on_gpu = device != "cpu"
    narrow = torch.bfloat16 if on_gpu else torch.float32
    model = build(torch, name, device, narrow if kind in ("plain", "ours") else torch.float32)
    if compiled:
        for layer in model.model.layers:
            layer.compile()
    if kind == "plain":
        return model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    if kind == "ours":
        import fsdp_cpp as fsdp
        fsdp.fully_shard(model, main_grads=torch.float32, gradient_lifetime="step")
        return model, fsdp.AdamW(model, **ADAMW)
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    if kind == "fsdp2":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32)
        for module in (*units_of(model), model):
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


def run_row(row, name, steps):
    import torch
    device = chosen_device(torch)
    step = step_of(*prepared(torch, row, name, device))
    rows, length = SIZES[name][1]
    batch = torch.randint(SIZES[name][0]["vocab_size"], (rows, length), device=device)

    def wait():
        if device != "cpu":
            torch.cuda.synchronize()

    for _ in range(5):
        loss = step(batch)
    wait()
    times = []
    for _ in range(3):  # steps follow each other as in training: nothing waits for the device between them
        begin = time.perf_counter()
        for _ in range(steps):
            loss = step(batch)
        wait()
        times.append((time.perf_counter() - begin) * 1e3 / steps)
    host = []
    if device != "cpu":
        few = batch[:1, :16].contiguous()
        for _ in range(4):
            step(few)
        for _ in range(steps):
            wait()
            begin = time.perf_counter()
            step(few)
            host.append((time.perf_counter() - begin) * 1e3)
    wait()
    if os.environ.get("RANK", "0") == "0":
        peak = torch.cuda.max_memory_allocated() >> 20 if device != "cpu" else 0
        print("row " + json.dumps({"ms": statistics.median(times), "host_ms": min(host, default=0), "peak_mib": peak,
                                   "loss": round(float(loss), 4)}), flush=True)
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
        models = {kind: prepared(torch, kind + compiled, name, device) for kind in ("plain", "ours")}
        times = {kind: [] for kind in models}
        units = len(units_of(models["ours"][0])) + 1  # and the model
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
    command = [sys.executable, __file__, "--row", row, "--models", name, "--steps", str(args.steps)]
    processes = start_ranks.start(args.ranks, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    outputs = [process.communicate(timeout=1200) for process in processes]
    for line in outputs[0][0].splitlines():
        if line.startswith("row "):
            return json.loads(line[4:])
    said = (outputs[0][1].strip().splitlines() or ["nothing"])[-1]
    return {"failed": said}


def table(name, found):
    print(f"\n{name}  {'x'.join(map(str, SIZES[name][1]))} tokens per rank")
    print(f"{'':16}{'ms':>9}{'of fsdp2':>10}{'host ms':>9}{'peak MiB':>10}{'loss':>9}")
    for row, results in found.items():
        good = [result for result in results if "ms" in result]
        if not good:
            print(f"{row:16}  {results[0]['failed'][:100]}")
            continue
        ms = statistics.median(result["ms"] for result in good)
        peer = found.get("fsdp2+compile" if "+" in row else "fsdp2", [])
        peer = [result["ms"] for result in peer if "ms" in result]
        ratio = f"{ms / statistics.median(peer):10.3f}" if peer else f"{'':10}"
        print(f"{row:16}{ms:9.2f}{ratio}{min(r['host_ms'] for r in good):9.2f}{max(r['peak_mib'] for r in good):10}"
              f"{good[-1]['loss']:9.4f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SIZES, help="default: llama-1b llama-110m on a GPU, llama-7m on CPUs")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--ranks", type=int, help="default: 1 on a GPU, 2 on CPUs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="in a row, three times")
    parser.add_argument("--host", action="store_true", help="the host's time alone, of plain torch and ours")
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)  # a job of its own
    args = parser.parse_args()
    if args.host:
        return run_host((args.models or ["llama-110m"])[0], args.rounds, args.steps)
    if args.row:
        return run_row(args.row, args.models[0], args.steps)
    import torch
    on_gpu = torch.cuda.is_available()
    args.ranks = args.ranks or (1 if on_gpu else 2)
    for name in args.models or (["llama-1b", "llama-110m"] if on_gpu else ["llama-7m"]):
        found = {row: [] for row in args.rows if on_gpu or row != "megatron-fsdp"}  # which needs GPUs
        for turn in range(args.rounds):
            for row in found:
                found[row].append(measured(row, name, args))
                print(f"{name}: round {turn + 1}, {row}: {found[row][-1]}", file=sys.stderr, flush=True)
        table(name, found)


if __name__ == "__main__":
    main()
