// Numbers that modules state about themselves (ranks, head counts, switches), for rules about the
// names and sections of their tensors.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp {

// The fields of the modules a pattern describes, and of everything inside them.
struct FieldsOfModules {
  // Of module paths: `*` is any text (dots too), `?` one character; "decoder.layers.*", "*.mtp".
  std::string modules;
  std::map<std::string, int64_t> values;

  friend bool operator==(const FieldsOfModules&, const FieldsOfModules&) = default;
};

// Where several patterns with a field describe a module, the one with most letters is meant (all
// but `*` and `?`), and of equally long ones the last.
using ModuleFields = std::vector<FieldsOfModules>;

// A field of the module that owns a tensor; nullopt where nobody states it.
std::optional<int64_t> field_of(const ModuleFields& fields, std::string_view tensor,
                                const std::string& field);

// A sum of whole numbers and fields: "24", "kv_lora_rank + qk_pos_emb_head_dim".
class FieldSum {
 public:
  // UsageError when the text is no such sum.
  explicit FieldSum(std::string_view text);

  // Error when the tensor's module does not state one of the fields.
  int64_t value(const ModuleFields& fields, std::string_view tensor) const;

 private:
  int64_t constant_ = 0;
  std::vector<std::string> fields_;
};

}  // namespace fsdp
