#!/usr/bin/env python3
"""Chats as `fsdp` renders, tokenises and masks them: the ids are those of transformers, the assistant's turns are learnt.

    chat_templates_test.py FSDP PYTHON_WORKER
"""

import array
import datetime
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here needs a network

try:
    import numpy
    import small_runs
    import tokenizer_files
    import transformers
except ImportError as error:
    print(f"skipped: {error}; make setup installs what requirements.txt names")
    sys.exit(0)

FSDP, WORKER = sys.argv[1:]
NOT_LEARNT = 1 << 15
CHAT = [{"role": "user", "content": "the rank of  a tensor"}, {"role": "assistant", "content": "one two"},
        {"role": "user", "content": "caf\u00e9 \u65e5\u672c\u8a9e"}, {"role": "assistant", "content": "three"}]
# The learnt text of CHAT, turn by turn, in the words of each model.
LEARNT = {"llama3": ["one two<|eot_id|>", "three<|eot_id|>"], "qwen2.5": ["one two<|im_end|>", "three<|im_end|>"],
          "qwen3": ["one two<|im_end|>", "<think>\n\n</think>\n\nthree<|im_end|>"], "mistral": [" one two</s>", " three</s>"],
          "gemma": ["one two<end_of_turn>", "three<end_of_turn>"]}


def check(condition, words):
    if not condition:
        sys.exit(f"chat_templates_test: {words}")


