#include "fsdp/checkpoint/name_rules.h"

namespace fsdp {

std::vector<TensorSection> NameRules::sections(const std::string& name,
                                               std::span<const int64_t> shape) const {
  return {{.name = name,
           .shape = std::vector<int64_t>(shape.begin(), shape.end()),
           .offsets = std::vector<int64_t>(shape.size(), 0)}};
}

std::vector<TensorSection> NameRules::sections_of_stored(const std::string& name,
                                                         std::span<const int64_t> shape) const {
  return sections(name, shape);
}

}  // namespace fsdp
