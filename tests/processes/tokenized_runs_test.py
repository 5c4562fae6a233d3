#!/usr/bin/env python3
"""Runs on text of a HuggingFace tokenizer: train, eval and generate use the model's own, and checkpoints carry it.

    tokenized_runs_test.py FSDP
"""

import json
import os
import pathlib
import sys
import tempfile
import unicodedata

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here needs a network

try:
    import small_runs
    import tokenizer_files
    import torch
    import transformers
except ImportError as error:
    print(f"skipped: {error}; make setup installs what requirements.txt names")
    sys.exit(0)

FSDP = sys.argv[1]


def check(condition, words):
    if not condition:
        sys.exit(f"tokenized_runs_test: {words}")


def fsdp(*words, code=0):
    done = small_runs.run([FSDP, *words], ".", code=code, timeout=200, FSDP_PYTHON=sys.executable)
    return done.stdout if code == 0 else done.stderr


def save_model(folder, vocabulary):
    """A random Llama whose weights are large enough for some variety."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3, bos_token_id=None, eos_token_id=None)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return model


def greedy(model, ids, count, ends=()):
    """Token after token by the model itself, without the settings that generate() would find."""
    ids = list(ids)
    for _ in range(count):
        with torch.no_grad():
            token = model(torch.tensor([ids])).logits[0, -1].argmax().item()
        if token in ends:
            break
        ids.append(token)
    return ids


def check_training(root):
    """Text is tokenised as it is packed: the same losses; and eval of the run agrees."""
    train = ["train", "--model", root / "model", "--sequence", 16, "--batch", 4, "--steps", 3, "--lr", "1e-3", "--seed", 2,
             "--validate-every", 0, "--sample", "the rank", "--sample-tokens", 8]
    fsdp("data", "pack", root / "text", "--tokenizer", root / "model", "--output", root / "text.bin")
    said = fsdp(*train, "--data", root / "text", "--checkpoint-dir", root / "run")
    check("sample after step 3:" in said and "the rank" in said, said)
    fsdp(*train, "--data", root / "text.bin", "--ranks", 2, "--checkpoint-dir", root / "packed")
    first, second = (small_runs.losses(root / each / "log.jsonl") for each in ("run", "packed"))
    check(list(first) == list(second) == [1, 2, 3], f"{first} {second}")
    # Two ranks add the same numbers in another order.
    check(all(abs(first[step] - second[step]) < 1e-5 for step in first), f"{first} are not {second}")
    kept = root / "run" / "step-00000003" / "tokenizer.json"
    check(kept.read_text() == (root / "model" / "tokenizer.json").read_text(), "the checkpoint has another tokenizer")
    results = [json.loads(fsdp("eval", "--checkpoint", root / "run", "--data", data, "--json"))
               for data in (root / "text", root / "text.bin")]
    check(results[0] == results[1], results)
    said = fsdp("eval", "--checkpoint", root / "run", "--data", root / "text", "--tokenizer", root / "none", code=2)
    check("but there is no file" in said, said)


def check_generating(root, tokenizer, model):
    prompt = "the rank of caf\u00e9"
    ids = tokenizer.encode(prompt).ids
    written = greedy(model, ids, 24)
    said = fsdp("generate", "--checkpoint", root / "model", "--prompt", prompt, "--tokens", 24)
    # Characters that are not complete at the end are not written.
    expected = prompt + tokenizer.decode(written)[len(tokenizer.decode(ids)):].rstrip("\ufffd")
    check(said.rstrip("\n") == expected.rstrip("\n"), f"{said!r} is not {expected!r}")
    # It stops at the tokens that the model's files name.
    stop = written[len(ids) + 5]
    (root / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop, 2**31 - 1]}))
    expected = prompt + tokenizer.decode(greedy(model, ids, 24, [stop]))[len(tokenizer.decode(ids)):].rstrip("\ufffd")
    said = fsdp("generate", "--checkpoint", root / "model", "--prompt", prompt, "--tokens", 24)
    check(said.rstrip("\n") == expected.rstrip("\n"), f"{said!r} is not {expected!r}")
    (root / "model" / "generation_config.json").unlink()


def check_chatting(root, model):
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(root / "model")
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one two"}]
    ids = theirs(theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True),
                 add_special_tokens=False)["input_ids"]
    written = greedy(model, ids, 12, [theirs.convert_tokens_to_ids(each) for each in ("<|im_end|>", "<|endoftext|>")])
    expected = theirs.decode(written[len(ids):], skip_special_tokens=True).rstrip("\ufffd")
    said = fsdp("generate", "--checkpoint", root / "model", "--chat", "--system", "Be brief.", "--prompt", "one two",
                "--tokens", 12)
    check(said.rstrip("\n") == expected.rstrip("\n"), f"{said!r} is not {expected!r}")
    check("--system is given without --chat" in
          fsdp("generate", "--checkpoint", root / "model", "--system", "x", "--prompt", "y", code=2), "--system alone")


def check_presets(root, tokenizer):
    """A preset takes as many tokens as the data has, and its run knows the tokenizer."""
    train = ["train", "--model", "tiny", "--tokenizer", root / "model", "--data", root / "text", "--steps", 1, "--batch", 2,
             "--sequence", 16, "--validate-every", 0, "--sample", ""]
    fsdp(*train, "--checkpoint-dir", root / "preset")
    config = json.loads((root / "preset" / "step-00000001" / "config.json").read_text())
    expected = (tokenizer.get_vocab_size() + 63) // 64 * 64
    check(config["vocab_size"] == expected, f"{config['vocab_size']} is not {expected}")
    check(fsdp("generate", "--checkpoint", root / "preset", "--prompt", "one", "--tokens", 3).startswith("one"), "generate")
    said = fsdp(*train, "--vocabulary", 1000, "--check")
    check("1000" in said, said)
    check("vocabulary is" in fsdp(*train, "--vocabulary", 300, code=2), "too small a vocabulary")


def check_rows(root):
    rows = [{"messages": [{"role": "user", "content": f"one {i}"}, {"role": "assistant", "content": "two three"}]}
            for i in range(40)]
    (root / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = fsdp("train", "--model", root / "model", "--data", root / "chats.jsonl", "--sequence", 64, "--batch", 4,
                "--steps", 2, "--validate-every", 0, "--sample-tokens", 8, "--checkpoint-dir", root / "chatted")
    check("learnt" in said and "2/2" in said, said)
    # The sample answers the first question, or that of --sample, as a chat does.
    for more, question in (([], "one 0"), (["--sample", "two three"], "two three")):
        if more:
            said = fsdp("train", "--model", root / "model", "--data", root / "chats.jsonl", "--sequence", 64, "--batch", 4,
                        "--steps", 2, "--sample-tokens", 8, "--checkpoint-dir", root / "chatted", *more)
        answer = fsdp("generate", "--checkpoint", root / "chatted", "--chat", "--prompt", question, "--tokens", 8,
                      "--temperature", 0.8, "--top-p", 0.95).removesuffix("\n")
        # No control character reaches the terminal.
        answer = "".join("\ufffd" if unicodedata.category(each) == "Cc" and each not in "\n\t" else each for each in answer)
        shown = "".join(f"    {line}\n" for line in f"{question}\n{answer}".split("\n"))
        check(f"sample after step 2:\n{shown}trained " in said, f"{said} has no {shown!r}")
    # A template that refuses to ask ends no training.
    settings = root / "model" / "tokenizer_config.json"
    config = json.loads(settings.read_text())
    config["chat_template"] += "{%- if add_generation_prompt %}{{ raise_exception('answers only') }}{%- endif %}"
    settings.write_text(json.dumps(config))
    said = fsdp("train", "--model", root / "model", "--data", root / "chats.jsonl", "--sequence", 64, "--batch", 4,
                "--steps", 1, "--validate-every", 0, "--no-save")
    check("no sample: " in said and "answers only" in said, said)


with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    made = tokenizer_files.make_chat_tokenizer(folder / "model", "qwen2.5")
    llama = save_model(folder / "model", made.get_vocab_size())
    (folder / "text").mkdir()
    for i in range(4):
        (folder / "text" / f"{i}.txt").write_text(tokenizer_files.sentences(40, seed=10 + i))
    check_training(folder)
    check_generating(folder, made, llama)
    check_chatting(folder, llama)
    check_presets(folder, made)
    check_rows(folder)
print("tokenized_runs_test: fine")
