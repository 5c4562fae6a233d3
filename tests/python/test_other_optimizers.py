"""Optimizers of others on parts of main weights: types, groups, schedules, scaled losses, checkpoints, missing gradients."""

import copy
import os

import pytest
import torch

import fsdp_cpp as fsdp
import parity
import small_models as small
from conftest import each_value, STRATEGIES
from test_checkpoint import folder  # noqa: F401, a fixture
from test_forms import loss_of, rows

EVERY_STRATEGY = [*STRATEGIES, "optim+hfsdp", "optim_grads+hfsdp", "optim_grads_params+hfsdp"]
# (main weights, main gradients, wire) of bf16 weights.
POLICIES = {"default": (torch.float32, None, None), "wide": (torch.float32, torch.float32, None),
            "narrow wire": (torch.float32, torch.float32, torch.bfloat16), "all narrow": (None, None, None),
            "wide gradients alone": (None, torch.float32, torch.float32)}


def adamw(parameters):
    # A large eps: where gradients nearly vanish, AdamW would make numbers of their rounding.
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-2, weight_decay=0.1)


class ReferenceStep:
    """A plain bf16 model with fp32 main weights, updated as the types of a policy say."""

    def __init__(self, model, main, grads):
        self.model = model
        self.grads = grads or torch.bfloat16
        self.main = [p.detach().to(main or p.dtype).clone().requires_grad_() for p in model.parameters()]
        self.optimizer = adamw(self.main)

    def step(self, world, batches):
        total = [torch.zeros_like(p, dtype=torch.float32) for p in self.main]
        for batch in batches:
            loss_of(self.model, batch).backward()
            for sum_, parameter in zip(total, self.model.parameters()):
                sum_ += parameter.grad.float()
                parameter.grad = None
        for main, sum_ in zip(self.main, total):
            main.grad = (sum_ / world.size).to(self.grads).to(main.dtype)
        self.optimizer.step()
        with torch.no_grad():
            for parameter, main in zip(self.model.parameters(), self.main):
                parameter.copy_(main)


@each_value(outer=[False, True], policy=POLICIES, strategy=EVERY_STRATEGY)
def test_bf16_models_train_as_plain_ones_do(world, strategy, policy, outer):
    main, grads, wire = POLICIES[policy]
    plain = small.Stack().bfloat16()
    sharded = fsdp.fully_shard(copy.deepcopy(plain), fsdp.mesh(outer=world.size if outer else 1), strategy=strategy, main_storage="separate",
                               main_params=main, main_grads=grads, grad_comm=wire)
    theirs, ours = ReferenceStep(plain, main, grads), fsdp.shard_optimizer(adamw(sharded.parameters()))
    for batches in parity.batches_of(world, lambda generator: rows(generator).bfloat16(), 3):
        theirs.step(world, batches)
        loss_of(sharded, batches[world.rank]).backward()
        ours.step()
        ours.zero_grad()
        assert all(p.grad is None for group in ours.param_groups for p in group["params"]), "casts are dropped after the step"
    # A bf16 wire rounds gradients on their way, by one part in 256; updates are of the size of the rate.
    tolerance = dict(rtol=2e-2, atol=2e-3) if torch.bfloat16 in (wire, grads or torch.bfloat16) else dict(rtol=1e-2, atol=1e-3)
    parity.compare_weights(plain, sharded, tolerance)


def test_gradients_of_the_main_weights_type_are_views(world):
    model = fsdp.fully_shard(small.Stack())
    optimizer = fsdp.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.data_ptr() for group in optimizer.param_groups for p in group["params"]))
    loss_of(model, torch.ones(2, small.WIDTH)).backward()
    own = {each.gradient.data_ptr() for each in fsdp.shard.handle(model).parameters() if each.numel}
    optimizer.step()
    assert seen and set(seen) <= own


