// What the fields of a model's configuration must keep to, with errors that name field, value and
// rule.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace fsdp {

// A dimension beyond this is a typing error; products of two, which is what is formed of them, fit
// 64 bits with room to add. Whole shapes are checked by ModelShape::validate.
inline constexpr int64_t kMaxDim = int64_t{1} << 24;
// So are more layers, or more experts in all layers: no model is near, and one that large would be
// planned for minutes.
inline constexpr int64_t kMaxLayers = 4096;
inline constexpr int64_t kMaxExperts = int64_t{1} << 17;

struct IntegerField {
  const char* name;
  int64_t value;
};

// UsageError for the first field outside the range.
void check_range(int64_t minimum, int64_t maximum, std::initializer_list<IntegerField> fields);

// From 1 to kMaxDim.
void check_dims(std::initializer_list<IntegerField> fields);

// head_dim, or hidden_size / num_attention_heads when it is 0; all three are checked.
int64_t resolved_head_dim(int64_t head_dim, int64_t hidden_size, int64_t num_attention_heads);

// The main layers, and those that predict more tokens after them.
void check_layers(int64_t num_hidden_layers, int64_t num_nextn_predict_layers);

void check_kv_heads(int64_t num_key_value_heads, int64_t num_attention_heads);

void check_expert_count(const char* field, int64_t num_experts, int64_t num_layers);

}  // namespace fsdp
