#include "fsdp/checkpoint/amax_history.h"

#include <algorithm>

#include "fsdp/layout/quantized_bytes.h"

namespace fsdp {

namespace {

// How many rows or columns of a matrix have a scale in common; 0: all that a slice has.
int64_t block_along(const WeightRecipeRow& recipe, int64_t dim) {
  if (recipe.has_matrix_scale) return 0;
  return dim == 0 ? recipe.scale_rows : recipe.scale_columns;
}

bool is_history(const std::string& name) { return name.ends_with(kAmaxHistorySuffix); }

}  // namespace

AmaxHistory amax_history_of(WeightRecipe recipe, const std::vector<int64_t>& shape,
                            const OwnedSlice& owned) {
  const SharedScales scales = shared_scales(recipe, shape[0], shape[1]);
  if (scales.count == 0) return {{0}};
  AmaxHistory history{{1 + kAmaxHistory, scales.count / scales.per_row, scales.per_row}};
  if (owned.is_whole()) return history;
  const int64_t block = block_along(row_of(recipe), owned.dim);
  const bool is_of_whole =
      block > 0 && std::all_of(owned.sections.begin(), owned.sections.end(),
                               [&](int64_t size) { return size / owned.count % block == 0; });
  history.owned = owned;
  if (is_of_whole) {
    history.owned.dim = 1 + owned.dim;
    for (int64_t& size : history.owned.sections) size /= block;
  } else {
    history.shape.insert(history.shape.begin(), 1);
    history.owned.dim = 0;
    history.owned.sections = {owned.count};
  }
  return history;
}

std::string amax_history_name(const NameRules& rules, const std::string& parameter,
                              const std::vector<int64_t>& whole_shape) {
  const std::vector<TensorSection> sections = rules.sections(parameter, whole_shape);
  return (sections.size() == 1 ? sections.front().name : parameter) + kAmaxHistorySuffix;
}

TensorSet moments_of(const TensorCatalog& catalog, const NameRules& rules) {
  TensorSet moments = catalog.moments();
  std::erase_if(moments, [](const auto& each) { return is_history(each.first); });
  std::vector<std::string> suffixes;
  if (catalog.manifest())
    for (const std::string& moment : catalog.manifest()->optimizer.moments)
      suffixes.push_back("." + moment);
  return apply(rules, moments, suffixes);
}

TensorSet amax_histories_of(const TensorCatalog& catalog, const NameRules& rules) {
  TensorSet histories;
  for (const auto& [name, stored] : catalog.moments()) {
    if (!is_history(name)) continue;
    std::string parameter(name, 0, name.size() - std::string(kAmaxHistorySuffix).size());
    // The rules look at the shape of the parameter.
    if (const auto matrix = catalog.model().find(parameter); matrix != catalog.model().end()) {
      const auto sections = rules.sections_of_stored(parameter, matrix->second.tensor.shape);
      if (sections.size() == 1) parameter = sections.front().name;
    }
    CatalogTensor history = stored;
    history.tensor.name = parameter + kAmaxHistorySuffix;
    histories.emplace(history.tensor.name, history);
  }
  return histories;
}

}  // namespace fsdp