def test_groups_can_be_added_and_are_updated(world):
    plain = small.Stack()
    sharded = fsdp.fully_shard(copy.deepcopy(plain))
    optimizers = []
    for model in (plain, sharded):
        optimizer = torch.optim.SGD([{"params": model.blocks.parameters()}], lr=0.1)
        optimizers.append(optimizer if model is plain else fsdp.shard_optimizer(optimizer))
        optimizer.add_param_group({"params": [model.scale, *model.first.parameters()], "lr": 0.3})
    for batches in parity.batches_of(world, rows, 2):
        parity.plain_step(plain, loss_of, batches)
        loss_of(sharded, batches[world.rank]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    parity.compare_weights(plain, sharded)
    head = torch.nn.Linear(2, 2)
    with pytest.raises(fsdp.UsageError, match="do not all belong to one sharded model"):
        optimizers[1].add_param_group({"params": list(head.parameters())})
    with pytest.raises(fsdp.UsageError, match="parameter 'scale' is in a group of the optimizer already"):
        optimizers[1].add_param_group({"params": [sharded.scale]})
    assert len(optimizers[1].param_groups) == 2
    frozen = small.Stack()
    frozen.scale.requires_grad_(False)
    fsdp.fully_shard(frozen).scale.requires_grad_(True)
    with pytest.raises(fsdp.UsageError, match="parameter 'scale' was frozen in fully_shard"):
        fsdp.shard_optimizer(torch.optim.SGD(frozen.parameters(), lr=0.1))
    with pytest.raises(fsdp.UsageError, match=r"add_param_group\(\) cannot add"):
        fsdp.SGD(sharded).add_param_group({"params": list(head.parameters())})


FORMS = {"named_parameters": lambda model: model.named_parameters(), "a tensor per group": lambda model: [
    {"params": model.scale}, {"params": [p for p in model.parameters() if p is not model.scale]}], "named groups": lambda model: [
    {"params": list(model.named_parameters()), "lr": 0.02}]}


@each_value(form=FORMS, ours=[True, False])
def test_every_form_of_params_that_torch_takes(world, form, ours):
    plain = small.Stack()
    sharded = fsdp.fully_shard(copy.deepcopy(plain))
    theirs = torch.optim.AdamW(FORMS[form](plain), lr=0.01)
    make = fsdp.AdamW if ours else lambda params, lr: fsdp.shard_optimizer(torch.optim.AdamW(params, lr=lr))
    optimizer = make(FORMS[form](sharded), lr=0.01)
    for batches in parity.batches_of(world, rows, 2):
        parity.plain_step(plain, loss_of, batches)
        loss_of(sharded, batches[world.rank]).backward()
        for each in (theirs, optimizer):
            each.step()
            each.zero_grad()
    parity.compare_weights(plain, sharded, dict(rtol=1e-4, atol=1e-4))  # AdamW makes numbers of what is left of gradients near zero


CYCLES = {"AdamW": (lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3), lambda m: fsdp.AdamW(m, lr=1e-2, eps=1e-3)),
          "SGD": (lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), lambda m: fsdp.SGD(m, lr=1e-2, momentum=0.9))}


@pytest.mark.parametrize("kind", CYCLES)
def test_schedules_that_cycle_momentum_drive_ours(world, kind):
    plain = small.Stack()
    sharded = fsdp.fully_shard(copy.deepcopy(plain))
    theirs, ours = CYCLES[kind][0](plain.parameters()), CYCLES[kind][1](sharded)
    schedules = [torch.optim.lr_scheduler.OneCycleLR(each, max_lr=1e-2, total_steps=12) for each in (theirs, ours)]
    for batches in parity.batches_of(world, rows, 10):
        parity.plain_step(plain, loss_of, batches)
        loss_of(sharded, batches[world.rank]).backward()
        for optimizer, schedule in zip((theirs, ours), schedules):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    parity.compare_weights(plain, sharded)


def test_a_momentum_without_memory_is_refused(world):
    model = fsdp.fully_shard(small.Stack())
    optimizer = fsdp.SGD(model, lr=0.1)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
    loss_of(model, torch.ones(2, small.WIDTH)).backward()
    with pytest.raises(fsdp.UsageError, match="SGD's momentum is to become 0.95, but the optimizer was made without one"):
        optimizer.step()
    model = fsdp.fully_shard(small.Stack())
    fsdp.AdamW([{"params": list(model.parameters()), "betas": [0.9, 0.999]}])  # as JSON and YAML have it


class WithUnused(small.Stack):
    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Linear(small.WIDTH, small.WIDTH)
        self.sometimes = torch.nn.Linear(small.WIDTH, small.WIDTH)

    def forward(self, x, uses=False):
        x = super().forward(x)
        return x + self.sometimes(x) if uses else x


MISSING = {"fsdp.AdamW": lambda m: fsdp.AdamW(m, lr=0.1, weight_decay=0.5), "torch.optim.AdamW": lambda m: fsdp.shard_optimizer(
    torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.5)), "fsdp.SGD": lambda m: fsdp.SGD(m, lr=0.1, momentum=0.9, weight_decay=0.5)}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.3)


