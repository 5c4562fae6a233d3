#include "fsdp/shard/parameter_matrices.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "fsdp/base/check.h"
#include "fsdp/base/glob.h"
#include "fsdp/base/text.h"

namespace fsdp {

namespace {

bool is_called(const OwnedParameter& parameter, const std::string& pattern) {
  return std::any_of(parameter.names.begin(), parameter.names.end(),
                     [&](const std::string& name) { return matches_glob(pattern, name); });
}

void refuse_unused(const char* option, const std::string& pattern, const ModuleUnits& found) {
  std::vector<std::string> names;
  for (const FoundUnit& unit : found.units)
    for (const OwnedParameter& parameter : unit.parameters)
      if (parameter.tensor.dim() >= 2)
        names.insert(names.end(), parameter.names.begin(), parameter.names.end());
  const std::string guess = nearest_to_glob(pattern, names);
  throw UsageError(concat(option, " has '", pattern, "', but no trained matrix of the model is ",
                          "called so",
                          guess.empty() ? "" : concat("; did you mean '", guess, "'?")));
}

}  // namespace

std::vector<int64_t> ParameterMatrices::wanted_rows(const OwnedParameter& parameter) {
  for (size_t i = 0; i < options_.except.size(); ++i)
    if (is_called(parameter, options_.except[i])) {
      is_excepted_[i] = true;
      return {};
    }
  for (size_t i = 0; i < options_.named.size(); ++i) {
    if (!is_called(parameter, options_.named[i].pattern)) continue;
    is_named_[i] = true;
    if (!options_.named[i].rows.empty()) return options_.named[i].rows;
    if (!parameter.matrix_rows.empty()) return parameter.matrix_rows;
    return {parameter.tensor.size(-2)};
  }
  return options_.declared ? parameter.matrix_rows : std::vector<int64_t>();
}

std::vector<int64_t> ParameterMatrices::rows_of(const OwnedParameter& parameter,
                                                const PlacedParameter& placed) {
  const at::Tensor& tensor = parameter.tensor;
  if (tensor.dim() < 2 || tensor.numel() == 0 || !tensor.requires_grad() ||
      !at::isFloatingType(tensor.scalar_type()))
    return {};
  const std::vector<int64_t> rows = wanted_rows(parameter);
  if (rows.empty()) return rows;
  const std::string& name = parameter.names.front();
  if (placed.kind == ParameterKind::kTensor)
    throw UsageError(concat("parameter '", name, "' is cut over the ", placed.owned.count,
                            " ranks of a tp group, so none has a whole matrix of it; leave tp out, "
                            "or name it in matrices.except"));
  const bool is_bad = std::any_of(rows.begin(), rows.end(), [](int64_t n) { return n < 1; });
  const int64_t period = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  const std::vector<int64_t> owned = owned_shape(placed.owned, tensor.sizes());
  const int64_t columns = owned.back();
  const int64_t all_rows =
      std::accumulate(owned.begin(), owned.end() - 1, int64_t{1}, std::multiplies<>());
  if (is_bad || all_rows % period != 0)
    throw UsageError(concat("matrices of ", list_text(rows), " rows do not fill parameter '", name,
                            "', which has ", all_rows, " rows of ", columns,
                            " on a rank; correct its entry in matrices.named"));
  found_any_ = true;
  return rows;
}

void ParameterMatrices::check_all_are_used(const ModuleUnits& found) const {
  for (size_t i = 0; i < is_named_.size(); ++i)
    if (!is_named_[i]) refuse_unused("matrices.named", options_.named[i].pattern, found);
  for (size_t i = 0; i < is_excepted_.size(); ++i)
    if (!is_excepted_[i]) refuse_unused("matrices.except", options_.except[i], found);
  if (found_any_ || options_ == WholeMatrices{}) return;
  throw UsageError(
      "matrices is set, but the model has no trained matrix that it finds; linear layers of "
      "fsdp::nn and modules that implement fsdp::MatrixModule declare theirs, others are named in "
      "matrices.named");
}

}  // namespace fsdp
