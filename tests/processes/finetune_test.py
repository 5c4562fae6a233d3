#!/usr/bin/env python3
"""A Llama of the transformers package, fine-tuned sharded by `fsdp train` and exported: the package computes what we do,
and all that is published with a model comes back with it.

    finetune_test.py FSDP MODEL_RUN FINETUNE     the command, our models as a program, the example's script

Ends with "skipped: ..." where packages are missing.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here needs a network

try:
    import safetensors.torch
    import torch
    import transformers
except ImportError as error:
    print(f"skipped: {error}; make setup installs what requirements.txt names")
    sys.exit(0)

FSDP, MODEL_RUN, FINETUNE = sys.argv[1:4]
STEPS = 20
# Both sides round products and sums of a few hundred terms to fp32, in different orders: 6e-8 each, a hundred of
# them in a row, of values up to the largest logit.
TOLERANCE = 1e-5
PROMPT = "The rank "


def load(folder):
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model):
    with torch.no_grad():
        return model(torch.arange(40).reshape(2, 20)).logits


def our_logits(checkpoint, ranks, folder):
    """The logits that our model computes from a checkpoint of ours, for the tokens of logits()."""
    out = folder / f"computed{ranks}"
    subprocess.run([MODEL_RUN, "compute", checkpoint, str(ranks), out], check=True)
    (file,) = out.rglob("*.safetensors")
    return safetensors.torch.load_file(file)["logits"]


def their_text(model):
    prompt = torch.tensor([list(PROMPT.encode())])
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False,
                            pad_token_id=0)[0]
    return bytes(token for token in tokens.tolist() if token < 256)


def save_published(folder, kind):
    """A small model in bf16, with fields and files that nobody here reads."""
    sizes = dict(vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=64, bos_token_id=5, eos_token_id=[6, 7], pad_token_id=8)
    if kind == "mixtral":
        sizes |= dict(num_local_experts=4, output_router_logits=False)
    if kind == "qwen2":
        sizes |= dict(tie_word_embeddings=True)
    if kind == "qwen3_moe":
        sizes |= dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    if kind == "qwen3_next":
        sizes |= dict(num_hidden_layers=4, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
                      linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
                      shared_expert_intermediate_size=16, mlp_only_layers=[1])
    if kind == "deepseek_v3":
        sizes |= dict(num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
                      first_k_dense_replace=1, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=2,
                      topk_group=1, num_nextn_predict_layers=0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **sizes))
    model.to(torch.bfloat16).save_pretrained(folder)
    beside = {"qwen3_next": "mtp.fc.weight", "deepseek_v3": "model.layers.2.eh_proj.weight"}
    if kind in beside:  # published beside the model, and left out by the package, too
        safetensors.torch.save_file({beside[kind]: torch.ones(2, 3)}, folder / "model-mtp.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "of_their_own": {"a": [1, 2]}}, indent=4))
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**generation, "temperature": 0.25, "do_sample": True}))
    for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "merges.txt",
                 "vocab.json", "added_tokens.json", "chat_template.jinja"):
        (folder / name).write_bytes(f"{name} of {kind}\r\n".encode() + bytes(range(256)))


def check_comes_back(published, exported):
    """All but the weights is what it was."""
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (published, exported))
    assert after.pop("torch_dtype") == after["dtype"] == before["dtype"] == "bfloat16", after
    assert after == before, (before, after)
    for path in published.iterdir():
        if path.suffix != ".safetensors" and path.name != "config.json":
            assert (exported / path.name).read_bytes() == path.read_bytes(), path.name
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype="auto")
    assert model.dtype == torch.bfloat16 and model.generation_config.temperature == 0.25
    assert model.config.eos_token_id == [6, 7] and not getattr(model.config, "output_router_logits", False)
    start = transformers.AutoModelForCausalLM.from_pretrained(published, dtype="auto").state_dict()
    assert any(not torch.equal(value, start[key]) for key, value in model.state_dict().items()), "nothing was trained"


def check_round_trip(folder, kind):
    """Trained from a published model, resumed without it, and exported where it is not at hand."""
    folder.mkdir()
    (folder / "text.txt").write_bytes(pathlib.Path(__file__).read_bytes())
    save_published(folder / "published", kind)

    def fsdp(*words):
        subprocess.run([FSDP, *map(str, words)], check=True, cwd=folder, stdout=subprocess.DEVNULL)

    def train(run, steps, *begin):
        fsdp("train", *begin, "--data", "text.bin", "--ranks", 2, "--steps", steps, "--batch", 4, "--sequence", 16, "--lr", 0.01,
             "--warmup", 0, "--sample", "", "--validate-every", 0, "--checkpoint-dir", run, "--quiet")

    # This is the same model in other words, without the fields that nobody reads.
    computed = subprocess.run([MODEL_RUN, "config", folder / "published/config.json"], check=True, stdout=subprocess.PIPE)
    (folder / "model.json").write_bytes(computed.stdout)
    fsdp("data", "pack", "text.txt", "--output", "text.bin")  # for text the model's tokenizer would be taken, which is none
    train("run", 2, "--model", "published")
    train("other", 2, "--model", "model.json", "--init", "published")
    (folder / "published").rename(folder / "elsewhere")
    train("run", 4, "--model", "model.json")
    for run in ("run", "other", "run/step-00000002"):
        exported = folder / f"{run}-exported"
        fsdp("convert", run, exported, "--to", "hf")
        check_comes_back(folder / "elsewhere", exported)
        for path in exported.glob("*.safetensors"):  # a step of a bias is less than bf16 can tell
            for name, value in safetensors.torch.load_file(path).items():
                assert value.dtype == (torch.float32 if "e_score" in name else torch.bfloat16), (name, value.dtype)
    fsdp("convert", "run", "sharded", "--to", "sharded", "--ranks", 3)
    fsdp("convert", "sharded", "exported", "--to", "hf")
    check_comes_back(folder / "elsewhere", folder / "exported")


def main(folder):
    for kind in ("llama", "mistral", "qwen2", "mixtral", "qwen3_moe", "qwen3_next", "deepseek_v3"):
        check_round_trip(folder / kind, kind)
    environment = {**os.environ, "FSDP": FSDP, "PYTHON": sys.executable, "STEPS": str(STEPS)}
    subprocess.run([FINETUNE, folder], check=True, env=environment)  # compares losses of both programs itself

    log = [json.loads(line) for line in (folder / "run/log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in log if line["kind"] == "step"]
    assert len(losses) == STEPS and losses[-1] < losses[0] - 1, losses

    start, tuned = load(folder / "start"), load(folder / "tuned")
    theirs = logits(tuned)
    largest = theirs.abs().max().item()
    assert (theirs - logits(start)).abs().max() > 0.1 * largest, "what was exported is not what was trained"
    for ranks in (1, 2):
        ours = our_logits(folder / f"run/step-{STEPS:08}", ranks, folder)
        difference = (ours - theirs).abs().max().item() / largest
        print(f"logits of the fine-tuned model on {ranks} ranks: largest difference {difference:.1e} of the largest")
        assert difference < TOLERANCE

    ours = subprocess.run([FSDP, "generate", "--checkpoint", folder / "run", "--prompt", PROMPT, "--tokens", "24"],
                          check=True, stdout=subprocess.PIPE).stdout
    assert ours == their_text(tuned) + b"\n", (ours, their_text(tuned))


with tempfile.TemporaryDirectory() as place:
    main(pathlib.Path(place))
print("passed")
