"""Uses of models of transformers: adapters, generation, recomputation, masks, and models that begin on meta."""

import copy

import pytest
import torch

import fsdp_cpp as fsdp
import parity
from conftest import each_value, every_strategy, STRATEGIES
from test_models import VOCABULARY, language_loss, llama, t5, tokens

transformers = pytest.importorskip("transformers")


def with_adapters(peft):
    model, _, _ = llama()
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0)
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():  # the second factor begins as zeros, which would hide the first one's gradient
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return adapted


@every_strategy
def test_adapters_learn_on_a_frozen_base(world, strategy):
    adapted = with_adapters(pytest.importorskip("peft"))
    frozen = {name: p.detach().clone() for name, p in adapted.named_parameters() if not p.requires_grad}
    sharded = parity.check(world, adapted, language_loss, tokens, strategy=strategy)
    trainable = [each for each in fsdp.shard.handle(sharded).parameters() if each.is_trainable]
    assert len(trainable) == 3 * 3 * 2 and all("lora_" in each.name for each in trainable)
    with fsdp.unshard(sharded):
        for name, parameter in sharded.named_parameters():
            assert name not in frozen or torch.equal(parameter, frozen[name]), name


def test_adapters_alone_are_saved_for_peft(world, tmp_path):
    peft = pytest.importorskip("peft")
    adapted = with_adapters(peft)
    expected = peft.get_peft_model_state_dict(adapted)
    sharded = fsdp.fully_shard(copy.deepcopy(adapted))
    whole = fsdp.state_dict(sharded)
    if world.rank == 0:
        found = peft.get_peft_model_state_dict(sharded, state_dict=whole)
        assert set(found) == set(expected) and all(torch.equal(found[name], expected[name]) for name in expected)


