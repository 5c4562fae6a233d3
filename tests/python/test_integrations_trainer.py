"""transformers.Trainer on sharded models: the histories of the plain one, which uses DDP, and checkpoints that go on."""

import os

import pytest
import torch

import fsdp_cpp as fsdp
import parity
from conftest import each_value
from test_checkpoint import folder  # noqa: F401, a fixture
from test_integrations import STRATEGIES, fresh_accelerate, process_group  # noqa: F401, fixtures

transformers = pytest.importorskip("transformers")

from fsdp_cpp.integrations.trainer import Trainer, TrainerMixin  # noqa: E402

VOCABULARY = 32


def new_model(seed=0, **options):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                                      num_attention_heads=2, pad_token_id=0, **options)
    return transformers.LlamaForCausalLM(config)


def rows(count=24):
    """Makes as many labels in each row as its number says: batches of ranks differ in how many tokens count."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for index in range(count):
        tokens = torch.randint(1, VOCABULARY, (8,), generator=generator)
        labels = tokens.clone()
        labels[:index % 6] = -100
        made.append({"input_ids": tokens, "labels": labels})
    return made


def arguments(output, **options):
    return transformers.TrainingArguments(**{**dict(
        output_dir=str(output), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4, learning_rate=1e-2,
        adam_beta2=0.95, adam_epsilon=1e-3, weight_decay=0.1, max_grad_norm=0.5, logging_steps=1, save_strategy="no",
        eval_strategy="steps", eval_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False), **options})


def made(kind, output, model=None, shard_options=None, **options):
    ours = {} if shard_options is None else {"shard_options": shard_options}
    return kind(model=model or new_model(), args=arguments(output, **options), train_dataset=rows(), eval_dataset=rows(6), **ours)


def history(trainer):
    """[(loss, norm, rate) of every step], [loss of every evaluation]"""
    logs = trainer.state.log_history
    return ([[log["loss"], log["grad_norm"], log["learning_rate"]] for log in logs if "loss" in log],
            [log["eval_loss"] for log in logs if "eval_loss" in log])


def check_histories(found, expected):
    for ours, theirs in zip(found, expected):
        assert len(theirs) > 0
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), **parity.TOLERANCE)


@pytest.mark.parametrize("strategy,options", [pytest.param("optim", {}, marks=pytest.mark.more), ("optim_grads_params", {}),
                                              pytest.param("optim", {"optim": "adagrad"}, marks=pytest.mark.more),
                                              pytest.param("optim", {"average_tokens_across_devices": False}, marks=pytest.mark.more),
                                              ("optim_grads_params", {"max_grad_norm": 0.0, "gradient_accumulation_steps": 1})],
                         ids=["optim", "optim_grads_params", "adagrad", "tokens", "unclipped"])
def test_the_history_is_that_of_the_plain_trainer(world, folder, strategy, options):  # noqa: F811
    plain, ours = made(transformers.Trainer, folder, **options), made(Trainer, folder, shard_options={"strategy": strategy}, **options)
    plain.train()
    ours.train()
    check_histories(history(ours), history(plain))
    parity.compare_weights(plain.model, ours.model)
    assert fsdp.is_sharded(ours.model)
    losses = [loss for loss, _, _ in history(ours)[0]]
    assert max(losses) - min(losses) > 0.01, "it learns, or the test proves nothing"


def test_adamw_is_made_of_the_arguments(world, folder):  # noqa: F811
    trainer = made(Trainer, folder)
    optimizer = trainer.create_optimizer()
    assert type(optimizer) is fsdp.AdamW and len(optimizer.param_groups) == 2
    decays, others = optimizer.param_groups
    assert (decays["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert (decays["lr"], decays["betas"], decays["eps"]) == (1e-2, (0.9, 0.95), 1e-3)
    norms = {id(parameter) for name, parameter in trainer.model.named_parameters() if "norm" in name}
    assert {id(parameter) for parameter in others["params"]} == norms


def test_what_is_saved_is_what_transformers_loads(world, folder):  # noqa: F811
    trainer = made(Trainer, folder, eval_strategy="no")
    trainer.train()
    trainer.save_model(f"{folder}/saved")
    world.barrier()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/saved")
    whole = fsdp.state_dict(trainer.model, on_all_ranks=True)
    assert set(whole) == set(loaded.state_dict()) and all(torch.equal(whole[name], value) for name, value in loaded.state_dict().items())
    assert any(not torch.equal(whole[name], value) for name, value in new_model().state_dict().items()), "it has learnt"


@each_value(strategy=STRATEGIES, once=1)
def test_a_run_resumes_with_the_losses_of_the_undisturbed_one(world, folder, strategy):  # noqa: F811
    options = dict(shard_options={"strategy": strategy}, save_strategy="steps", save_steps=2)
    whole = made(Trainer, folder, **options)
    whole.train()
    resumed = made(Trainer, folder, model=new_model(seed=5), **options)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    assert history(resumed) == history(whole), "bit for bit"
    assert os.path.isfile(f"{folder}/checkpoint-2/model.safetensors") and not os.path.exists(f"{folder}/checkpoint-2/optimizer.pt")


def test_the_best_model_is_loaded_at_the_end(world, folder):  # noqa: F811
    # Losses fall, so with the highest as the best an early checkpoint is loaded, whatever the ranks.
    trainer = made(Trainer, folder, save_strategy="steps", save_steps=1, eval_steps=1, load_best_model_at_end=True,
                   metric_for_best_model="loss", greater_is_better=True)
    trainer.train()
    losses = history(trainer)[1]
    assert max(losses) > losses[-1] + 0.01, "the best one is not the last one, or the test proves nothing"
    assert trainer.evaluate()["eval_loss"] == pytest.approx(max(losses), rel=1e-5)


def test_weights_alone_are_loaded_from_a_checkpoint_without_shards(world, folder):  # noqa: F811
    made(Trainer, folder, save_strategy="steps", save_steps=2, save_only_model=True, eval_strategy="no", max_steps=2).train()
    assert not os.path.exists(f"{folder}/checkpoint-2/sharded_0")
    trainer = made(Trainer, folder, model=new_model(seed=5), eval_strategy="no")
    trainer._load_from_checkpoint(f"{folder}/checkpoint-2")
    saved = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/checkpoint-2").state_dict()
    whole = fsdp.state_dict(trainer.model, on_all_ranks=True)
    assert all(torch.equal(whole[name], value) for name, value in saved.items())


def test_adapters_are_trained_and_saved(world, folder):  # noqa: F811
    peft = pytest.importorskip("peft")

    def adapted():
        model = new_model()
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))

    plain, ours = made(transformers.Trainer, folder, model=adapted()), made(Trainer, folder, model=adapted())
    plain.train()
    ours.train()
    check_histories(history(ours), history(plain))
    ours.save_model(f"{folder}/adapter")
    world.barrier()
    loaded = peft.PeftModel.from_pretrained(new_model(), f"{folder}/adapter").state_dict()
    whole = fsdp.state_dict(ours.model, on_all_ranks=True)
    assert all(torch.equal(whole[name], value) for name, value in loaded.items() if "lora_" in name)


def test_sft_trainer_of_trl_learns_what_the_plain_one_learns(world, folder):  # noqa: F811
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    tokenizers = pytest.importorskip("tokenizers")
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    class SFTTrainer(TrainerMixin, trl.SFTTrainer):
        pass

    words = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")), unk_token="w0", pad_token="w0",
        eos_token="w1")
    data = datasets.Dataset.from_list([{"input_ids": row["input_ids"].tolist()[:4 + index % 5]} for index, row in enumerate(rows())])
    plain_arguments = arguments(folder, eval_strategy="no").to_dict()
    args = trl.SFTConfig(**{name: plain_arguments[name] for name in (
        "output_dir", "per_device_train_batch_size", "gradient_accumulation_steps", "max_steps", "learning_rate", "adam_epsilon",
        "max_grad_norm", "logging_steps", "save_strategy", "report_to", "use_cpu", "disable_tqdm", "dataloader_pin_memory")},
        bf16=False, gradient_checkpointing=False)
    # Its loss reads lm_head.weight in the model's own forward, so the head belongs to the model's unit.
    options = {"units": LlamaDecoderLayer}
    losses = []
    for kind, ours in ((trl.SFTTrainer, {}), (SFTTrainer, {"shard_options": options})):
        trainer = kind(model=new_model(), args=args, train_dataset=data, processing_class=tokenizer, **ours)
        trainer.train()
        losses.append([[log["loss"], log["grad_norm"]] for log in trainer.state.log_history if "loss" in log])
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), **parity.TOLERANCE)