SOMETIMES = {"fsdp.AdamW": (adamw, lambda m: fsdp.AdamW(m, lr=1e-2, eps=1e-2, weight_decay=0.1)),
             "fsdp.SGD": (sgd, lambda m: fsdp.SGD(m, lr=0.1, momentum=0.9, weight_decay=0.3)),
             "torch.optim.SGD": (sgd, lambda m: fsdp.shard_optimizer(sgd(m.parameters()))),
             "torch.optim.AdamW": (adamw, lambda m: fsdp.shard_optimizer(adamw(m.parameters())))}


@each_value(over=[("no_shard", True), ("optim", True), ("optim_grads", False), ("optim_grads_params", False)], kind=SOMETIMES)
def test_gradients_that_come_sometimes_train_as_plain_ones(world, kind, over, folder):  # noqa: F811
    strategy, outer = over
    plain = WithUnused()
    start = copy.deepcopy(plain)
    theirs = SOMETIMES[kind][0](plain.parameters())

    def new():
        model = fsdp.fully_shard(copy.deepcopy(start), fsdp.mesh(outer=world.size if outer else 1), units=small.Block, strategy=strategy)
        return model, SOMETIMES[kind][1](model)

    def uses(step, rank):  # nobody, all, the last rank, nobody, all
        return (False, True, rank == world.size - 1, False, True)[step]

    model, ours = new()
    for step, batches in enumerate(parity.batches_of(world, rows, 5)):
        for rank, batch in enumerate(batches):
            (plain(batch, uses=uses(step, rank)).square().mean() / world.size).backward()
        model(batches[world.rank], uses=uses(step, world.rank)).square().mean().backward()
        for optimizer in (theirs, ours):
            optimizer.step()
            optimizer.zero_grad()
        if step == 3:  # one that has made fewer updates of some parameters
            fsdp.save(folder, model, ours, step=step)
            model, ours = new()
            fsdp.load(folder, model, ours)
    parity.compare_weights(plain, model)


@each_value(offload=[0.5, 0.0], strategy=STRATEGIES, kind=MISSING)
def test_weights_without_a_gradient_are_left_alone(world, kind, strategy, offload):
    if offload and kind == "torch.optim.AdamW":
        pytest.skip("optimizers of others need main weights on the device")
    model = fsdp.fully_shard(WithUnused(), units=small.Block, strategy=strategy, offload=offload)  # the rest is the model's own
    optimizer = MISSING[kind](model)
    batch = torch.randn(2, small.WIDTH, generator=torch.Generator().manual_seed(world.rank))
    for step in range(3):
        # In the last step one rank alone uses the layer, and nobody uses the frozen ones.
        if step == 1:
            model.first.requires_grad_(False)
        before = fsdp.state_dict(model, on_all_ranks=True)
        model(batch, uses=step == 2 and world.rank == 0).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after = fsdp.state_dict(model, on_all_ranks=True)
        for name in before:
            is_left = name.startswith("unused") or (name.startswith("first") and step > 0) or (name.startswith("sometimes") and step < 2)
            assert torch.equal(before[name], after[name]) == is_left, f"{name} in step {step}"


def test_matrices_without_a_gradient_are_left_alone(world):
    model = fsdp.fully_shard(WithUnused(), units=small.Block, matrices="*.weight")
    optimizer = fsdp.Muon(model, lr=0.1, weight_decay=0.5)
    before = fsdp.state_dict(model, on_all_ranks=True)
    model(torch.ones(2, small.WIDTH)).square().mean().backward()
    optimizer.step()
    after = fsdp.state_dict(model, on_all_ranks=True)
    for name in before:
        assert torch.equal(before[name], after[name]) == name.startswith(("unused", "sometimes")), name


def test_weights_without_a_gradient_can_be_updated_with_zeros(world):
    model = fsdp.fully_shard(WithUnused())
    optimizer = fsdp.SGD(model, lr=0.1, weight_decay=0.5, without_gradient="update")
    before = fsdp.state_dict(model, on_all_ranks=True)
    model(torch.ones(2, small.WIDTH)).square().mean().backward()
    optimizer.step()
    after = fsdp.state_dict(model, on_all_ranks=True)
    torch.testing.assert_close(after["unused.weight"], before["unused.weight"] * (1 - 0.1 * 0.5))


