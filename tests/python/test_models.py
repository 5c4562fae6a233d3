"""Unchanged models of transformers learn the same, sharded and plain."""

import pytest
import torch

import fsdp_cpp as fsdp
import parity
from conftest import each_value, STRATEGIES

transformers = pytest.importorskip("transformers")

VOCABULARY = 64


def tokens(generator):
    return torch.randint(VOCABULARY, (2, 12), generator=generator)


def language_loss(model, batch):
    return model(input_ids=batch, labels=batch, use_cache=False).loss


def llama(**changes):
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
                                      num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, **changes)
    return transformers.LlamaForCausalLM(config), tokens, language_loss


def llama_tied():
    return llama(tie_word_embeddings=True)


def llama_classifier():
    """Its root owns a head beside a child called "model", which is a unit, too."""
    plain, _, _ = llama()
    plain.config.num_labels, plain.config.pad_token_id = 3, 0
    classifier = transformers.LlamaForSequenceClassification(plain.config)

    def labelled(generator):
        return tokens(generator), torch.randint(3, (2,), generator=generator)

    return classifier, labelled, lambda model, batch: model(input_ids=batch[0], labels=batch[1], use_cache=False).loss


def gpt2():
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0,
                                     embd_pdrop=0.0, attn_pdrop=0.0)
    return transformers.GPT2LMHeadModel(config), tokens, language_loss


def qwen3_moe():
    config = transformers.Qwen3MoeConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, moe_intermediate_size=16,
                                         num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                                         num_experts=4, num_experts_per_tok=2, max_position_embeddings=32,
                                         output_router_logits=False)
    return transformers.Qwen3MoeForCausalLM(config), tokens, language_loss


def t5():
    config = transformers.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
                                   dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0)
    return transformers.T5ForConditionalGeneration(config), tokens, language_loss


def bamba():
    config = transformers.BambaConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
                                      num_attention_heads=4, num_key_value_heads=2, attn_layer_indices=[1],
                                      mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=8,
                                      max_position_embeddings=32)
    return transformers.BambaForCausalLM(config), tokens, language_loss


def vit():
    config = transformers.ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
                                    image_size=16, patch_size=4, num_labels=5, hidden_dropout_prob=0.0,
                                    attention_probs_dropout_prob=0.0)

    def images(generator):
        return torch.randn(2, 3, 16, 16, generator=generator), torch.randint(5, (2,), generator=generator)

    return (transformers.ViTForImageClassification(config), images,
            lambda model, batch: model(pixel_values=batch[0], labels=batch[1]).loss)


MODELS = {"llama": llama, "llama_tied": llama_tied, "llama_classifier": llama_classifier, "gpt2": gpt2, "qwen3_moe": qwen3_moe,
          "t5": t5, "bamba": bamba, "vit": vit}


@each_value(name=MODELS, strategy=STRATEGIES)
def test_learns_the_same_sharded_and_plain(world, name, strategy):
    model, make_batch, loss_of = MODELS[name]()
    parity.check(world, model, loss_of, make_batch, strategy=strategy)


def test_the_default_units_are_blocks_embedding_head_and_what_holds_them(world):
    model, _, _ = llama()
    fsdp.fully_shard(model)
    assert fsdp.shard.handle(model).unit_names == ["model", "model.embed_tokens", "model.layers.0", "model.layers.1",
                                                   "model.layers.2", "lm_head"]


def test_a_root_with_a_child_called_model_has_a_name_of_its_own(world):
    model, _, _ = llama_classifier()
    fsdp.fully_shard(model)
    names = fsdp.shard.handle(model).unit_names
    assert names[:2] == ["(model)", "model"] and [fsdp.calls.unit_name(each) for each in (model, model.model)] == names[:2]