@each_value(make=[llama, t5], strategy=STRATEGIES, once=2)
def test_generates_the_tokens_of_the_plain_model(world, make, strategy):
    plain, _, _ = make()
    plain.eval()
    prompt = torch.randint(1, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(3))
    options = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, pad_token_id=0,
                   eos_token_id=None, output_logits=True, return_dict_in_generate=True)
    expected = plain.generate(prompt, **options)
    found = fsdp.fully_shard(copy.deepcopy(plain), strategy=strategy).generate(prompt, **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert len(found.logits) == 12
    for ours, theirs in zip(found.logits, expected.logits):
        torch.testing.assert_close(ours, theirs, **parity.TOLERANCE)


def test_generates_between_steps(world):
    model, make_batch, _ = llama()
    sharded = fsdp.fully_shard(model)
    optimizer = fsdp.AdamW(sharded, lr=1e-2)
    batch = make_batch(torch.Generator().manual_seed(world.rank))
    # Every rank generates as many tokens: a rank that stopped before the others would leave their gathers waiting.
    options = dict(min_new_tokens=6, max_new_tokens=6, do_sample=False, pad_token_id=0)
    for _ in range(2):
        sharded.train()
        language_loss(sharded, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        sharded.eval()
        ours = sharded.generate(batch[:, :4], **options)
        plain, _, _ = llama()
        plain.load_state_dict(fsdp.state_dict(sharded, on_all_ranks=True))
        assert torch.equal(ours, plain.eval().generate(batch[:, :4], **options))


@each_value(reentrant=[False, True], strategy=STRATEGIES, once=2)
def test_recomputes_as_transformers_does(world, strategy, reentrant):
    model, make_batch, loss_of = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    model.train()
    sharded = parity.check(world, model, loss_of, make_batch, strategy=strategy)
    assert sharded.is_gradient_checkpointing


def test_recomputation_enabled_after_sharding(world):
    model, make_batch, loss_of = llama()
    sharded = fsdp.fully_shard(copy.deepcopy(model))
    sharded.gradient_checkpointing_enable()
    sharded.train()
    for batches in parity.batches_of(world, make_batch, 1):
        parity.plain_step(model, loss_of, batches)
        loss_of(sharded, batches[world.rank]).backward()
    parity.compare_gradients(model, sharded)


def test_dropout_follows_train_and_eval(world):
    model, make_batch, _ = llama(attention_dropout=0.5)
    sharded = fsdp.fully_shard(copy.deepcopy(model))
    batch = make_batch(torch.Generator().manual_seed(1))

    def logits(of, seed):
        torch.manual_seed(seed)
        with torch.no_grad():
            return of(batch).logits

    for mode in (True, False, True):
        model.train(mode)
        sharded.train(mode)
        assert torch.equal(logits(sharded, 1), logits(model, 1))
        assert torch.equal(logits(sharded, 1), logits(sharded, 2)) != mode


def test_hidden_states_and_masks(world):
    def padded(generator):
        batch = tokens(generator)
        mask = torch.ones_like(batch)
        mask[0, :5] = 0
        return {"input_ids": batch, "attention_mask": mask, "labels": batch.masked_fill(mask == 0, -100)}

    def loss_of(model, batch):
        output = model(**batch, output_hidden_states=True, use_cache=False)
        assert isinstance(output, transformers.utils.ModelOutput) and len(output.hidden_states) == 4
        # States inside the model have gradients of their own, too.
        return output.loss + output["hidden_states"][1].square().mean() + output.hidden_states[-1].sin().mean()

    model, _, _ = llama()
    parity.check(world, model, loss_of, padded)


def test_keys_and_values_are_returned_and_taken(world):
    model, make_batch, _ = llama()
    model.eval()
    batch = make_batch(torch.Generator().manual_seed(1))
    sharded = fsdp.fully_shard(copy.deepcopy(model))
    with torch.no_grad():
        expected = model(batch).logits[:, -1:]
        first = sharded(batch[:, :-1], use_cache=True)
        second = sharded(batch[:, -1:], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(second.logits, expected, **parity.TOLERANCE)


def test_masks_of_a_recorded_step_are_those_of_eager_ones(monkeypatch):
    """Recording itself needs a GPU (test_device.py); here transformers is told that a stream records."""
    from transformers import masking_utils
    from transformers.utils import import_utils
    config = llama(attn_implementation="sdpa")[0].config
    masks, positions = [], torch.arange(12)[None]
    before = masking_utils.is_tracing, masking_utils.find_packed_sequence_indices

    def step():
        masks.append(masking_utils.create_causal_mask(config, torch.zeros(2, 12, 4), None, past_key_values=None, position_ids=positions))

    def record(is_so):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_so)

    run = fsdp.graph._MasksOfEagerSteps(step)
    record(False)
    run()
    record(True)
    assert import_utils.is_cuda_stream_capturing()
    step()
    run()
    assert masks[0] is None and masks[1] is not None and masks[2] is None
    positions = torch.cat((torch.arange(5), torch.arange(7)))[None]
    with pytest.raises(RuntimeError, match="recorded for one text in each"):
        run()
    assert before == (masking_utils.is_tracing, masking_utils.find_packed_sequence_indices)
    record(False)
    run()  # eager again, and packed
    record(True)
    run()
    assert torch.equal(masks[-2], masks[-1]) and not masks[-1][0, 0, 6, 2]


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_on_meta_is_initialised_in_shards(world, tied):
    """By its own _init_weights()."""
    with torch.device("meta"):
        model, make_batch, loss_of = llama(initializer_range=0.05, tie_word_embeddings=tied)
    sharded = fsdp.fully_shard(model)
    state = fsdp.state_dict(sharded, on_all_ranks=True)
    for name, value in state.items():
        if "norm" in name:
            assert torch.equal(value, torch.ones_like(value)), name
        else:
            assert value.std().item() == pytest.approx(0.05, rel=0.1) and abs(value.mean().item()) < 0.01, name
    assert torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"]) == tied
    plain, _, _ = llama(tie_word_embeddings=tied)
    plain.load_state_dict(state)
    batch = make_batch(torch.Generator().manual_seed(1))
    assert torch.equal(sharded(batch).logits, plain(batch).logits), "buffers, too, are as in a model built on the CPU"
    loss_of(sharded, batch).backward()