def test_scaled_moments_that_cannot_leave_a_weight_out_say_so(world):
    model = fsdp.fully_shard(WithUnused(), units=small.Block)
    optimizer = fsdp.AdamW(model, first_moment=torch.float8_e4m3fn)
    before = fsdp.state_dict(model, on_all_ranks=True)
    model(torch.ones(2, small.WIDTH)).square().mean().backward()
    with pytest.raises(fsdp.UsageError, match="got no gradient, but its moments share a scale.*without_gradient to 'update'"):
        optimizer.step()
    after = fsdp.state_dict(model, on_all_ranks=True)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_torchs_scaler_is_refused_and_ours_skips_on_all_ranks(world):
    plain = small.Stack()
    sharded = fsdp.fully_shard(copy.deepcopy(plain))
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    ours = fsdp.shard_optimizer(torch.optim.SGD(sharded.parameters(), lr=0.1))
    scaler = fsdp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for step, batches in enumerate(parity.batches_of(world, rows, 4)):
        if step == 1:
            batches[-1][0, 0] = float("inf")  # of the last rank alone
        loss = scaler.scale(loss_of(sharded, batches[world.rank]))
        loss.backward()
        before = fsdp.state_dict(sharded, on_all_ranks=True)
        if step == 3:
            scaler.unscale_(ours)
            fsdp.clip_grad_norm_(sharded, 0.01)
        scaler.step(ours)
        scaler.update()
        ours.zero_grad()
        if step == 1:
            after = fsdp.state_dict(sharded, on_all_ranks=True)
            assert all(torch.equal(before[name], after[name]) for name in before) and scaler.get_scale() == 4.0
            continue
        parity.plain_step(plain, loss_of, batches)
        if step == 3:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        theirs.step()
        theirs.zero_grad()
    parity.compare_weights(plain, sharded)
    assert scaler.get_scale() == 8.0, "two good steps"
    loss_of(sharded, batches[world.rank]).backward()
    torchs = torch.amp.GradScaler("cpu")
    torchs.scale(torch.ones(()))
    with pytest.raises(fsdp.UsageError, match="use fsdp_cpp.GradScaler"):
        torchs.step(ours)
    with pytest.raises(fsdp.UsageError, match="give loss_scale='dynamic'"):
        torchs.step(fsdp.SGD(sharded, lr=0.1))
    with pytest.raises(fsdp.UsageError, match="for optimizers of shard_optimizer"):
        scaler.unscale_(theirs)


