#!/usr/bin/env python3
"""Makes a tiny random Llama, as the transformers package saves one.

    make_tiny_llama.py DIRECTORY

Its tokens are bytes (0 to 255) and the end of a document (256), so that it can be trained on text without a tokenizer.
"""

import sys

import torch
import transformers

torch.manual_seed(1)
config = transformers.LlamaConfig(
    vocab_size=257, hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=256)
model = transformers.LlamaForCausalLM(config)
model.save_pretrained(sys.argv[1])
print(f"{sys.argv[1]}: a random Llama of {sum(p.numel() for p in model.parameters()):,} parameters")
