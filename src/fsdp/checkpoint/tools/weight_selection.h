// Selects the tensors of a checkpoint that are the weights of a model as other tools know it.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fsdp/checkpoint/format/tensor_catalog.h"

namespace fsdp {

// The tensors that config.json gives a model.
struct ExpectedWeights {
  std::string source;  // the path of the file, for errors
  std::vector<NamedShape> tensors;
  // A head that shares the embedding's weight is not in `tensors`, but files may have it.
  bool ties_head = false;
};

inline constexpr const char* kEmbeddingName = "model.embed_tokens.weight";
inline constexpr const char* kHeadName = "lm_head.weight";

struct WeightSelection {
  std::vector<CatalogTensor> tensors;  // with the names and in the order of the files to be written
  std::vector<std::string> left_out;   // not weights, or a copy of the embedding
};

// All tensors, in the order in which they are stored.
WeightSelection select_all(const TensorCatalog& catalog, const TensorSet& model);

// Exactly the expected tensors. Finds one that is stored under another name of a shared parameter;
// leaves out the copy of a tied head, and tables that old files hold beside weights. Throws an
// Error with all that is missing, too much or of another shape, and for a tied head whose values
// differ from the embedding. `rules` are those that were applied to `model`.
WeightSelection select_weights(const TensorCatalog& catalog, const TensorSet& model,
                               const ExpectedWeights& expected, const NameRules& rules = {});

// The sections that rules make of tensors, in the order of the tensors.
std::vector<CatalogTensor> apply_in_order(const NameRules& rules,
                                          std::span<const CatalogTensor> tensors);

}  // namespace fsdp
