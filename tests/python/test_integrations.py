"""accelerate's loop on sharded models: numbers of plain torch on all ranks' data, states that come back, and errors in words."""

import copy
import os
import tempfile

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import fsdp_cpp as fsdp
import parity
import small_models as small
from conftest import each_value
from test_checkpoint import folder  # noqa: F401, a fixture
from test_docs import DOCS, python_blocks, run

accelerate = pytest.importorskip("accelerate")
safetensors = pytest.importorskip("safetensors.torch")

from fsdp_cpp import shard  # noqa: E402
from fsdp_cpp.integrations.accelerate import Accelerator  # noqa: E402

STRATEGIES = ["optim", "optim_grads_params"]
ROWS, PER_BATCH, PER_STEP = 24, 2, 2
ADAMW = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)
PAGE = DOCS / "integrations.md"


@pytest.fixture(scope="module", autouse=True)
def process_group(world, request):
    """torch.distributed for accelerate, which would meet at the launcher's port once per module."""
    if "RANK" not in os.environ or torch.distributed.is_initialized():
        yield
        return
    path = os.path.join(tempfile.gettempdir(), f"fsdp_cpp_{os.environ['MASTER_PORT']}_{request.module.__name__}")
    store = torch.distributed.FileStore(path, world.size)
    torch.distributed.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def fresh_accelerate(process_group):
    """accelerate keeps its state for the whole process."""
    yield
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


def rows():
    return torch.randn(ROWS, small.WIDTH, generator=torch.Generator().manual_seed(5))


def batches_of_ranks(world):
    """[microbatch][rank], as accelerate hands them out."""
    split = rows().split(PER_BATCH)
    return [split[first:first + world.size] for first in range(0, len(split), world.size)]


def loss_of(model, x):
    return model(x).square().mean()


def half_every_step(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9 ** step)


class Job:
    """A program as its author wrote it for accelerate."""

    def __init__(self, kind="torch", strategy="optim_grads_params", seed=7, **options):
        torch.manual_seed(seed)
        model = small.Stack()
        self.plain = copy.deepcopy(model)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PER_STEP, shard_options={"strategy": strategy, **options})
        loader = DataLoader(TensorDataset(rows()), batch_size=PER_BATCH)
        if kind == "torch":
            optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
            # In this order: an optimizer and a scheduler from before the model was sharded.
            self.optimizer, self.schedule, self.model, self.loader = self.accelerator.prepare(optimizer, half_every_step(optimizer),
                                                                                              model, loader)
        else:
            self.model = self.accelerator.prepare(model)
            optimizer = fsdp.AdamW(self.model, **ADAMW)
            self.optimizer, self.schedule, self.loader = self.accelerator.prepare(optimizer, half_every_step(optimizer), loader)

    def train(self, batches=None):
        """[loss of each microbatch], [norm of each step]"""
        losses, norms = [], []
        for (x,) in self.loader if batches is None else batches:
            with self.accelerator.accumulate(self.model):
                loss = loss_of(self.model, x)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norms.append(self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5))
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
                losses.append(loss.detach())
        return torch.stack(losses), torch.stack(norms)


