#include "fsdp/shard/parameter_recipes.h"

#include <string>

#include "fsdp/base/check.h"
#include "fsdp/base/glob.h"
#include "fsdp/base/text.h"

namespace fsdp {

bool ParameterRecipes::is_excepted(const OwnedParameter& parameter) {
  bool any = false;
  for (size_t i = 0; i < options_.except.size(); ++i)
    for (const std::string& name : parameter.names)
      if (matches_glob(options_.except[i], name)) any = is_used_[i] = true;
  return any;
}

WeightRecipe ParameterRecipes::of(const OwnedParameter& parameter, const OwnedSlice& owned) {
  const bool is_excepted_by_name = is_excepted(parameter);
  const at::Tensor& tensor = parameter.tensor;
  if (options_.recipe == WeightRecipe::kPlain || is_excepted_by_name || !parameter.is_quantizable ||
      !tensor.requires_grad() || tensor.dim() != 2)
    return WeightRecipe::kPlain;
  const WeightRecipeRow& row = row_of(options_.recipe);
  const std::vector<int64_t> shape = owned_shape(owned, tensor.sizes());
  if (row.scale_bytes == 1 && shape[1] % row.scale_columns != 0)
    throw UsageError(concat("parameter '", parameter.names.front(), "' has ", shape[1],
                            " columns on a rank, which blocks of ", row.scale_columns, " (",
                            row.name,
                            ") do not divide; leave it plain by quantization.except, or choose "
                            "another recipe"));
  quantizes_ = true;
  return options_.recipe;
}

void ParameterRecipes::check_all_are_used(const ModuleUnits& found) const {
  std::vector<std::string> names;
  for (const FoundUnit& unit : found.units)
    for (const OwnedParameter& parameter : unit.parameters)
      names.insert(names.end(), parameter.names.begin(), parameter.names.end());
  for (size_t i = 0; i < is_used_.size(); ++i) {
    if (is_used_[i]) continue;
    const std::string guess = nearest_to_glob(options_.except[i], names);
    throw UsageError(concat("quantization.except has '", options_.except[i],
                            "', but no parameter of the model is called so",
                            guess.empty() ? "" : concat("; did you mean '", guess, "'?")));
  }
  if (options_.recipe == WeightRecipe::kPlain || quantizes_) return;
  throw UsageError(concat("quantization.recipe is ", row_of(options_.recipe).name,
                          ", but the model has no trained matrix that can be quantised; linear "
                          "layers of fsdp::nn can, and modules that implement "
                          "fsdp::QuantizableModule"));
}

}  // namespace fsdp
