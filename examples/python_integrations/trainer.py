"""transformers.Trainer with a sharded model, made here and small: training, evaluation, checkpoints, and a model to load.

    python trainer.py runs/trainer                                  or on two ranks, which go on with its last checkpoint:
    torchrun --nproc-per-node 2 trainer.py runs/trainer --steps 60
"""

import argparse

import torch
import transformers
from transformers.trainer_utils import get_last_checkpoint

from fsdp_cpp.integrations.trainer import Trainer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("output", help="folder of checkpoints, and of the trained model")
parser.add_argument("--steps", type=int, default=30)
options = parser.parse_args()

torch.manual_seed(0)  # every rank builds the same weights
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                                               num_attention_heads=4))
rows = [{"input_ids": row, "labels": row} for row in (torch.arange(16) + torch.arange(64)[:, None]) % 16]  # each token, then the next
args = transformers.TrainingArguments(
    output_dir=options.output, max_steps=options.steps, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=1e-2,
    weight_decay=0.1, max_grad_norm=1.0, logging_steps=10, eval_strategy="steps", eval_steps=10, save_steps=30, save_total_limit=2,
    report_to=[], use_cpu=not torch.cuda.is_available())
trainer = Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[:8], shard_options={"strategy": "optim_grads_params"})
trainer.train(resume_from_checkpoint=get_last_checkpoint(options.output))
trainer.save_model()  # whole, from rank 0

if trainer.is_world_process_zero():
    trained = transformers.AutoModelForCausalLM.from_pretrained(options.output)
    print("after 3, 4, 5 comes", trained.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=5, do_sample=False, pad_token_id=0)[0, 3:].tolist())
