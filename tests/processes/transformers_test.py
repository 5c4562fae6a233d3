#!/usr/bin/env python3
"""Our models against the transformers package's: the same weights, the same logits, loss and gradients in fp32.

    transformers_test.py MODEL_RUN [CASE ...]       the program; ends with "skipped: ..." where packages are missing
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here needs a network

try:
    import safetensors
    import torch
    import transformers
except ImportError as error:
    print(f"skipped: {error}; make setup installs what requirements.txt names")
    sys.exit(0)

MODEL_RUN = sys.argv[1]
VOCABULARY = 37
DENSE = dict(vocab_size=VOCABULARY, hidden_size=48, intermediate_size=77, num_hidden_layers=3, num_attention_heads=6,
             num_key_value_heads=2, max_position_embeddings=64)
HYBRID = dict(vocab_size=VOCABULARY, hidden_size=48, intermediate_size=77, hybrid_override_pattern="M-M*-",
              mamba_num_heads=6, mamba_head_dim=16, n_groups=2, ssm_state_size=16, conv_kernel=4, chunk_size=8,
              num_attention_heads=6, num_key_value_heads=2, head_dim=8)
HYBRID_EXPERTS = dict(hybrid_override_pattern="ME*E-", n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=20,
                      moe_shared_expert_intermediate_size=28, n_group=4, topk_group=2, routed_scaling_factor=2.5)
# With the usual 1e-6, the norm behind the delta rule makes small sums large, rounding included: then both sides are up to
# 5e-5 away from the package's gradients in fp64.
NEXT = {**DENSE, "rms_norm_eps": 1e-2, "num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 12, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 24, "router_aux_loss_coef": 0.1, "output_router_logits": True}
LATENT = {**DENSE, "num_key_value_heads": 6, "q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
          "v_head_dim": 10, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3,
          "moe_intermediate_size": 20, "n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 0}
# Low frequencies of 8 channels and 20 positions are scaled only if the first training was as short.
LLAMA3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}

# With 8 channels and 20 positions some stay, some are slowed down in part, some by the factor.
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 2.0, "beta_slow": 0.5,
        "original_max_position_embeddings": 16}

CASES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {**DENSE}),
    "llama-tied": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {**DENSE, "tie_word_embeddings": True}),
    "llama-all-heads": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {**DENSE, "num_key_value_heads": 6}),
    "llama-biased": (transformers.LlamaConfig, transformers.LlamaForCausalLM,
                     {**DENSE, "attention_bias": True, "mlp_bias": True}),
    "llama-3.1": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {**DENSE, "rope_parameters": LLAMA3}),
    "llama-yarn": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {**DENSE, "rope_parameters": YARN}),
    **{f"mistral{name}": (transformers.MistralConfig, transformers.MistralForCausalLM, {**DENSE, "head_dim": 16, "sliding_window": window})
       for name, window in (("", None), ("-window", 7), ("-long-window", 20))},
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {**DENSE}),
    "qwen2-tied-yarn": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM,
                        {**DENSE, "tie_word_embeddings": True, "rope_parameters": {**YARN, "attention_factor": 1.25}}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {**DENSE, "head_dim": 16}),
    "qwen3-tied": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM,
                   {**DENSE, "head_dim": 16, "tie_word_embeddings": True}),
    **{f"mixtral{name}": (transformers.MixtralConfig, transformers.MixtralForCausalLM,
                          {**DENSE, "intermediate_size": 76, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": window,
                           "router_aux_loss_coef": 0.1, "output_router_logits": True})
       for name, window in (("", None), ("-window", 6))},
    **{f"qwen3-moe{name}": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM,
                            {**DENSE, "head_dim": 16, "moe_intermediate_size": 76, "num_experts": 6, "num_experts_per_tok": 3,
                             "norm_topk_prob": normed, "router_aux_loss_coef": 0.1, "output_router_logits": True})
       for name, normed in (("", False), ("-normed", True))},
    **{f"qwen3-next{name}": (transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM, {**NEXT, **fields})
       for name, fields in (("", {}), ("-dense-layers", {"mlp_only_layers": [1], "decoder_sparse_step": 2, "norm_topk_prob": False}),
                            ("-tied", {"tie_word_embeddings": True, "attention_bias": True,
                                       "layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2}))},
    **{f"deepseek-v3{name}": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM, {**LATENT, **fields})
       for name, fields in (("", {}), ("-direct", {"q_lora_rank": None, "attention_bias": True, "norm_topk_prob": False}),
                            ("-yarn", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}, "rope_interleave": False,
                                       "tie_word_embeddings": True, "v_head_dim": 28}),
                            ("-dense", {"first_k_dense_replace": 3}))},
    "nemotron-h": (transformers.NemotronHConfig, transformers.NemotronHForCausalLM, {**HYBRID}),
    "nemotron-h-moe": (transformers.NemotronHConfig, transformers.NemotronHForCausalLM, {**HYBRID, **HYBRID_EXPERTS}),
    "nemotron-h-latent-moe": (transformers.NemotronHConfig, transformers.NemotronHForCausalLM,
                              {**HYBRID, **HYBRID_EXPERTS, "moe_latent_size": 32, "mlp_bias": True, "norm_topk_prob": False}),
}

# Both sides round products and sums of a few hundred terms to fp32, in different orders: 6e-8 each, a hundred of
# them in a row, of values up to the largest of a tensor.
TOLERANCE = 1e-5


# By model type: the module with router and experts, and the projections of an expert: gate, up and down.
QWEN = ("mlp", ("gate_proj", "up_proj", "down_proj"))
EXPERTS = {"mixtral": ("block_sparse_moe", ("w1", "w3", "w2")), "qwen3_moe": QWEN, "qwen3_next": QWEN, "deepseek_v3": QWEN}
HYBRID_STACKS = (".mixer.experts.up_proj", ".mixer.experts.down_proj")


def published(model_type, name, gradient):
    """Yields (name, gradient) as published checkpoints name and divide it."""
    module, (gate, up, down) = EXPERTS.get(model_type, ("mlp", ("", "", "")))
    if name.endswith(".mlp.gate.weight"):
        yield name.replace(".mlp.", f".{module}."), gradient
    elif name.endswith(".experts.gate_up_proj"):
        layer = name.removesuffix(".mlp.experts.gate_up_proj")
        for expert, both in enumerate(gradient):
            for part, value in zip((gate, up), both.chunk(2)):
                yield f"{layer}.{module}.experts.{expert}.{part}.weight", value
    elif name.endswith(".mlp.experts.down_proj"):
        layer = name.removesuffix(".mlp.experts.down_proj")
        for expert, value in enumerate(gradient):
            yield f"{layer}.{module}.experts.{expert}.{down}.weight", value
    elif name.endswith(HYBRID_STACKS):
        stack, projection = name.rsplit(".", 1)
        for expert, value in enumerate(gradient):
            yield f"{stack}.{expert}.{projection}.weight", value
    else:
        yield name, gradient


def theirs(model):
    """Logits, loss and gradients of the package's model."""
    tokens = torch.arange(40).remainder(VOCABULARY).reshape(2, 20)
    model.train()  # nothing here is random; the loss of the routers is only added in training
    output = model(tokens, labels=tokens)
    output.loss.backward()
    is_hybrid = model.config.model_type == "nemotron_h"
    result = {"logits": output.logits.detach(), "loss": output.loss.detach().reshape(1)}
    for name, parameter in model.named_parameters():
        if is_hybrid:
            name = name.replace("model.", "backbone.", 1)
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for stored, value in published(model.config.model_type, name, gradient):
            result["gradient." + stored] = value
    return result


