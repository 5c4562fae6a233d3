"""The engine's kernels as operators of torch, in place of transformers' modules, and a loss without logits."""

import copy
import gc
import weakref

import conftest
import pytest
import torch
from torch import nn

import fsdp_cpp as fsdp

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "attention_dropout": 0.0}
EXPERTS = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.02, "output_router_logits": True}
# A family's config, and how many of its modules compute with each kernel.
FAMILIES = {
    "Llama": ({}, {"RMS norm": 5, "gated SiLU": 2, "rotary positions": 2}),
    "Mistral": ({"sliding_window": 8}, {"RMS norm": 5, "gated SiLU": 2, "rotary positions": 2}),
    "Qwen2": ({}, {"RMS norm": 5, "gated SiLU": 2, "rotary positions": 2}),
    "Qwen3": ({}, {"RMS norm": 9, "gated SiLU": 2, "rotary positions": 2}),
    "Gemma": ({"hidden_activation": "gelu_pytorch_tanh"}, {"RMS norm": 5, "gated GELU": 2, "rotary positions": 2}),
    "Gemma2": ({"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8}, {"RMS norm": 9, "gated GELU": 2, "rotary positions": 2}),
    "Phi3": ({}, {"RMS norm": 5, "gated SiLU": 2, "rotary positions": 2}),
    "Mixtral": ({"num_local_experts": 4, **EXPERTS}, {"RMS norm": 5, "rotary positions": 2, "experts in groups": 2}),
    "Qwen3Moe": ({"num_experts": 4, "moe_intermediate_size": 16, "decoder_sparse_step": 2, "mlp_only_layers": [], **EXPERTS},
                 {"RMS norm": 9, "gated SiLU": 1, "rotary positions": 2, "experts in groups": 1}),
}


def a_model(family, dtype=torch.float32, **more):
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**(SMALL | FAMILIES[family][0] | more))
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # norms whose factors are not all one
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def tokens(rows=2, length=12):
    return torch.randint(1, 64, (rows, length), generator=torch.Generator().manual_seed(5))


def labels_of(x):
    labels = x.clone()
    labels[:, :3] = -100
    return labels


def loss_and_gradients(model, **given):
    model.zero_grad()
    output = model(**given)
    output.loss.backward()
    return output, {name: parameter.grad for name, parameter in model.named_parameters()}


def expect_near(gradients, expected, tolerance=2e-5):
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        if expected[name] is None:
            assert gradient is None, name
            continue
        scale = expected[name].abs().max().clamp_min(1e-3)
        assert (gradient - expected[name]).abs().max() <= tolerance * scale, name


# --- operators -----------------------------------------------------------------------------------

def operator_cases(dtype):
    x, weight = torch.randn(3, 5, 16, dtype=dtype), torch.randn(16, dtype=dtype)
    q, k = torch.randn(2, 5, 4, 8, dtype=dtype), torch.randn(2, 5, 2, 8, dtype=dtype)
    ops = torch.ops.fsdp_cpp
    for offset in (0.0, 1.0):
        yield (lambda x, w, offset=offset: ops.rms_norm(x, w, 1e-3, offset)[0],
               lambda x, w, offset=offset: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3) * (offset + w), [x, weight])
    for shape in ((5, 4), (2, 5, 4)):
        angle = torch.randn(shape)
        cosine, sine = angle.cos(), angle.sin()

        def turned(q, k, cosine=cosine, sine=sine):
            c, s = cosine.unsqueeze(-2), sine.unsqueeze(-2)
            return [torch.cat((x[..., :4] * c - x[..., 4:] * s, x[..., 4:] * c + x[..., :4] * s), -1) for x in (q, k)]

        yield lambda q, k, cosine=cosine, sine=sine: ops.rotate(q, k, cosine, sine, False), turned, [q, k]
    gate, up = torch.randn(3, 6, dtype=dtype), torch.randn(3, 6, dtype=dtype)
    for kind, function in (("silu", nn.functional.silu), ("gelu", nn.functional.gelu),
                           ("gelu_tanh", lambda x: nn.functional.gelu(x, approximate="tanh"))):
        yield (lambda g, u, kind=kind: ops.gated(g, u, kind), lambda g, u, f=function: f(g) * u, [gate, up])
        yield (lambda both, kind=kind: ops.gated(both, None, kind),
               lambda both, f=function: f(both[:, :6]) * both[:, 6:], [torch.cat((gate, up), -1)])