class Worker:
    """Talks to python_worker.py as fsdp does."""

    def __init__(self, **environment):
        self.process = subprocess.Popen([sys.executable, WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        env={**os.environ, **environment})

    def send(self, action, payload=b"", **fields):
        head = json.dumps({"action": action, **fields}).encode()
        self.process.stdin.write(struct.pack("=QQ", len(head), len(payload)) + head + payload)
        self.process.stdin.flush()

    def ask(self, action, payload=b"", **fields):
        self.send(action, payload, **fields)
        lengths = struct.unpack("=QQ", self.process.stdout.read(16))
        return json.loads(self.process.stdout.read(lengths[0])), self.process.stdout.read(lengths[1])

    def ids(self, action, payload):
        answer, data = self.ask(action, payload)
        check("error" not in answer, answer)
        return array.array("I", data).tolist()


def their_ids(theirs, messages, **options):
    return theirs(theirs.apply_chat_template(messages, tokenize=False, **options), add_special_tokens=False)["input_ids"]


def check_prompts(worker, folder, model, theirs):
    """A chat that waits for its answer, with and without a system's words, and tools."""
    check("error" not in worker.ask("open", path=str(folder / model / "tokenizer.json"))[0], model)
    chats = [{"messages": CHAT[:1]}, {"messages": CHAT[:3]}]
    if model != "mistral":
        chats.append({"messages": [{"role": "system", "content": " Be brief. "}, *CHAT[:1]]})
        chats.append({"messages": CHAT[:1], "tools": [{"name": "f", "text": "<\u00e9>"}]})
    for chat in chats:
        found = worker.ids("chat", json.dumps(chat).encode())
        expected = their_ids(theirs, chat["messages"], tools=chat.get("tools"), add_generation_prompt=True)
        check(found == expected, f"{model}: {theirs.decode(found)!r} is not {theirs.decode(expected)!r}")


def fsdp(*words):
    return small_runs.run([FSDP, *words], ".", code=None, FSDP_PYTHON=sys.executable)


def end_of_document(packed):
    return json.loads(fsdp("data", "info", packed, "--json").stdout)["end_of_document"]


def check_ends_of_turns(folder):
    """A token that ends turns, too, does not tell where documents end: they would be taken apart there."""
    chats, texts = folder / "chats.jsonl", folder / "texts.jsonl"
    texts.write_text(json.dumps({"text": "one two"}) + "\n")
    for rows, is_told in ((chats, False), (texts, True)):
        output = rows.with_suffix(".bin")
        done = fsdp("data", "pack", rows, "--tokenizer", folder / "mistral", "--end-of-document", "</s>", "--output", output)
        check(done.returncode == 0, done.stderr)
        check((end_of_document(output) is not None) == is_told, f"{rows.name}: {end_of_document(output)}")


def check_documents(folder, model, theirs):
    """All tokens are those of transformers; those of the assistant alone are learnt."""
    rows = folder / "chats.jsonl"
    rows.write_text(json.dumps({"messages": CHAT}) + "\n")
    output = folder / f"{model}.bin"
    done = fsdp("data", "pack", rows, "--tokenizer", folder / model, "--output", output)
    check(done.returncode == 0, done.stderr)
    stored = numpy.fromfile(output, "<u2", offset=128)
    tokens = (stored & (NOT_LEARNT - 1)).tolist()
    # The day of a document is always the same.
    today = datetime.datetime.now().strftime("%d %b %Y")
    text = theirs.apply_chat_template(CHAT, tokenize=False).replace(today, "26 Jul 2024")
    expected = theirs(text, add_special_tokens=False)["input_ids"]
    check(tokens[:len(expected)] == expected, f"{model}: {theirs.decode(tokens)!r} is not {text!r}")
    end = end_of_document(output)
    check(end is not None and end not in expected[:-1], f"{model}: {end} is inside {expected}")
    check(tokens[len(expected):] == ([] if expected[-1] == end else [end]), f"{model}: {tokens} ends wrongly")
    turns = []
    for token, is_learnt, follows in zip(tokens, stored < NOT_LEARNT, [False, *(stored < NOT_LEARNT)]):
        if is_learnt and not follows:
            turns.append([])
        if is_learnt:
            turns[-1].append(token)
    found = [theirs.decode(turn) for turn in turns]
    check(found == LEARNT[model], f"{model}: {found} is learnt, not {LEARNT[model]}")


def pack(rows, folder, code=0):
    done = fsdp("data", "pack", rows, "--tokenizer", folder, "--output", rows.with_suffix(".bin"), "--overwrite")
    check(done.returncode == code, done.stderr)
    return [line for line in done.stderr.splitlines() if not line.startswith("pack ")]  # how far it is


def check_forms(folder):
    """Data sets write one chat in many ways; all become the same tokens, and a directory may hold several."""
    asked, answered = CHAT[2]["content"], CHAT[3]["content"]
    forms = {
        "messages.jsonl": {"messages": CHAT[2:]},
        "sharegpt.jsonl": {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": answered}]},
        "alpaca.json": [{"instruction": asked, "input": "", "output": answered}],
        "parts.jsonl": {"messages": [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in CHAT[2:]]},
        "trl.json": [{"prompt": CHAT[2:3], "completion": CHAT[3:]}]}
    (folder / "forms").mkdir()
    packed = set()
    for name, rows in forms.items():
        path = folder / "forms" / name
        path.write_text(json.dumps(rows) + "\n")
        check(not (said := pack(path, folder / "qwen2.5")), f"{name}: {said}")
        packed.add(path.with_suffix(".bin").read_bytes())
        path.with_suffix(".bin").unlink()
    check(len(packed) == 1, f"{len(packed)} kinds of tokens")
    weights = folder / "weights.jsonl"
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}] * 2
    learnt = []
    for weight, last in ((None, None), (0, 1), (1, 0), (0, 0)):
        turns = [turns[0], {**turns[1], "weight": weight}, turns[0], {**turns[1], "weight": last}]
        weights.write_text(json.dumps({"messages": turns}) + "\n")
        done = fsdp("data", "info", weights, "--tokenizer", folder / "qwen2.5", "--json")
        learnt.append(json.loads(done.stdout)["learnt"])
    check(learnt[0] == 2 * learnt[1] == 2 * learnt[2] > 0 == learnt[3], f"{learnt} tokens are learnt")
    done = fsdp("data", "info", folder / "forms", "--tokenizer", folder / "qwen2.5", "--json")
    check(json.loads(done.stdout)["documents"] == len(forms), done)


def check_odd_rows(folder):
    """Rows of which nothing is learnt, and unknown roles, are told with the place of the first."""
    rows = folder / "odd.jsonl"
    rows.write_text("".join(json.dumps({"messages": each}) + "\n" for each in (
        CHAT, CHAT[:1], [{"role": "narrator", "content": "one"}, *CHAT[:2]], CHAT[:1])))
    said = pack(rows, folder / "qwen2.5")
    check(said == [f"warning: 1 row has a role that chat templates do not know, such as 'narrator'; the first is {rows}: line 3",
                   f"warning: 2 rows have nothing to learn, such as a chat without an answer; the first is {rows}: line 2"], said)
    rows.write_text(json.dumps({"messages": CHAT[:1]}) + "\n")
    for words in (["train", "--model", "tiny", "--tokenizer", folder / "qwen2.5"], ["train", "--model", "tiny", "--check", "--tokenizer",
                                                                                     folder / "qwen2.5"]):
        done = fsdp(*words, "--data", rows)
        check(done.returncode == 2 and f"the data has 1 row and not one token to learn (1 row has nothing to learn, such as a "
              f"chat without an answer; the first is {rows}: line 1); give rows with answers" in done.stderr, done)


