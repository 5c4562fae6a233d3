#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/nn/config/model_config.h"

namespace fsdp {

void check_range(int64_t minimum, int64_t maximum, std::initializer_list<IntegerField> fields) {
  for (const IntegerField& field : fields)
    if (field.value < minimum || field.value > maximum)
      throw UsageError(concat(field.name, " is ", field.value, "; it must be a whole number from ",
                              minimum, " to ", maximum));
}

void check_dims(std::initializer_list<IntegerField> fields) { check_range(1, kMaxDim, fields); }

int64_t resolved_head_dim(int64_t head_dim, int64_t hidden_size, int64_t num_attention_heads) {
  check_dims({{"hidden_size", hidden_size}, {"num_attention_heads", num_attention_heads}});
  if (head_dim != 0) {
    check_dims({{"head_dim", head_dim}});
    return head_dim;
  }
  if (hidden_size % num_attention_heads != 0)
    throw UsageError(concat("hidden_size is ", hidden_size,
                            ", which num_attention_heads = ", num_attention_heads,
                            " does not divide; change one of them or set head_dim"));
  return hidden_size / num_attention_heads;
}

void check_layers(int64_t num_hidden_layers, int64_t num_nextn_predict_layers) {
  check_range(1, kMaxLayers, {{"num_hidden_layers", num_hidden_layers}});
  check_range(0, kMaxLayers - num_hidden_layers,
              {{"num_nextn_predict_layers", num_nextn_predict_layers}});
}

void check_kv_heads(int64_t num_key_value_heads, int64_t num_attention_heads) {
  check_dims({{"num_key_value_heads", num_key_value_heads}});
  if (num_attention_heads % num_key_value_heads != 0)
    throw UsageError(concat("num_key_value_heads is ", num_key_value_heads,
                            "; it must divide num_attention_heads = ", num_attention_heads));
}

void check_expert_count(const char* field, int64_t num_experts, int64_t num_layers) {
  check_dims({{field, num_experts}});
  if (num_experts > kMaxExperts / num_layers)
    throw UsageError(concat(field, " is ", num_experts, " in ", num_layers, " layers; at most ",
                            kMaxExperts, " experts in all are supported"));
}

}  // namespace fsdp
