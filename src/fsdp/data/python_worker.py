"""Answers what fsdp asks of Python: tokenizers of others, their chat templates, parquet files, Weights & Biases.

fsdp starts Python with this text and a socket as standard input and output. A request and its answer are frames: the
lengths of a JSON object and of the bytes after it, 8 bytes each, then both. The end of the input ends the process.
"""

import sys

if sys.path and sys.path[0] == "":
    del sys.path[0]  # the files of the working directory are data, and may be named like modules

import array
import datetime
import importlib
import io
import json
import os
import re
import select
import signal
import struct
import threading

# Tokens that end documents of the common models. Where a tokenizer has one, it is preferred to its eos_token, which in
# models for chats is often the end of a turn and so stands within documents.
DOCUMENT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
ROWS_AT_A_TIME = 1024
# Alternatives of the expressions by which tokenizers of the GPT kind cut a text into words. None goes on where
# word_encoder.cpp cuts, or looks further than white space goes; so what lies between two cuts can be encoded alone.
WORD_FORMS = frozenset((
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", "'s", "'t", "'re", "'ve", "'m", "'ll", "'d", r" ?\p{L}+", r" ?\p{N}+",
    r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r"\p{N}{1,3}",
    *(rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]{upper}[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]{lower}{end}"
      for upper, lower in ("*+", "+*") for end in ("", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?")),
    r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"))


class Failure(Exception):
    """A sentence for the user; `document` says which one of the request it is about."""

    def __init__(self, sentence, document=None):
        super().__init__(sentence)
        self.document = document


def first_line(error):
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")


def template_seconds():
    """The time that a chat template may compute for one text; it may have loops without end."""
    text = os.environ.get("FSDP_TEMPLATE_S", "60")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 0 < seconds < 1e9:
        raise Failure(f"FSDP_TEMPLATE_S is '{text}'; it takes a number of seconds, such as 60")
    return seconds


def json_beside(path, name):
    """The object in the file of this name in the tokenizer's directory; {} without one."""
    file = os.path.join(os.path.dirname(path), name)
    if not os.path.isfile(file):  # nothing, or a pipe, which may never end
        return {}
    try:
        with open(file, encoding="utf-8") as stream:
            found = json.load(stream)
    except ValueError as error:
        raise Failure(f"{file}: is no JSON ({first_line(error)}); use another copy") from error
    return found if isinstance(found, dict) else {}


class ChatTemplate:
    """A template as the package transformers renders it: a Jinja sandbox with a few functions more."""

    def __init__(self, source, special_tokens, added_tokens):
        try:
            import jinja2.ext
            import jinja2.sandbox
        except ImportError as error:
            raise Failure("chat templates need the Python package jinja2; install it, e.g. pip install jinja2") from error

        class Generation(jinja2.ext.Extension):
            """{% generation %} marks what an assistant wrote; here turns are found without it."""

            tags = {"generation"}

            def parse(self, parser):
                next(parser.stream)
                return parser.parse_statements(["name:endgeneration"], drop_needle=True)

        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation])
        environment.filters["tojson"] = self.to_json
        environment.globals["raise_exception"] = self.refuse
        environment.globals["strftime_now"] = self.formatted_date
        self.special_tokens = special_tokens  # bos_token and its like, by name
        self.added_tokens = added_tokens      # all that the tokenizer takes whole
        self.date = None
        self.seconds = template_seconds()
        signal.signal(signal.SIGVTALRM, self.end_computing)
        try:
            self.template = environment.from_string(source)
            self.template.globals = dict(self.template.globals)  # each rendering copies them, quicker from a dict
        except jinja2.TemplateError as error:
            raise Failure(f"its chat template is no Jinja template ({first_line(error)})") from error

    @staticmethod
    def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def end_computing(self, *_):
        raise Failure(f"the chat template has computed for {self.seconds:g} s without an end; correct it, or raise FSDP_TEMPLATE_S")

    @staticmethod
    def refuse(sentence):
        raise Failure(f"the chat template says: {sentence}")

    def formatted_date(self, form):
        return (self.date or datetime.datetime.now()).strftime(form)

    def render(self, row, messages, add_generation_prompt=False):
        signal.setitimer(signal.ITIMER_VIRTUAL, self.seconds)  # of this process, so others' work does not count
        try:
            return self.template.render(messages=messages, tools=row.get("tools"), documents=None,
                                        add_generation_prompt=add_generation_prompt, **self.special_tokens)
        except Failure:
            raise
        except Exception as error:  # templates fail in many ways
            raise Failure(f"the chat template fails: {first_line(error)}") from error
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def render_document(self, row):
        """The text of a chat, and the first and last character of each turn that the assistant wrote."""
        # A template may write the day; the tokens of a data set must not depend on when they are made.
        self.date = datetime.datetime(2024, 7, 26)
        messages = row["messages"]
        whole = self.render(row, messages)
        turns = [self.turn(row, whole, i) for i, message in enumerate(messages)
                 if message.get("role") == "assistant" and message.get("weight") != 0]
        self.date = None
        return whole, turns

    def turn(self, row, whole, number):
        messages = row["messages"]
        try:
            before = self.render(row, messages[:number], add_generation_prompt=True)
            after = whole if number + 1 == len(messages) else self.render(row, messages[:number + 1])
        except Failure:  # the template does not like half a chat
            before, after = whole + "?", ""
        # The model writes this after the prompt that it would get; white space after the end of a turn is not its own.
        if len(before) <= len(after) and whole.startswith(before) and whole.startswith(after):
            return len(before), len(after.rstrip())
        return self.marked_turn(row, whole, number)

    def marked_turn(self, row, whole, number):
        """For templates that write a turn in another way when more follow: looks where its content goes."""
        messages = list(row["messages"])
        mark = "\ue000fsdp\ue001"
        messages[number] = {**messages[number], "content": mark}
        head, found, tail = self.render(row, messages).partition(mark)
        if not found or not whole.startswith(head) or not whole.endswith(tail) or len(head) + len(tail) > len(whole):
            raise Failure(f"the chat template does not show where message {number + 1} begins and ends")
        ends = [len(token) for token in self.added_tokens if tail.startswith(token)]  # of the turn
        return len(head), len(whole) - len(tail) + max(ends, default=0)


def mask_of(offsets, spans):
    """1 for each token whose characters, or the place of one without any, touch one of the spans; all are in order."""
    mask = bytearray(len(offsets))
    at, (begin, end) = 0, spans[0] if spans else (0, 0)
    for number, (first, last) in enumerate(offsets):
        while at + 1 < len(spans) and first >= end:
            at += 1
            begin, end = spans[at]
        if first < end and (last if last > first else first + 1) > begin and (first or last):
            mask[number] = 1
    return mask


def cuts_words(part):
    """Whether a pre-tokenizer cuts, in any case, where word_encoder.cpp does; None: not by itself, and it does no harm."""
    kind = part["type"]
    if kind == "Sequence":
        found = [cuts_words(each) for each in part["pretokenizers"]]
        return False if False in found else True in found
    if kind == "ByteLevel":
        return False if part["add_prefix_space"] else part.get("use_regex", True) or None
    if kind == "Digits":
        return None
    # A | in parentheses divides no alternatives; the forms above have no such characters in sets.
    forms = set(re.split(r"\|(?![^()]*\))", part["pattern"].get("Regex", ""))) if kind == "Split" else {""}
    if not forms <= WORD_FORMS or part["behavior"] != "Isolated" or part["invert"]:
        return False
    return r"\s+" in forms or None


class Tokens:
    """A tokenizer.json and what stands beside it."""

    def open(self, request, _):
        import tokenizers

        path = request["path"]
        try:
            with open(path, encoding="utf-8") as stream:
                self.tokenizer = tokenizers.Tokenizer.from_str(stream.read())
        except Exception as error:  # the package raises nothing more special
            raise Failure(f"{path}: cannot be read as a tokenizer: {first_line(error)}; use another copy") from error
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.path = path
        self.config = {**json_beside(path, "special_tokens_map.json"), **json_beside(path, "tokenizer_config.json")}
        self.special_tokens = {name: value["content"] if isinstance(value, dict) else value
                               for name, value in self.config.items()
                               if name.endswith("_token") and isinstance(value, (str, dict))}
        self.template = None
        self.stream = None
        self.end = self.end_of_document(request.get("end", ""))
        ends = {self.end, self.tokenizer.token_to_id(self.special_tokens.get("eos_token", ""))} - {None}
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise Failure(f"{path}: has no tokens; use another copy")
        return {"model": type(self.tokenizer.model).__name__.lower(), "vocabulary": max(vocabulary.values()) + 1,
                "end_of_document": self.end, "ends_turns": self.ends_turns(), "ends": sorted(ends)}, b""

    def end_of_document(self, given):
        if given:
            token = self.tokenizer.token_to_id(given)
            if token is None:
                raise Failure(f"--end-of-document is '{given}', which is no token of {self.path}; name one that is")
            return token
        for text in (*DOCUMENT_ENDS, self.special_tokens.get("eos_token")):
            if text and self.tokenizer.token_to_id(text) is not None:
                return self.tokenizer.token_to_id(text)
        return None

    def ends_turns(self):
        """Whether the token that ends documents is also inside chats, so that it does not tell where one ends."""
        try:
            turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2
            text = self.chat_template().render({}, turns)
        except Failure:  # without a template that can be used there are no chats
            return False
        return self.end in self.tokenizer.encode(text, add_special_tokens=False).ids[:-1]

    # --- words ----------------------------------------------------------------------------------------

    def word_rules(self, _, __):
        """Which tokens stand for themselves, and those around a text; {} for a tokenizer that must see whole texts."""
        with open(self.path, encoding="utf-8") as stream:
            form = json.load(stream)
        added, normalizer, cutter = form.get("added_tokens") or [], form.get("normalizer"), form.get("pre_tokenizer")
        normalized = any(token["normalized"] for token in added)
        odd = any(token["lstrip"] or token["rstrip"] or token["single_word"] or not token["content"] for token in added)
        whole, inner = self.tokenizer.encode("a"), self.tokenizer.encode("a", add_special_tokens=False).ids
        begin = (*whole.special_tokens_mask, 0).index(0)
        end = begin + len(inner)
        if (odd or not cutter or not cuts_words(cutter) or form["model"].get("dropout")
                or normalizer not in (None, {"type": "NFC"}) or not inner or whole.ids[begin:end] != inner
                or normalized and (normalizer or not all(token["normalized"] for token in added))):
            return {}, b""
        return {"whole": [token["content"] for token in added], "before": whole.ids[:begin], "after": whole.ids[end:],
                "ends_lines": r"\s*[\r\n]+|\s+(?!\S)" in json.dumps(cutter).replace("\\\\", "\\")}, b""

    def words(self, request, payload):
        """The ids of each word; with `places`, also its first and last byte, for each id."""
        stream = io.BytesIO(payload)
        words = [stream.read(count).decode() for count in request["words"]]
        encode = self.tokenizer.encode_batch if request["places"] else self.tokenizer.encode_batch_fast
        found = encode(words, add_special_tokens=False)
        numbers = array.array("I")
        for each in found:
            numbers.extend(each.ids)
        for word, each in zip(words, found) if request["places"] else ():
            for place in each.offsets:
                numbers.extend(place if word.isascii() else (len(word[:end].encode()) for end in place))
        return {"counts": [len(each.ids) for each in found]}, numbers.tobytes()

    def render(self, request, payload):
        """The text of each chat; its length, and where turns of the assistant begin and end, in bytes."""
        stream, texts, lengths, turns = io.BytesIO(payload), [], [], []
        for number, count in enumerate(request["chats"]):
            try:
                text, spans = self.chat_template().render_document(json.loads(stream.read(count)))
            except Failure as error:
                raise Failure(str(error), number) from error
            texts.append(text.encode())
            lengths.append(len(texts[-1]))
            edges = [edge for span in spans for edge in span]
            turns.append(edges if text.isascii() else [len(text[:edge].encode()) for edge in edges])
        return {"lengths": lengths, "turns": turns}, b"".join(texts)

    # --- documents ------------------------------------------------------------------------------------

    def encode(self, request, payload):
        """Each document: [bytes, bytes of the prompt, is a chat, is a beginning, is an end]; then their texts."""
        plain, whole_texts, masked = {}, {}, {}
        offset = 0
        for number, (count, prompt_bytes, is_chat, is_beginning, _) in enumerate(request["documents"]):
            data = payload[offset:offset + count]
            offset += count
            try:
                if is_chat:
                    masked[number] = (*self.chat_template().render_document(json.loads(data)), False)
                elif prompt_bytes:
                    prompt, completion = data[:prompt_bytes].decode(), data[prompt_bytes:].decode()
                    text = prompt + completion
                    masked[number] = text, [(len(prompt), len(text))], True
                else:
                    (whole_texts if is_beginning else plain)[number] = data.decode()
            except UnicodeDecodeError as error:
                raise Failure(f"is not UTF-8 text (byte 0x{data[error.start]:02x} at {error.start})", number) from error
            except Failure as error:
                raise Failure(str(error), number) from error
        ids, masks = {}, {}
        for texts, special in ((whole_texts, True), (plain, False)):
            found = self.tokenizer.encode_batch_fast(list(texts.values()), add_special_tokens=special)
            ids.update({number: each.ids for number, each in zip(texts, found)})
        for special in (True, False):
            chosen = {number: each for number, each in masked.items() if each[2] == special}
            found = self.tokenizer.encode_batch([text for text, _, _ in chosen.values()], add_special_tokens=special)
            for (number, (_, spans, _)), each in zip(chosen.items(), found):
                ids[number] = each.ids
                masks[number] = mask_of(each.offsets, spans)
        self.end_documents(request["documents"], ids, masks)
        tokens = array.array("I")
        for number in range(len(ids)):
            tokens.extend(ids[number])
        return {"counts": [len(ids[number]) for number in range(len(ids))], "masked": sorted(masks)}, (
            tokens.tobytes() + b"".join(bytes(masks[number]) for number in sorted(masks)))

    def end_documents(self, documents, ids, masks):
        for number, (_, _, is_chat, _, is_end) in enumerate(documents):
            if not is_end or self.end is None:
                continue
            if not ids[number] or ids[number][-1] != self.end:
                ids[number].append(self.end)
                if number in masks:
                    masks[number].append(0)
            if number in masks and not is_chat:
                masks[number][-1] = 1  # the model ends its completion itself

    # --- prompts and answers --------------------------------------------------------------------------

    def prompt(self, _, payload):
        found = self.tokenizer.encode(payload.decode())
        ids = found.ids
        if len(ids) > 1 and found.special_tokens_mask[-1]:
            ids = ids[:-1]  # a token that ends a text; this one goes on
        return {}, array.array("I", ids).tobytes()

    def chat(self, _, payload):
        row = json.loads(payload)
        text = self.chat_template().render(row, row["messages"], add_generation_prompt=True)
        return {}, array.array("I", self.tokenizer.encode(text, add_special_tokens=False).ids).tobytes()

    def decode(self, request, payload):
        """The text of tokens that follow those before; a character that is not complete waits for the rest."""
        import tokenizers.decoders

        if request["is_first"]:
            self.stream = tokenizers.decoders.DecodeStream(skip_special_tokens=True)
        ids = array.array("I")
        ids.frombytes(payload)
        return {}, "".join(self.stream.step(self.tokenizer, token) or "" for token in ids).encode()

    def chat_template(self):
        if self.template is None:
            added = [token.content for token in self.tokenizer.get_added_tokens_decoder().values()]
            self.template = ChatTemplate(self.template_source(), self.special_tokens, added)
        return self.template

    def template_source(self):
        file = os.path.join(os.path.dirname(self.path), "chat_template.jinja")
        if os.path.isfile(file):
            with open(file, encoding="utf-8") as stream:
                return stream.read()
        source = self.config.get("chat_template") or json_beside(self.path, "chat_template.json").get("chat_template")
        if isinstance(source, list):  # several by name
            source = {each.get("name"): each.get("template") for each in source}.get("default")
        if not source:
            raise Failure(f"{os.path.dirname(self.path)} has no chat template (chat_template.jinja, or in "
                          "tokenizer_config.json); use the tokenizer of a model for chats")
        return source


class Parquet:
    """A parquet file as JSON lines."""

    def open_parquet(self, request, _):
        import pyarrow.parquet

        try:
            file = pyarrow.parquet.ParquetFile(request["path"])
            names = file.schema_arrow.names
            wanted = [name for name in names if name in request["fields"]]
            self.batches = file.iter_batches(ROWS_AT_A_TIME, columns=wanted)
        except Exception as error:
            raise Failure(f"{request['path']}: cannot be read as a parquet file: {first_line(error)}") from error
        return {}, b""

    def read_parquet(self, _, __):
        rows = next(self.batches, None)
        lines = [] if rows is None else [json.dumps(row, default=str) for row in rows.to_pylist()]
        return {"is_last": rows is None}, "\n".join(lines).encode()


class WeightsAndBiases:
    """A run as https://wandb.ai shows it; WANDB_MODE=offline and its like are the package's own."""

    FIGURES = {"step": {"loss": "loss/train", "lr": "learning_rate", "grad_norm": "gradient_norm", "ms": "speed/step_ms",
                        "tokens_per_s": "speed/tokens_per_s", "tflops": "speed/tflops", "mfu": "speed/mfu",
                        "peak_bytes": "memory/peak_bytes", "tokens": "tokens"},
               "validation": {"loss": "loss/validation"}}

    def open_wandb(self, request, _):
        import wandb

        try:
            self.run = wandb.init(project=request["project"], name=request["name"] or None)
        except Exception as error:
            raise Failure(f"--log is 'wandb:{request['project']}', but wandb says: {first_line(error)}") from error
        return {"place": str(getattr(self.run, "url", None) or self.run.dir)}, b""

    def log_wandb(self, _, payload):
        """A line of the log. Nobody waits for an answer, so an error ends this process, which fsdp notices."""
        try:
            record = json.loads(payload)
            if record["kind"] == "run":
                self.run.config.update(record["settings"], allow_val_change=True)
            names = self.FIGURES.get(record["kind"], {})
            figures = {name: record[key] for key, name in names.items() if record.get(key) is not None}
            figures.update({f"loss_terms/{name}": value for name, value in record.get("terms", {}).items()})
            if figures:
                self.run.log(figures, step=record["step"])
        except Exception:
            os._exit(1)
        return None, b""

    def end_wandb(self, request, _):
        self.run.finish(exit_code=request["code"])
        return {}, b""


def start(request, _):
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        importlib.import_module(request["module"])
    except Exception as error:
        return {"missing": first_line(error)}, b""
    return {}, b""


def frames(stream):
    while len(lengths := stream.read(16)) == 16:
        head_bytes, payload_bytes = struct.unpack("=QQ", lengths)
        yield json.loads(stream.read(head_bytes)), stream.read(payload_bytes)


def end_with_parent():
    """Whatever the main thread does meanwhile: fsdp may be killed while a template or a file has it wait."""
    closed = select.poll()
    closed.register(0, 0)  # that the other side has hung up is always told
    closed.poll()
    os._exit(0)


def main():
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to fsdp, too, which decides
    threading.Thread(target=end_with_parent, daemon=True).start()
    # Prints of packages must not stand between the frames.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    tokens, parquet, wandb = Tokens(), Parquet(), WeightsAndBiases()
    actions = {"start": start, "open": tokens.open, "encode": tokens.encode, "word_rules": tokens.word_rules,
               "words": tokens.words, "render": tokens.render, "prompt": tokens.prompt,
               "chat": tokens.chat, "decode": tokens.decode, "open_parquet": parquet.open_parquet,
               "read_parquet": parquet.read_parquet, "open_wandb": wandb.open_wandb, "log_wandb": wandb.log_wandb,
               "end_wandb": wandb.end_wandb}
    for request, payload in frames(sys.stdin.buffer):
        try:
            answer, data = actions[request["action"]](request, payload)
        except Failure as error:
            answer, data = {"error": str(error), "document": error.document}, b""
        except Exception as error:
            answer, data = {"error": f"Python failed: {type(error).__name__}: {first_line(error)}", "document": None}, b""
        if answer is None:
            continue
        head = json.dumps(answer).encode()
        out.write(struct.pack("=QQ", len(head), len(data)) + head + data)
        out.flush()
    os._exit(0)


main()
