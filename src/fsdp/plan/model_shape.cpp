#include "fsdp/plan/model_shape.h"

#include <algorithm>
#include <unordered_set>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/text.h"

namespace fsdp {

namespace {

[[noreturn]] void refuse(const std::string& message) { throw UsageError(message); }

void validate_tensor(const TensorShape& tensor) {
  if (tensor.name.empty()) refuse("a tensor has no name; give every tensor one");
  for (const int64_t dim : tensor.shape)
    if (dim < 0)
      refuse(concat("tensor '", shown(tensor.name), "' has shape ", list_text(tensor.shape),
                    "; no dimension may be negative"));
}

void validate_uses(const ModelShape& model) {
  std::vector<bool> used(model.units.size(), false);
  for (const int64_t use : model.uses) {
    if (use < 0 || use >= static_cast<int64_t>(model.units.size()))
      refuse(concat("uses of model '", shown(model.name), "' name unit ", use, ", but there are ",
                    model.units.size(), " units"));
    used[static_cast<size_t>(use)] = true;
  }
  for (size_t i = 0; i < used.size(); ++i)
    if (!used[i])
      refuse(concat("unit '", shown(model.units[i].name), "' of model '", shown(model.name),
                    "' is never used; add it to 'uses' or remove it"));
}

[[noreturn]] void refuse_sharing(const TensorShape& tensor, const char* axis, int64_t ranks,
                                 int64_t num_parts, const char* parts) {
  refuse(concat(axis, " is ", ranks, ", but '", tensor.name, "' has ", num_parts, " ", parts, "; ",
                axis, " must divide their number"));
}

// Places it like the engine: parameter_traits.h.
ParameterKind kind_of(const TensorShape& tensor, const ParallelSizes& sizes) {
  if (tensor.num_experts > 0 && sizes.ep > 1) {
    if (tensor.num_experts % sizes.ep != 0)
      refuse_sharing(tensor, "ep", sizes.ep, tensor.num_experts, "experts");
    return ParameterKind::kExpert;
  }
  if (sizes.tp == 1) return ParameterKind::kEqual;
  if (!tensor.cut) return ParameterKind::kPartial;
  if (tensor.cut->num_parts % sizes.tp == 0) return ParameterKind::kTensor;
  if (tensor.cut->whole_if_uneven) return ParameterKind::kPartial;
  refuse_sharing(tensor, "tp", sizes.tp, tensor.cut->num_parts, "parts that are not cut");
}

}  // namespace

int64_t TensorShape::numel() const {
  int64_t product = 1;
  for (const int64_t dim : shape) product = checked_mul(product, dim);
  return product;
}

int64_t UnitShape::numel() const {
  int64_t sum = 0;
  for (const TensorShape& tensor : tensors) sum = checked_add(sum, tensor.numel());
  return sum;
}

int64_t ModelShape::parameters() const {
  int64_t sum = 0;
  for (const UnitShape& unit : units) sum = checked_add(sum, unit.numel());
  return sum;
}

void ModelShape::validate() const {
  if (units.empty()) refuse(concat("model '", shown(name), "' has no units; give at least one"));
  std::unordered_set<std::string> unit_names;
  std::unordered_set<std::string> tensor_names;
  for (const UnitShape& unit : units) {
    if (unit.name.empty()) refuse("a unit has no name; give every unit one");
    if (!unit_names.insert(unit.name).second)
      refuse(concat("unit name '", shown(unit.name), "' appears twice; names must be unique"));
    if (unit.tensors.empty())
      refuse(concat("unit '", shown(unit.name), "' has no tensors; give at least one"));
    for (const TensorShape& tensor : unit.tensors) {
      validate_tensor(tensor);
      if (!tensor_names.insert(tensor.name).second)
        refuse(
            concat("tensor name '", shown(tensor.name), "' appears twice; names must be unique"));
    }
  }
  validate_uses(*this);
  FSDP_CHECK(ends.empty() || ends.size() == uses.size(), "a model has ", uses.size(), " uses and ",
             ends.size(), " ends");
  // The widest buffers have 8 bytes per element; what fits here fits everywhere later.
  constexpr int64_t kMaxElements = INT64_MAX / 16;
  const auto fits = [&] {
    try {
      return parameters() <= kMaxElements;
    } catch (const Error&) {
      return false;
    }
  };
  if (!fits())
    refuse(concat("model '", shown(name), "' has more than ", kMaxElements,
                  " parameters; check its shapes"));
}

void refuse_unmatched(const char* field, const std::string& pattern, const ModelShape& model) {
  std::vector<std::string> names;
  for (const UnitShape& unit : model.units)
    for (const TensorShape& tensor : unit.tensors) names.push_back(tensor.name);
  const std::string guess = nearest_to_glob(pattern, names);
  refuse(concat(field, " has '", shown(pattern), "', which matches no tensor of '",
                shown(model.name), "'",
                guess.empty() ? "" : concat("; did you mean '", shown(guess), "'?")));
}

void declare_experts(ModelShape& model, const std::vector<std::string>& patterns) {
  for (const std::string& pattern : patterns) {
    bool is_used = false;
    for (UnitShape& unit : model.units)
      for (TensorShape& tensor : unit.tensors) {
        if (!matches_glob(pattern, tensor.name)) continue;
        is_used = true;
        const std::string what = concat("expert_parameters has '", pattern, "', which matches '",
                                        shown(tensor.name), "' of shape ", list_text(tensor.shape));
        if (tensor.shape.empty())
          refuse(what + "; experts need a first dimension: narrow the pattern");
        if (tensor.cut)
          refuse(what +
                 "; the ranks of a tp group cut it, and it can be cut over one of ep and "
                 "tp: narrow the pattern");
        tensor.num_experts = tensor.shape.front();
      }
    if (!is_used) refuse_unmatched("expert_parameters", pattern, model);
  }
}

std::vector<TensorGroup> group_tensors(const UnitShape& unit, DType compute_dtype,
                                       const ParallelSizes& sizes, const RecipeOf& recipe_of,
                                       const HasMatrices& has_matrices) {
  std::vector<TensorGroup> groups;
  for (size_t i = 0; i < unit.tensors.size(); ++i) {
    const DType dtype = unit.tensors[i].dtype.value_or(compute_dtype);
    const ParameterKind kind = kind_of(unit.tensors[i], sizes);
    const WeightRecipe recipe = recipe_of ? recipe_of(unit.tensors[i]) : WeightRecipe::kPlain;
    const bool is_frozen = unit.tensors[i].is_frozen;
    const bool of_matrices = has_matrices && !is_frozen && has_matrices(unit.tensors[i]);
    auto group = std::find_if(groups.begin(), groups.end(), [&](const TensorGroup& g) {
      return g.dtype == dtype && g.kind == kind && g.recipe == recipe && g.is_frozen == is_frozen &&
             g.has_matrices == of_matrices;
    });
    if (group == groups.end())
      group =
          groups.insert(groups.end(), TensorGroup{dtype, kind, recipe, is_frozen, of_matrices, {}});
    group->tensors.push_back(static_cast<int64_t>(i));
  }
  return groups;
}

}  // namespace fsdp