def check_refusals(worker, folder):
    wrong = json.dumps({"messages": [CHAT[1]]}).encode()
    answer, _ = worker.ask("open", path=str(folder / "mistral" / "tokenizer.json"))
    answer, _ = worker.ask("chat", wrong)
    check(answer["error"] == "the chat template says: roles must alternate between user and assistant", answer)
    tokenizer_files.make_tokenizer(folder / "broken", config={"chat_template": "{% if"})
    worker.ask("open", path=str(folder / "broken" / "tokenizer.json"))
    answer, _ = worker.ask("chat", wrong)
    check("is no Jinja template" in answer["error"], answer)
    # Templates come from strangers: what they may not do fails.
    evil = "{{ messages.append(1) }}{{ ''.__class__.__mro__[1].__subclasses__() }}"
    tokenizer_files.make_tokenizer(folder / "evil", config={"chat_template": [{"name": "default", "template": evil}]})
    worker.ask("open", path=str(folder / "evil" / "tokenizer.json"))
    answer, _ = worker.ask("chat", wrong)
    check("the chat template fails: " in answer["error"] and "unsafe" in answer["error"], answer)


def check_template_without_end(folder):
    """An error after a time; and a process that nobody waits for any more ends in the middle of it."""
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    tokenizer_files.make_tokenizer(folder / "endless", config={"chat_template": loop})
    os.mkfifo(folder / "endless" / "special_tokens_map.json")
    path, chat = str(folder / "endless" / "tokenizer.json"), json.dumps({"messages": CHAT}).encode()
    worker = Worker(FSDP_TEMPLATE_S="0.2")
    worker.ask("open", path=path)
    answer, _ = worker.ask("chat", chat)
    check("computed for 0.2 s without an end; correct it, or raise FSDP_TEMPLATE_S" in answer["error"], answer)
    worker.process.stdin.close()
    worker.process.wait(60)
    worker = Worker(FSDP_TEMPLATE_S="soon")
    worker.ask("open", path=path)
    answer, _ = worker.ask("chat", chat)
    check(answer["error"] == "FSDP_TEMPLATE_S is 'soon'; it takes a number of seconds, such as 60", answer)
    worker.process.stdin.close()
    left = Worker(FSDP_TEMPLATE_S="1000")
    left.send("open", path=path)  # renders a chat, to see what ends its turns
    left.process.stdin.close()
    left.process.wait(60)


def check_text_of_tokens(worker, folder):
    """Token by token: complete characters alone, and the text of all; spaces within the text are kept."""
    text = "the rank \U0001f680 \u65e5\u672c\u8a9e  na\u00efve two"
    for kind in ("bpe", "unigram"):
        theirs = tokenizer_files.make_tokenizer(folder / kind, kind)
        worker.ask("open", path=str(folder / kind / "tokenizer.json"))
        ids = worker.ids("prompt", text.encode())
        check(ids == theirs.encode(text).ids, kind)
        worker.ask("decode", array.array("I", ids[:2]).tobytes(), is_first=True)
        pieces = [worker.ask("decode", array.array("I", [token]).tobytes(), is_first=False)[1].decode() for token in ids[2:]]
        check(theirs.decode(ids[:2]) + "".join(pieces) == theirs.decode(ids), f"{kind}: {pieces}")
        check(not any("\ufffd" in piece for piece in pieces), pieces)


with tempfile.TemporaryDirectory() as name:
    root = pathlib.Path(name)
    talker = Worker()
    for each in tokenizer_files.TEMPLATES:
        tokenizer_files.make_chat_tokenizer(root / each, each)
        reference = transformers.PreTrainedTokenizerFast.from_pretrained(root / each)
        check_prompts(talker, root, each, reference)
        check_documents(root, each, reference)
        print(f"{each}: fine")
    check_forms(root)
    check_odd_rows(root)
    check_ends_of_turns(root)
    check_refusals(talker, root)
    check_template_without_end(root)
    check_text_of_tokens(talker, root)
    talker.process.stdin.close()
    check(talker.process.wait(10) == 0, "the worker does not end with its input")
print("chat_templates_test: fine")
