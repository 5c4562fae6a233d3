// The fields of config.json that the models with a Llama-like decoder have in common.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "fsdp/nn/config/model_config.h"

namespace fsdp {

class JsonFields;

// Remembers the first field that is not computed, worded like the errors of JsonFields.
void note_not_computed(std::string& note, const JsonFields& fields, const std::string& field,
                       const std::string& rule);
void expect_text(std::string& note, const JsonFields& fields, const char* field,
                 const std::string& only);
void expect_zero(std::string& note, const JsonFields& fields, const char* field);

// In the structs 0 stands for "not given", so a file must not say 0.
int64_t read_head_dim(const JsonFields& fields, const char* field, int64_t fallback);

// Where the package's classes differ.
struct DecoderDefaults {
  double rms_norm_eps = 1e-6;
  double rope_theta = 10000.0;
  int64_t max_position_embeddings = 2048;
  int64_t head_dim = 0;
  const char* intermediate_size = "intermediate_size";  // the field that has it
  bool has_partial_rotary = false;  // the model's own reader takes partial_rotary_factor
};

LlamaConfig read_decoder(const JsonFields& fields, const DecoderDefaults& defaults);

// Writes positions in the two fields that every version of the package reads.
nlohmann::ordered_json decoder_json(const char* model_type, const char* model_class,
                                    const LlamaConfig& config);

// The whole configuration of Qwen3-Next.
ModelConfig read_qwen3_next(const JsonFields& fields);
nlohmann::ordered_json qwen3_next_json(const Qwen3NextConfig& config);

// The whole configuration of DeepSeek-V3.
ModelConfig read_deepseek_v3(const JsonFields& fields);
nlohmann::ordered_json deepseek_v3_json(const DeepseekV3Config& config);

}  // namespace fsdp
