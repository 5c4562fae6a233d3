"""Small tokenizers of the usual kinds, and chat templates in the manner of the common models, for tests."""

import json
import random

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = ["<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>",
           "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>", "[INST]", "[/INST]", "<bos>", "<eos>", "<start_of_turn>",
           "<end_of_turn>"]
WORDS = ("the rank of a tensor is the number of its axes and every shard has 16 or 17 rows , naive caf\u00e9 stra\u00dfe "
         "\u65e5\u672c\u8a9e \u0440\u0443\u0441\u0441\u043a\u0438\u0439 \U0001f680 user assistant system model one two three").split()


def sentences(count, seed=1):
    """Text with words, newlines, several scripts and double spaces, the same on every machine."""
    draw = random.Random(seed)
    lines = [" ".join(draw.choices(WORDS, k=draw.randint(1, 12))) + draw.choice([".", "", "  ", "\t!"]) for _ in range(count)]
    return "\n".join(lines) + "\n"


def byte_level_bpe(special):
    """GPT-2, Llama 3 and Qwen have this form."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    return tokenizer, trainer


def metaspace_unigram(special):
    """SentencePiece models have this form: spaces are part of the words, the first word gets one."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=["<unk>", *special], unk_token="<unk>",
                                      show_progress=False)
    return tokenizer, trainer


def word_piece(special):
    """BERT has this form, lower case."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", *special], show_progress=False)
    return tokenizer, trainer


KINDS = {"bpe": byte_level_bpe, "unigram": metaspace_unigram, "wordpiece": word_piece}


def make_tokenizer(folder, kind="bpe", special=("</s>",), bos=None, config=None, cut=None, texts=None, vocabulary=None):
    """Trains a tokenizer, writes its files to the folder, and returns it; `cut`: the expression that finds words."""
    tokenizer, trainer = KINDS[kind](list(special))
    if cut:
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(tokenizers.Regex(cut), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    if vocabulary:
        trainer.vocab_size = vocabulary
    tokenizer.train_from_iterator(texts or [sentences(300)], trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}))
    return tokenizer


# Each: the special tokens of the model, and a template that frames turns as the model's own does.
TEMPLATES = {
    "llama3": ({"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}, """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + strftime_now('%d %b %Y') + '\\n\\n' }}
{{- system_message + '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""),
    "qwen2.5": ({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}, """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools' }}
    {%- for tool in tools %}
        {{- '\\n' + tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""),
    # Empty thoughts stand before the last answer alone.
    "qwen3": ({"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}, """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and loop.index0 > ns.last %}
        {{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + message.content.lstrip('\\n') + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""),
    "mistral": ({"bos_token": "<s>", "eos_token": "</s>"}, """\
{{ bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate between user and assistant') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- else %}
        {%- generation %}{{- ' ' + message['content'] + eos_token }}{%- endgeneration %}
    {%- endif %}
{%- endfor %}
"""),
    "gemma": ({"bos_token": "<bos>", "eos_token": "<eos>"}, """\
{{ bos_token }}
{%- for message in messages %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}
"""),
}


def make_chat_tokenizer(folder, model, **more):
    tokens, template = TEMPLATES[model]
    return make_tokenizer(folder, "bpe", SPECIAL, bos=tokens.get("bos_token"), config={**tokens, "chat_template": template}, **more)