def plain_training(world, model):
    """Trains on one process, with the batches of all ranks: losses of this rank's, and norms."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    schedule = half_every_step(optimizer)
    losses, norms = [], []
    for index, batches in enumerate(batches_of_ranks(world)):
        for rank, x in enumerate(batches):
            loss = loss_of(model, x)
            (loss / world.size / PER_STEP).backward()
            if rank == world.rank:
                losses.append(loss.detach())
        if (index + 1) % PER_STEP == 0:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
            for _ in range(world.size):  # accelerate: a schedule counts batches of one process
                schedule.step()
    return torch.stack(losses), torch.stack(norms)


@each_value(strategy=STRATEGIES, kind=["torch", "ours"])
def test_a_loop_of_accelerate_learns_what_plain_torch_learns(world, kind, strategy):
    job = Job(kind, strategy)
    before = copy.deepcopy(job.plain)
    losses, norms = job.train()
    expected_losses, expected_norms = plain_training(world, job.plain)
    assert torch.equal(losses[:PER_STEP], expected_losses[:PER_STEP]), "losses before the first step have the same bits"
    torch.testing.assert_close(losses, expected_losses, **parity.TOLERANCE)
    torch.testing.assert_close(norms, expected_norms, **parity.TOLERANCE)
    assert (norms > 0.5).any(), "gradients were clipped"
    parity.compare_weights(job.plain, job.model)
    assert fsdp.is_sharded(job.model) and (job.plain.scale - before.scale).abs().max() > 1e-3, "weights have moved"


def test_all_but_the_last_microbatch_of_a_cycle_are_announced(world, monkeypatch):
    opened = []
    original = shard.no_sync
    monkeypatch.setattr(shard, "no_sync", lambda model: opened.append(model) or original(model))
    job = Job(strategy="optim")
    losses, norms = job.train()
    assert len(opened) == len(losses) - len(norms) > 0 and all(model is job.model for model in opened)


def test_a_model_that_is_sharded_already_is_taken(world):
    accelerator = Accelerator(cpu=True)
    model = fsdp.fully_shard(small.Stack(), strategy="optim")
    optimizer = fsdp.AdamW(model, lr=1e-2)
    prepared, prepared_optimizer = accelerator.prepare(model, optimizer)
    assert prepared is model and prepared_optimizer.optimizer is optimizer
    assert accelerator.unwrap_model(model) is model and accelerator.prepare(model) is model
    with pytest.raises(fsdp.UsageError, match="sharded already"):
        fsdp.fully_shard(model)


def test_evaluation_mode_leaves_a_model_plain(world):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare_model(small.Stack(), evaluation_mode=True)
    assert type(model) is small.Stack and not fsdp.is_sharded(model)


def test_the_parameters_of_an_optimizer_can_be_clipped(world):
    job = Job()
    x = rows()[2 * world.rank:2 * world.rank + 2]
    loss_of(job.model, x).backward()
    parts = [parameter for group in job.optimizer.param_groups for parameter in group["params"]]
    norm = job.accelerator.clip_grad_norm_(parts, 1e-3)
    parity.plain_step(job.plain, loss_of, batches_of_ranks(world)[0])
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(job.plain.parameters(), 1e-3), **parity.TOLERANCE)
    parity.compare_gradients(job.plain, job.model)


def test_whole_weights_are_on_rank_0(world, folder):  # noqa: F811
    job = Job("ours")
    job.train()
    whole = job.accelerator.get_state_dict(job.model)
    job.accelerator.save_model(job.model, folder)
    world.barrier()
    saved = safetensors.load_file(f"{folder}/model.safetensors")
    if world.rank == 0:
        plain_training(world, job.plain)
        assert list(whole) == list(job.plain.state_dict())
        for name, value in job.plain.state_dict().items():
            torch.testing.assert_close(whole[name], value, **parity.TOLERANCE)
            assert torch.equal(whole[name], saved[name])
    else:
        assert whole == {}


@each_value(strategy=STRATEGIES, kind=["torch", "ours"])
def test_a_run_goes_on_from_its_state_bit_for_bit(world, folder, kind, strategy):  # noqa: F811
    job = Job(kind, strategy)
    job.train()
    job.accelerator.save_state(folder)
    world.barrier()
    expected = job.train()

    other = Job(kind, strategy, seed=8)
    other.accelerator.load_state(folder)
    found = other.train()
    for ours, theirs in zip(found, expected):
        assert torch.equal(ours, theirs)


def test_random_states_come_back(world, folder):  # noqa: F811
    job = Job("ours")
    torch.manual_seed(100 + world.rank)
    job.accelerator.save_state(folder)
    world.barrier()
    expected = torch.rand(3)
    job.accelerator.load_state(folder)
    assert torch.equal(torch.rand(3), expected)


def test_bf16_computes_in_bf16_and_updates_in_fp32(world):
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    plain = small.Stack()
    model = copy.deepcopy(plain)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = rows()[2 * world.rank:2 * world.rank + 2]
    output = model(x)
    assert output.dtype == torch.float32 and model.first.weight.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(output.detach(), plain(x).float().detach(), rtol=0.05, atol=0.05)  # bf16 norms: 8 bits
    mains = {each.name: each.main_weight for each in shard.handle(model).parameters()}
    assert all(main.dtype == torch.float32 for main in mains.values())
    begin = {each.name: each.begin for each in shard.handle(model).parameters()}
    for name, main in mains.items():
        whole = plain.get_parameter(name).detach().flatten()
        assert torch.equal(main, whole[begin[name]:begin[name] + main.numel()]), "main weights are not rounded"
    accelerator.backward(output.square().mean())
    optimizer.step()
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False)(x.bfloat16()).dtype == torch.bfloat16


def test_clipping_a_part_of_a_model_is_refused(world):
    job = Job()
    loss_of(job.model, rows()[:2]).backward()
    with pytest.raises(fsdp.UsageError, match="1 trainable parameters less"):
        job.accelerator.clip_grad_norm_(list(job.model.parameters())[1:], 1.0)
    with pytest.raises(fsdp.UsageError, match="norm_type 1"):
        job.accelerator.clip_grad_norm_(job.model.parameters(), 1.0, norm_type=1)


def test_the_python_of_the_page_runs(world, folder, monkeypatch):  # noqa: F811
    pytest.importorskip("transformers")
    monkeypatch.chdir(folder)
    names = {}
    for block in python_blocks(PAGE):
        run(PAGE, block, names)
    assert len(names) > 10, "the page has blocks"
