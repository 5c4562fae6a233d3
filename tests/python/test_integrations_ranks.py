"""Runs of accelerate, Trainer and EMA that begin on one number of ranks go on on another, with the losses of undisturbed ones.

    start_ranks.py 2 python test_integrations_ranks.py OUTPUT [FROM]      runs all three, from the beginning or from FROM's middle
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fsdp_cpp as fsdp
import parity
import small_models as small

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from fsdp_cpp.ema import EMA  # noqa: E402
from test_integrations import Accelerator, fresh_accelerate, process_group  # noqa: E402, F401, fixtures
from test_integrations_trainer import history, made, Trainer  # noqa: E402

START_RANKS = pathlib.Path(__file__).parents[1] / "processes" / "start_ranks.py"
RANKS = 2
STEPS = 6


def accelerate_run(world, output, source):
    """{step: mean loss of all ranks}; global batches are those of one rank, whatever the number of ranks."""
    torch.manual_seed(7)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, step_scheduler_with_optimizer=False,
                              shard_options={"strategy": "optim"})
    model = accelerator.prepare(small.Stack())
    optimizer = fsdp.AdamW(model, lr=1e-2, eps=1e-3)
    data = torch.randn(STEPS * 8, small.WIDTH, generator=torch.Generator().manual_seed(5))
    optimizer, schedule, loader = accelerator.prepare(
        optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8), DataLoader(TensorDataset(data), batch_size=4 // world.size))
    ema = EMA(model, decay=0.5)
    accelerator.register_for_checkpointing(ema)
    losses, begin = {}, 0
    if source is not None:
        accelerator.load_state(f"{source}/state")
        begin = STEPS // 2
    for index, (x,) in enumerate(accelerator.skip_first_batches(loader, 2 * begin), 2 * begin):
        with accelerator.accumulate(model):
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses[index] = accelerator.gather(loss.detach().reshape(1)).mean().item()
        if accelerator.sync_gradients:
            schedule.step()
            ema.update()
        if index + 1 == STEPS and source is None:
            accelerator.save_state(f"{output}/state")
    with ema.applied(), torch.no_grad():
        averaged = model(data[:4]).square().mean().item()
    return [losses[index] for index in sorted(losses)][-STEPS:] + [averaged]


def trainer_run(world, output, source):
    trainer = made(Trainer, f"{output}/trainer", per_device_train_batch_size=4 // world.size, max_steps=STEPS, save_strategy="steps",
                   save_steps=STEPS // 2, shard_options={"strategy": "optim_grads_params"})
    trainer.train(resume_from_checkpoint=source and f"{source}/trainer/checkpoint-{STEPS // 2}")
    return history(trainer)


def run(world, output, source=None):
    results = {}
    for name, part in (("accelerate", accelerate_run), ("trainer", trainer_run)):
        results[name] = part(world, output, source)
        accelerate.state.AcceleratorState._reset_state(True)  # both are programs of their own
        accelerate.state.GradientState._reset_state()
    return results


def run_on_two_ranks(output, *source):
    subprocess.run([sys.executable, START_RANKS, str(RANKS), sys.executable, __file__, output, *source], check=True, timeout=200)
    return json.loads((pathlib.Path(output) / "result.json").read_text())


def check_equal(found, expected, *, evaluations):
    pairs = [(found["accelerate"], expected["accelerate"]), (found["trainer"][0], expected["trainer"][0])]
    if evaluations:  # after the middle: those before came with the checkpoint
        pairs.append((found["trainer"][1][1:], expected["trainer"][1][1:]))
    for ours, theirs in pairs:
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), **parity.TOLERANCE)


@pytest.mark.more
def test_runs_go_on_on_another_number_of_ranks(world, tmp_path):
    if world.size > 1:
        pytest.skip("starts ranks itself")
    one, two, from_one, from_two = (str(tmp_path / name) for name in ("one", "two", "from_one", "from_two"))
    on_one, on_two = run(world, one), run_on_two_ranks(two)
    assert len(on_one["accelerate"]) == STEPS + 1 and len(on_one["trainer"][0]) == STEPS
    # The plain Trainer, too, has other evaluation losses on other ranks: they are means of batches' means.
    check_equal(on_two, on_one, evaluations=False)
    check_equal(run(world, from_two, source=two), on_one, evaluations=True)
    check_equal(run_on_two_ranks(from_one, one), on_two, evaluations=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.makedirs(sys.argv[1], exist_ok=True)
    result = run(fsdp.world(), *sys.argv[1:])
    if fsdp.world().rank == 0:
        (pathlib.Path(sys.argv[1]) / "result.json").write_text(json.dumps(result))