def ours(folder, ranks):
    target = folder.with_name(f"{folder.name}-computed-{ranks}")
    subprocess.run([MODEL_RUN, "compute", folder, str(ranks), target], check=True)
    result = {}
    for path in target.rglob("*.safetensors"):
        with safetensors.safe_open(path, "pt") as file:
            for name in file.keys():
                result[name] = file.get_tensor(name)
    return result


def compare(case, actual, expected):
    names = {name for name in actual if not name.startswith("loss.")}
    assert names == set(expected), (case, names ^ set(expected))
    worst = 0.0
    for name, value in expected.items():
        assert actual[name].shape == value.shape, (case, name)
        error = ((actual[name] - value).abs().max() / value.abs().max().clamp_min(1e-6)).item()
        assert error < TOLERANCE, f"{case}: {name}: {error}"
        worst = max(worst, error)
    return worst


def check_config(case, folder, config):
    """The package reads our config.json to the same configuration."""
    written = folder.with_name(f"{folder.name}-config")
    written.mkdir()
    text = subprocess.run([MODEL_RUN, "config", folder / "config.json"], check=True, capture_output=True, text=True).stdout
    (written / "config.json").write_text(text)
    again = transformers.AutoConfig.from_pretrained(written)
    assert type(again) is type(config), case
    for field in json.loads(text):
        if field in ("architectures", "rope_theta", "rope_scaling", "hybrid_override_pattern"):
            continue
        if getattr(config, field, None) is not None:  # we write what the package works out later, too
            assert getattr(again, field) == getattr(config, field), (case, field)
    assert getattr(again, "rope_parameters", None) == getattr(config, "rope_parameters", None), case
    if case.startswith("nemotron-h"):
        assert again.layers_block_type == config.layers_block_type


def check(case, folder):
    config_class, model_class, fields = CASES[case]
    config = config_class(**fields)
    model = model_class(config)
    with torch.no_grad():  # norms are ones otherwise, and would hide being mixed up
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
            if config.model_type == "qwen3_next" and name.endswith(".A_log"):
                parameter.sub_(4.0)  # states that live for some positions: delta_net_test.py says why
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(folder)
    check_config(case, folder, config)
    expected = theirs(model)
    return max(compare(case, ours(folder, ranks), expected) for ranks in (1, 2))


def main():
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as name:
        for case in sys.argv[2:] or CASES:
            worst = check(case, pathlib.Path(name, case))
            print(f"{case}: largest difference {worst:.1e} of the largest value")
    print(f"passed: transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
