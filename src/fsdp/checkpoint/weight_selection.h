// Which tensors of a checkpoint become the weights of a model as other tools know it.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fsdp/checkpoint/tensor_catalog.h"

namespace fsdp {

// The tensors a model has by its config.json.
struct ExpectedWeights {
  std::string source;  // what errors call it: the path of the file
  std::vector<NamedShape> tensors;
  // A head that shares the embedding's weight is not among the tensors; files may have it.
  bool ties_head = false;
};

inline constexpr const char* kEmbeddingName = "model.embed_tokens.weight";
inline constexpr const char* kHeadName = "lm_head.weight";

struct WeightSelection {
  std::vector<CatalogTensor> tensors;  // by the names and in the order they are to be written
  std::vector<std::string> left_out;   // not weights, or the embedding once more
};

// All tensors, in the order in which they were stored.
WeightSelection select_all(const TensorCatalog& catalog, const TensorSet& model);

// Exactly the expected ones. One that is stored under another name of a shared parameter is found
// by that; the copy of a tied head, and tables that old files hold beside weights, are left out.
// Error with all that is missing, too much or of another shape, and for a tied head that has other
// values than the embedding. `rules` are those that were applied to `model`.
WeightSelection select_weights(const TensorCatalog& catalog, const TensorSet& model,
                               const ExpectedWeights& expected, const NameRules& rules = {});

// What rules make of tensors, in their order.
std::vector<CatalogTensor> apply_in_order(const NameRules& rules,
                                          std::span<const CatalogTensor> tensors);

}  // namespace fsdp
