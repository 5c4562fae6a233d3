// A model as planning knows it: its units, their tensors, and the order they run in.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/base/dtype.h"
#include "fsdp/base/weight_recipe.h"
#include "fsdp/comm/mesh.h"
#include "fsdp/nn/config/model_config.h"

namespace fsdp {

// How the ranks of a tp group share out a tensor: each has a slice of equally many parts.
struct TpCut {
  int64_t dim = 0;
  int64_t num_parts = 1;         // along the dim, none of which is cut: heads, rows
  bool whole_if_uneven = false;  // else a tp that does not divide num_parts is refused
};

struct TensorShape {
  std::string name;            // in the checkpoint, unless it has parts
  std::vector<int64_t> shape;  // empty: 0-D, which has one element
  // Not given: the model's compute dtype. Tensors of one unit with different dtypes form different
  // parameter groups.
  std::optional<DType> dtype = std::nullopt;
  int64_t num_experts = 0;  // one below the other, which the ranks of an ep group share out
  int64_t num_chosen = 0;   // of them by each token
  std::optional<TpCut> cut = std::nullopt;  // not given: whole on every rank of a tp group
  bool is_linear = false;                   // the weight of a block's linear layer
  bool is_frozen = false;                   // else it is trained
  bool is_quantizable = false;              // by the layer that multiplies it
  std::vector<int64_t> matrix_rows = {};    // of a hidden layer (MatrixModule); empty: none
  // The names in the checkpoint of equal parts along the first dimension.
  std::vector<std::string> parts = {};

  int64_t numel() const;
};

// One gather and reduce granule: the embedding, a block, or the final norm and head.
struct UnitShape {
  std::string name;
  std::vector<TensorShape> tensors;
  // Stored in checkpoints, too, but not gathered: whole on every rank.
  std::vector<TensorShape> buffers = {};

  int64_t numel() const;
};

// A model as planning sees it. Every parameter belongs to exactly one unit; a unit may be used more
// than once in one forward pass (a tied head, the embedding and head of multi-token prediction).
struct ModelShape {
  std::string name;
  std::vector<UnitShape> units;  // in order of first use
  std::vector<int64_t> uses;     // forward order as indices into `units`, one entry per use
  // Where that is known; then tensors say how the ranks of a tp group share them.
  std::optional<ModelConfig> layers = {};
  // Where each use ends: at a later one if that is part of it, as the embedding is of a tied head.
  // Empty: all end where they begin.
  std::vector<int64_t> ends = {};

  // Elements of all units; shared parameters count once.
  int64_t parameters() const;

  // Throws UsageError unless every unit has a unique name, is used and holds tensors with unique
  // names and non-negative dimensions, and the element count fits 64 bits in bytes.
  void validate() const;
};

// UsageError for a pattern of a field that matches no tensor, with the nearest one.
[[noreturn]] void refuse_unmatched(const char* field, const std::string& pattern,
                                   const ModelShape& model);

// Tensors that have one slice per expert along their first dimension though the model does not say
// so, by their names (ShardOptions::expert_parameters): of a list of shapes, say. UsageError for a
// pattern that matches nothing, and for a tensor that cannot be of experts.
void declare_experts(ModelShape& model, const std::vector<std::string>& patterns);

// The positions (in declaration order) of a unit's tensors that share a dtype, a kind and a recipe,
// are all trained or none, and all matrices with an owner each or none: one parameter group.
struct TensorGroup {
  DType dtype;
  ParameterKind kind;
  WeightRecipe recipe;
  bool is_frozen;
  bool has_matrices;
  std::vector<int64_t> tensors;
};

// Ranks of an ep group and of a tp group.
struct ParallelSizes {
  int64_t ep = 1;
  int64_t tp = 1;
};

// Splits a unit into groups, in order of first appearance; `compute_dtype` stands in where a tensor
// names none. UsageError for tensors that the ranks cannot share evenly.
using RecipeOf = std::function<WeightRecipe(const TensorShape& tensor)>;
using HasMatrices = std::function<bool(const TensorShape& tensor)>;
std::vector<TensorGroup> group_tensors(const UnitShape& unit, DType compute_dtype,
                                       const ParallelSizes& sizes, const RecipeOf& recipe_of = {},
                                       const HasMatrices& has_matrices = {});

}  // namespace fsdp