SAVED = {"adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2), "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
         "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2)}


@each_value(name=SAVED, strategy=["optim", "optim_grads_params"])
def test_state_of_wrapped_optimizers_is_saved_and_goes_on_bit_by_bit(world, name, strategy, folder):  # noqa: F811
    batches = parity.batches_of(world, rows, 4)

    def run(first, last, path=None, save_to=None, mesh=None):
        torch.manual_seed(7)
        model = fsdp.fully_shard(WithUnused(), mesh, strategy=strategy)
        optimizer = fsdp.shard_optimizer(SAVED[name](model.parameters()))
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        if path is not None:
            loaded = fsdp.Checkpointer(path, model, optimizer).load_latest()
            assert loaded.step == first
            schedule.load_state_dict(loaded.schedule)
        for step in range(first, last):
            loss_of(model, batches[step][world.rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if save_to is not None:
            checkpointer = fsdp.Checkpointer(save_to, model, optimizer)
            checkpointer.save(last, schedule=schedule.state_dict())
            checkpointer.wait()
        return fsdp.state_dict(model, on_all_ranks=True), optimizer

    straight, _ = run(0, 4)
    run(0, 2, save_to=os.path.join(folder, "run"))
    resumed, optimizer = run(2, 4, path=os.path.join(folder, "run"))
    assert optimizer.param_groups[0]["lr"] == 1e-2 * 0.5 ** 4
    assert all(torch.equal(straight[key], resumed[key]) for key in straight)
    # Another grid cuts the same state otherwise; sums over ranks are in another order there.
    other, _ = run(2, 4, path=os.path.join(folder, "run"), mesh=fsdp.mesh(outer=world.size))
    for key in straight:
        torch.testing.assert_close(straight[key], other[key], rtol=1e-4, atol=1e-5)


def test_state_of_torchs_adamw_and_ours_load_each_other(world, folder):  # noqa: F811
    batches = parity.batches_of(world, rows, 4)
    makers = {"ours": lambda m: fsdp.AdamW(m, lr=1e-2, eps=1e-3), "theirs": lambda m: fsdp.shard_optimizer(
        torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3))}
    ends = []
    for first, second in (("ours", "ours"), ("ours", "theirs"), ("theirs", "ours")):
        path = os.path.join(folder, f"{first}-{second}")
        for maker, steps in ((first, range(2)), (second, range(2, 4))):
            torch.manual_seed(7)
            model = fsdp.fully_shard(small.Stack())
            optimizer = makers[maker](model)
            if steps[0] > 0:
                fsdp.load(path, model, optimizer)
            for step in steps:
                loss_of(model, batches[step][world.rank]).backward()
                optimizer.step()
                optimizer.zero_grad()
            fsdp.save(path, model, optimizer, step=steps[-1] + 1)
        ends.append(fsdp.state_dict(model, on_all_ranks=True))
    for end in ends[1:]:
        for name in end:
            torch.testing.assert_close(end[name], ends[0][name], **parity.TOLERANCE)
    model = fsdp.fully_shard(small.Stack())
    with pytest.raises(fsdp.Error, match="has the state of AdamW, and the optimizer is Adagrad; load the weights alone"):
        fsdp.load(path, model, fsdp.shard_optimizer(torch.optim.Adagrad(model.parameters())))
    with pytest.raises(fsdp.UsageError, match="optimizer is SGD, which does not know of ranks"):
        fsdp.save(path, model, torch.optim.SGD(torch.nn.Linear(2, 2).parameters()))


def test_groups_round_trip_through_state_dicts_and_checkpoints(world, folder):  # noqa: F811
    def new():
        model = fsdp.fully_shard(small.Stack())
        return model, fsdp.AdamW([{"params": [model.scale], "lr": 1.0, "weight_decay": 0.3},
                                  {"params": [p for p in model.parameters() if p is not model.scale]}], lr=2.0)

    model, optimizer = new()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    loss_of(model, torch.ones(2, small.WIDTH)).backward()
    optimizer.step()
    schedule.step()
    fsdp.save(folder, model, optimizer, step=1)
    for load in (lambda m, o: o.load_state_dict(optimizer.state_dict()), lambda m, o: fsdp.load(folder, m, o)):
        other_model, other = new()
        kept = list(other.param_groups)
        load(other_model, other)
        assert [g["lr"] for g in other.param_groups] == [0.5, 1.0] and [g["initial_lr"] for g in other.param_groups] == [1.0, 2.0]
        assert [g["weight_decay"] for g in other.param_groups] == [0.3, 1e-2] and other.param_groups[0]["betas"] == (0.9, 0.999)
        assert all(a is b for a, b in zip(kept, other.param_groups)), "schedulers see the same groups"
    with pytest.raises(fsdp.UsageError, match="1 parameter groups are to be loaded, and the optimizer has 2"):
        other.load_state_dict(fsdp.AdamW(fsdp.fully_shard(small.Stack())).state_dict())


@pytest.mark.parametrize("made", ["before", "after"])
def test_schedulers_made_before_and_after_wrapping_drive_it(world, made):
    plain = small.Stack()
    sharded = fsdp.fully_shard(copy.deepcopy(plain))
    optimizers, schedules = [], []
    for model in (plain, sharded):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if made == "before":
            schedules.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
        optimizers.append(optimizer if model is plain else fsdp.shard_optimizer(optimizer))
        if made == "after":
            schedules.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    for batches in parity.batches_of(world, rows, 3):
        parity.plain_step(plain, loss_of, batches)
        loss_of(sharded, batches[world.rank]).backward()
        for optimizer, schedule in zip(optimizers, schedules):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    parity.compare_weights(plain, sharded)


def test_hooks_of_a_step_run_once_also_after_a_state_dict_is_loaded(world):
    model = fsdp.fully_shard(small.Stack())
    optimizer = fsdp.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for step in range(2):
        loss_of(model, torch.ones(2, small.WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert len(calls) == step + 1
        optimizer.load_state_dict(optimizer.state_dict())


def test_a_step_reads_nothing_from_the_default_device(world):
    model = fsdp.fully_shard(small.Stack())
    optimizer = fsdp.AdamW(model, lr=1e-3)
    loss_of(model, torch.ones(2, small.WIDTH)).backward()
    with torch.device("meta"):  # where nothing can be read
        optimizer.step()


def test_reading_gradients_copies_no_main_weights(world):
    width = 256
    model = fsdp.fully_shard(small.Stack(width=width).bfloat16())
    loss_of(model, torch.ones(2, width, dtype=torch.bfloat16)).backward()
    main = sum(4 * each.numel for each in fsdp.shard.handle(model).parameters())
    for read in (lambda: fsdp.gradients(model), lambda: fsdp.clip_grad_norm_(model, 1.0)):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            read()
        allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.events() if event.name != "[memory]")
        assert allocated < main / 16