def outputs_and_gradients(function, inputs):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*inputs)
    outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
    gradients = torch.autograd.grad([(x.float() * torch.arange(x.numel()).view(x.shape).sin()).sum() for x in outputs], inputs)
    return [*outputs, *gradients]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_compute_what_torch_does(dtype):
    for ours, theirs, inputs in operator_cases(dtype):
        for mine, expected in zip(outputs_and_gradients(ours, inputs), outputs_and_gradients(theirs, [x.float() for x in inputs])):
            assert mine.dtype == dtype
            # bf16: one rounding, which may also be that of the input of a sum.
            torch.testing.assert_close(mine.float(), expected, rtol=1e-5 if dtype == torch.float32 else 1e-2,
                                       atol=1e-5 if dtype == torch.float32 else 2e-2)


def test_operators_can_be_traced():
    """Schemas, shapes without numbers, autograd under AOTAutograd: torch's own checks."""
    x, weight = torch.randn(3, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    q, k = torch.randn(2, 5, 4, 8, requires_grad=True), torch.randn(2, 5, 2, 8, requires_grad=True)
    angle = torch.randn(5, 4)
    both = torch.randn(3, 12, requires_grad=True)
    hidden, head = torch.randn(6, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    targets = torch.tensor([3, 1, -100, 19, 0, 2])
    ops = torch.ops.fsdp_cpp
    for operator, arguments in ((ops.rms_norm, (x, weight, 1e-5, 1.0)), (ops.rotate, (q, k, angle.cos(), angle.sin(), False)),
                                (ops.gated, (both, None, "gelu_tanh")), (ops.gated, (x, x.detach() + 1, "silu")),
                                (ops.linear_cross_entropy, (hidden, head, targets, 256, 2.0))):
        torch.library.opcheck(operator.default, arguments,
                              test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))


def test_a_loss_of_rows_is_that_of_their_logits():
    hidden, weight = torch.randn(2, 7, 8), torch.randn(30, 8)
    labels = torch.randint(0, 30, (2, 7))
    labels[0, 2:5] = -100
    for cap in (0.0, 2.5):
        def plain(hidden, weight, cap=cap):
            logits = hidden @ weight.T
            return nn.functional.cross_entropy((torch.tanh(logits / cap) * cap if cap else logits).flatten(0, 1), labels.flatten())

        expected = outputs_and_gradients(lambda *x: plain(*x) * 3, [hidden, weight])
        for logit_bytes in (1, 1 << 20):  # row by row, and all at once
            ours = outputs_and_gradients(
                lambda *x, n=logit_bytes, cap=cap: fsdp.linear_cross_entropy(*x, labels, soft_cap=cap, logit_bytes=n) * 3, [hidden, weight])
            for mine, theirs in zip(ours, expected):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert fsdp.linear_cross_entropy(hidden, weight, torch.full_like(labels, -100)) == 0
    with pytest.raises(fsdp.UsageError, match="each row of hidden needs one label"):
        fsdp.linear_cross_entropy(hidden, weight, labels[:, 1:])


# --- models of transformers ----------------------------------------------------------------------

@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_trains_alike(family):
    plain, ours = a_model(family).train(), a_model(family).train()
    done = fsdp.use_kernels(ours, logits=False)
    assert done.used == FAMILIES[family][1] | {"loss without logits": 1}
    assert not done.left
    x = tokens()
    for given in ({"labels": labels_of(x)}, {"labels": labels_of(x), "num_items_in_batch": torch.tensor(31)},
                  {"labels": labels_of(x), "attention_mask": (torch.arange(12) > 3).long().repeat(2, 1)}):
        theirs, expected = loss_and_gradients(plain, input_ids=x, **given)
        output, gradients = loss_and_gradients(ours, input_ids=x, **given)
        torch.testing.assert_close(output.loss, theirs.loss, rtol=1e-5, atol=1e-6)
        assert output.logits is None
        expect_near(gradients, expected, 1e-4)
    asked = ours(input_ids=x, labels=x, return_logits=True)
    torch.testing.assert_close(asked.logits, plain(input_ids=x).logits, rtol=1e-4, atol=1e-4)
    ours.eval(), plain.eval()
    torch.testing.assert_close(ours(input_ids=x, labels=x).logits, plain(input_ids=x).logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(ours.generate(x[:1], max_new_tokens=4, do_sample=False), plain.generate(x[:1], max_new_tokens=4, do_sample=False))


def test_positions_of_their_own_and_shifted_labels():
    plain, ours = a_model("Llama").train(), a_model("Llama").train()
    fsdp.use_kernels(ours, logits=False)
    x = tokens()
    given = {"input_ids": x, "position_ids": torch.stack((torch.arange(12), torch.arange(12) + 7)),
             "labels": x, "shift_labels": torch.roll(x, -1, 1)}
    theirs, expected = loss_and_gradients(plain, **given)
    output, gradients = loss_and_gradients(ours, **given)
    torch.testing.assert_close(output.loss, theirs.loss, rtol=1e-5, atol=1e-6)
    expect_near(gradients, expected, 1e-4)


class Doubled(nn.Module):
    """A norm by its looks."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = 1e-6

    def forward(self, x):
        return 2 * x * self.weight


class Reversed(nn.Module):
    """A gated MLP by its looks, whose gate is its other half."""

    def __init__(self, activation):
        super().__init__()
        self.into, self.back = nn.Linear(8, 12, bias=False), nn.Linear(6, 8)
        self.activation = activation

    def forward(self, x):
        gate, up = self.into(x).chunk(2, -1)
        return self.back(self.activation(gate) * up)


def test_what_differs_is_left_alone_and_named():
    model = nn.Sequential(Doubled(8), Reversed(torch.tanh), Reversed(nn.functional.silu), nn.RMSNorm(8, eps=1e-5), nn.LayerNorm(8))
    x = torch.randn(4, 8)
    expected = model(x)
    done = fsdp.use_kernels(model)
    assert done.used == {"gated SiLU": 1, "RMS norm": 1}
    assert done.left == {"0": "computes another function than an RMS norm", "1": "computes another function than a gated MLP"}
    assert str(done) == ("kernels: 1 x gated SiLU, 1 x RMS norm; left alone: 0 (computes another function than an RMS norm), "
                         "1 (computes another function than a gated MLP)")
    torch.testing.assert_close(model(x), expected)
    assert [type(module).__name__ for module in model] == ["Doubled", "Reversed", "Reversed", "RMSNorm", "LayerNorm"]
    assert isinstance(model[2], Reversed)


class Dropping(Reversed):
    def __init__(self):
        super().__init__(nn.functional.silu)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        gate, up = self.into(x).chunk(2, -1)
        return self.back(self.dropout(self.activation(gate) * up))


class Clamped(Reversed):
    def forward(self, x):
        gate, up = self.into(x).chunk(2, -1)
        return self.back(self.activation(gate.clamp(max=10)) * up)


class Gated(nn.Module):
    """A norm that may have a gate."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.eps = 1e-6

    def forward(self, x, gate=None):
        if gate is not None:
            x = x * nn.functional.silu(gate)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


@pytest.mark.parametrize("training", [True, False])
def test_a_module_is_tried_in_training_and_out_of_it_with_small_numbers_and_large_ones(training):
    model = nn.Sequential(Dropping(), Clamped(nn.functional.silu), nn.Sequential(Reversed(nn.functional.silu))).train(training)
    assert fsdp.use_kernels(model).left == {name: "computes another function than a gated MLP" for name in "01"}


def test_other_calls_of_a_module_are_its_own():
    plain, ours = Gated(8), Gated(8)
    ours.load_state_dict(plain.state_dict())
    assert fsdp.use_kernels(ours).used == {"RMS norm": 1}
    x, gate = torch.randn(3, 8), torch.randn(3, 8)
    for arguments, keywords in (((x,), {}), ((x, gate), {}), ((x,), {"gate": gate}), ((), {"x": x})):
        torch.testing.assert_close(ours(*arguments, **keywords), plain(*arguments, **keywords))
    torch.testing.assert_close(ours(x[:, :1]), plain(x[:, :1]))  # torch lets the one number stand for all
    with pytest.raises(RuntimeError, match="must match the size"):
        ours(torch.randn(3, 16))


def test_operators_refuse_what_does_not_fit():
    ops = torch.ops.fsdp_cpp
    with pytest.raises(RuntimeError, match="one value for each of the last dimension"):
        ops.rms_norm(torch.ones(2, 16), torch.ones(8), 1e-6, 0.0)
    q = torch.ones(2, 5, 4, 8)
    for shape in ((5, 2), (3, 4), (3, 5, 4), (4,)):
        with pytest.raises(RuntimeError, match="half as many angles as channels for each position"):
            ops.rotate(q, q, torch.ones(shape), torch.ones(shape), False)
    with pytest.raises(RuntimeError, match="it must be silu, gelu or gelu_tanh"):
        ops.gated(q, q, "relu")
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    head, targets = torch.randn(9, 8, requires_grad=True), torch.tensor([1, 2, 3])
    for loss in (ops.rms_norm(x, weight, 1e-6, 0.0)[0].square().sum(), fsdp.linear_cross_entropy(x, head, targets)):
        with pytest.raises(RuntimeError, match="has no second derivatives"):
            torch.autograd.grad(loss, x, create_graph=True)


def test_a_model_without_logits_may_be_changed_saved_and_asked_again(tmp_path):
    plain, ours = a_model("Llama").train(), a_model("Llama").train()
    with torch.device("meta"):  # a default that numbers of the check do not follow
        fsdp.use_kernels(ours, logits=False)
    assert fsdp.use_kernels(ours, logits=False).used == FAMILIES["Llama"][1] | {"loss without logits": 1}
    x = tokens()
    output = ours(input_ids=x, labels=x)
    assert "logits" not in output and len(output.to_tuple()) == len(output.keys())
    asked = {"input_ids": x, "shift_labels": torch.roll(x, -1, 1)}  # without labels transformers computes no loss
    torch.testing.assert_close(ours(**asked).logits, plain(**asked).logits, rtol=1e-4, atol=1e-4)
    torch.save(ours, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False).train()
    assert type(loaded) is transformers.LlamaForCausalLM
    torch.testing.assert_close(loaded(input_ids=x, labels=x).loss, output.loss, rtol=1e-5, atol=1e-6)
    for model in (plain, ours):
        torch.manual_seed(1)
        model.resize_token_embeddings(80)  # with another head, which has logits
    both = [model(input_ids=x, labels=x) for model in (plain, ours)]
    torch.testing.assert_close(both[0].loss, both[1].loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(both[0].logits, both[1].logits, rtol=1e-4, atol=1e-4)


def test_models_that_cannot_go_without_logits_are_refused():
    for model, words in ((nn.Linear(3, 3), "is no causal language model of transformers with a linear head"),
                         (transformers.LlamaModel(transformers.LlamaConfig(**SMALL)), "is no causal language model")):
        with pytest.raises(fsdp.UsageError, match=words):
            fsdp.use_kernels(model, logits=False)

    class Weighted(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.loss = None if output.loss is None else output.loss + 1
            return output

    model = Weighted(transformers.LlamaConfig(**SMALL))
    with pytest.raises(fsdp.UsageError, match="computes its loss in another way"):
        fsdp.use_kernels(model, logits=False)
    assert type(model.model.norm).__mro__[1] is nn.Module  # nothing was put in place


def test_copies_compute_for_themselves():
    plain, ours = a_model("Llama").train(), a_model("Llama").train()
    fsdp.use_kernels(ours, logits=False)
    with pytest.raises(fsdp.UsageError, match="cannot be replaced; set it before"):
        ours.loss_function = None
    other = copy.deepcopy(ours)
    del ours
    x = tokens()
    torch.testing.assert_close(other(input_ids=x, labels=x).loss, plain(input_ids=x, labels=x).loss, rtol=1e-5, atol=1e-6)


def test_a_model_that_goes_is_gone():
    model = a_model("Llama").train()
    fsdp.use_kernels(model, logits=False)
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


class Experts(nn.Module):
    """Experts by their looks."""

    def __init__(self, limit):
        super().__init__()
        self.into, self.back = nn.Parameter(torch.randn(5, 12, 8)), nn.Parameter(torch.randn(5, 8, 6))
        self.limit = limit

    def forward(self, x, chosen, weights):
        gate, up = torch.einsum("tn,tkin->tki", x, self.into[chosen]).clamp(max=self.limit).chunk(2, -1)
        return torch.einsum("tki,tkni,tk->tn", nn.functional.silu(gate) * up, self.back[chosen], weights)


def test_experts_are_computed_in_groups_or_left_alone():
    model = nn.ModuleList([Experts(float("inf")), Experts(7.0)])
    plain = copy.deepcopy(model)
    done = fsdp.use_kernels(model)
    assert done.used == {"experts in groups": 1} and done.left == {"1": "computes another function than experts of gated MLPs"}
    for rows in (7, 1, 0):
        x, weights, chosen = torch.randn(rows, 8), torch.rand(rows, 3), torch.rand(rows, 5).argsort(1)[:, :3]
        ours, theirs = (outputs_and_gradients(lambda x, w, m=module: m(x, chosen, w), [x, weights]) for module in (model[0], plain[0]))
        for mine, expected in zip(ours, theirs):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)
    arguments = torch.randn(7, 8), torch.tensor([[0, 4]] * 7), torch.rand(7, 2)
    expected = plain[0](*arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = model[0](*arguments)
    assert narrow.dtype == torch.bfloat16 and (narrow - expected).norm() <= 0.02 * expected.norm()
    again = copy.deepcopy(model[0])
    again.into.data.zero_()
    assert model[0](*arguments).abs().sum() > 0 == again(*arguments).abs().sum()


# --- sharded -------------------------------------------------------------------------------------

@conftest.every_strategy
def test_a_sharded_model_trains_alike(world, strategy):
    plain = a_model("Llama").train()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    assert str(fsdp.use_kernels(empty)) == "kernels: 2 x rotary positions, 2 x gated SiLU, 5 x RMS norm"  # no weights are needed for it
    ours = fsdp.fully_shard(a_model("Llama").train(), strategy=strategy, kernels=True, logits=False)
    ours_optimizer = fsdp.AdamW(ours, lr=1e-2, weight_decay=0.0)
    for step in range(4):
        x = (tokens(2 * world.size) + step) % 64
        theirs = plain(input_ids=x, labels=x).loss
        theirs.backward()
        optimizer.step()
        optimizer.zero_grad()
        mine = x[2 * world.rank:2 * world.rank + 2]
        loss = ours(input_ids=mine, labels=mine).loss
        loss.backward()
        ours_optimizer.step()
        ours_optimizer.zero_grad()
    with fsdp.unshard(ours):
        for (name, expected), (_, weight) in zip(plain.named_parameters(), ours.named_parameters()):
            # AdamW divides gradients that are next to nothing by their size.
            torch.testing.assert_close(weight, expected, rtol=1e-3, atol=1e-3, msg=name)


def test_experts_that_no_graph_records_are_named_before_the_first_step(world):
    model = fsdp.fully_shard(a_model("Mixtral").train(), kernels=True)
    with pytest.raises(fsdp.UsageError, match=r"a graph cannot record the experts of 'model.layers.0.mlp.experts', which compute in torch.float32"):
        fsdp.Graph(lambda: None, model, fsdp.AdamW(model))
    narrow = fsdp.fully_shard(a_model("Mixtral", torch.bfloat16, intermediate_size=20).train(), kernels=True)
    with pytest.raises(fsdp.UsageError, match=r"whose matrices are \(40, 32\)|whose matrices are \(32, 20\)"):
        fsdp.Graph(lambda: None, narrow)


def test_hooks_of_linear_layers_that_are_computed_at_once(world):
    model = fsdp.fully_shard(a_model("Llama").train(), kernels=True)
    x = tokens()
    loss = model(input_ids=x, labels=x).loss
    seen = []
    mlp = model.model.layers[1].mlp
    mlp.gate_proj.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    torch.testing.assert_close(model(input_ids=x, labels=x).loss, loss)
    assert seen == [(2, 12, 48)]
    mlp.up_proj.register_forward_hook(lambda module, inputs, output: output * 0)
    assert not torch.allclose(model(input_ids=x, labels=x).loss, loss)


@conftest.each_value(family=["Mixtral", "Qwen3Moe"], once=1)
def test_experts_that_ranks_share_out(world, family):
    """Experts of a model of transformers on ranks that have some of them each, beside all of them on one."""
    twelve = {"num_local_experts" if family == "Mixtral" else "num_experts": 12, "output_router_logits": False}
    plain, ours = a_model(family, **twelve).train(), a_model(family, **twelve).train()
    ours = fsdp.fully_shard(ours, fsdp.mesh(ep=world.size), kernels=True, main_params=None)
    optimizers = torch.optim.SGD(plain.parameters(), lr=0.1), fsdp.SGD(ours, lr=0.1)
    for step in range(3):
        x = (tokens(2 * world.size) + step) % 64
        plain(input_ids=x, labels=x).loss.backward()
        mine = x[2 * world.rank:2 * world.rank + 2]
        ours(input_ids=mine, labels=mine).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = fsdp.state_dict(ours, on_all_ranks=True)
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(state[name], expected, rtol=1e-4, atol=1e-5, msg=name)


@conftest.each_value(recipe=["mxfp8", "fp8-tensor", "fp8-block", "fp8-row"], once=1)
def test_linear_layers_multiply_codes(world, recipe):
    """Losses stay near those of bf16."""
    losses = {}
    for name, options in (("bf16", {}), (recipe, {"weights": recipe}), ("half", {"weights": recipe, "weights_except": "model.layers.0.*"})):
        model = fsdp.fully_shard(a_model("Llama", intermediate_size=64).train(), params=torch.bfloat16, main_grads=torch.float32, **options)
        optimizer = fsdp.AdamW(model, lr=3e-3)
        losses[name] = []
        for step in range(12):
            x = (tokens(2 * world.size) + step % 3)[2 * world.rank:2 * world.rank + 2] % 64
            loss = model(input_ids=x, labels=x).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(float(loss.detach()))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(input_ids=x, labels=x).loss.backward()
        optimizer.zero_grad()
        # For programs that know no codes, their values.
        weights = fsdp.state_dict(model, on_all_ranks=True)
        plain = a_model("Llama", intermediate_size=64).to(torch.bfloat16)
        plain.load_state_dict(weights)
        torch.testing.assert_close(plain(input_ids=x, labels=x).loss, model(input_ids=x, labels=x).loss, rtol=0.02, atol=0)
    with pytest.raises(RuntimeError, match="its numbers are the main weights; fsdp_cpp.state_dict"):
        with fsdp.unshard(model):
            model.model.layers[1].mlp.up_proj.weight.sum().item()
    assert len({tuple(each) for each in losses.values()}) == 3
    assert losses[recipe][-1] < 0.95 * losses[recipe][0]
    for ours, expected in zip(losses[recipe], losses["bf16"]):
        assert abs(ours - expected) < 0.03 * expected


@pytest.mark.more
def test_a_compiled_block_has_no_breaks(world):
    plain, ours = a_model("Llama").train(), a_model("Llama").train()
    fsdp.use_kernels(ours, logits=False)
    x = tokens()
    expected, gradients = loss_and_gradients(plain, input_ids=x, labels=x)
    whole = torch.compile(ours, fullgraph=True)
    output = whole(input_ids=x, labels=x)
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=1e-6)
    output.loss.backward()
    expect_near({name: parameter.grad for name, parameter in ours.named_parameters()}, gradients, 1e-4)
