// libFuzzer: any text either becomes a model that can be planned, or is refused with a UsageError.
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "fsdp/base/error.h"
#include "fsdp/plan/load_model.h"

namespace {

// Bytes alone would seldom be JSON, so most of them stand for a piece of it. Numbers are small or
// absurd: large but allowed ones only take time.
constexpr std::array<std::string_view, 66> kPieces = {
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\"",
    "0",
    "1",
    "2",
    "7",
    "64",
    "-1",
    "1.5",
    "1e9",
    "null",
    "true",
    "false",
    "18446744073709551615",
    "9223372036854775807",
    "\"units\":",
    "\"uses\":",
    "\"name\":",
    "\"tensors\":",
    "\"shape\":",
    "\"dtype\":",
    "\"fp32\"",
    "\"bf16\"",
    "\"half\"",
    "\"a\"",
    "\"b\"",
    "{\"units\":[{\"name\":\"a\",\"tensors\":[{\"name\":\"w\",\"shape\":[",
    "]}]}",
    "\"model_type\":",
    "\"llama\"",
    "\"mixtral\"",
    "\"deepseek_v3\"",
    "\"nemotron_h\"",
    "\"vocab_size\":",
    "\"hidden_size\":",
    "\"num_hidden_layers\":",
    "\"num_attention_heads\":",
    "\"num_key_value_heads\":",
    "\"head_dim\":",
    "\"intermediate_size\":",
    "\"num_local_experts\":",
    "\"tie_word_embeddings\":",
    "\"hybrid_override_pattern\":",
    "\"M-*\"",
    "\"MxE\"",
    "\"mamba_num_heads\":8,\"mamba_head_dim\":4,\"n_groups\":2,",
    "\"ssm_state_size\":8,\"conv_kernel\":4,",
    "\"kv_lora_rank\":8,\"qk_nope_head_dim\":4,",
    "\"qk_rope_head_dim\":2,\"v_head_dim\":4,\"moe_intermediate_size\":8,",
    "\"n_routed_experts\":",
    "\"n_shared_experts\":",
    "\"first_k_dense_replace\":",
    "\"num_nextn_predict_layers\":",
    "{\"vocab_size\":64,\"hidden_size\":8,\"num_hidden_layers\":2,\"num_attention_heads\":2,"
    "\"num_key_value_heads\":1,\"intermediate_size\":16,",
    " ",
    "\"qwen3\"",
    "\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":",
    "\"shared_expert_intermediate_size\":",
    "\"layers_block_type\":[\"mlp\",\"mamba\"],",
    "\"model_type\":\"qwen3_next\",\"layer_types\":[\"full_attention\",\"linear_attention\"],",
    "\"mlp_only_layers\":[1],\"decoder_sparse_step\":"};

std::string text_of(const uint8_t* data, size_t size) {
  std::string text;
  for (size_t i = 0; i < size; ++i) {
    if (data[i] < kPieces.size())
      text += kPieces[data[i]];
    else
      text += static_cast<char>(data[i]);
  }
  return text;
}

void fail(const std::string& text, const char* problem) {
  std::fprintf(stderr, "model_file_fuzz: %s\n%s\n", problem, text.c_str());
  std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text = text_of(data, size);
  try {
    const fsdp::ModelShape model = fsdp::parse_model(text, "input");
    model.validate();
    if (model.parameters() < 0) fail(text, "a negative number of parameters");
  } catch (const fsdp::UsageError& error) {
    const std::string_view message = error.what();
    if (!message.starts_with("input: ")) fail(text, error.what());
  } catch (const std::exception& error) {
    fail(text, error.what());
  }
  return 0;
}
