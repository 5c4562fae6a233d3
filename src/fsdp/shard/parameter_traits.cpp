#include "fsdp/shard/parameter_traits.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/shard/module_units.h"
#include "fsdp/shard/option_fields.h"

namespace fsdp {

namespace {

// One parameter that the ranks of an axis share out.
struct SharedParameter {
  const std::string& name;
  std::span<const int64_t> shape;
  const MeshAxis& axis;

  [[noreturn]] void refuse(const std::string& why) const {
    throw UsageError(concat("parameter '", name, "' of shape ", list_text(shape), " ", why));
  }
};

std::vector<int64_t> sections_of(const TpShard& cut, const SharedParameter& parameter) {
  const auto num_dims = static_cast<int64_t>(parameter.shape.size());
  if (cut.dim < 0 || cut.dim >= num_dims)
    parameter.refuse(concat("is cut over tp along dim ", cut.dim, "; its dims are 0 to ",
                            num_dims - 1, num_dims == 0 ? ", that is none" : ""));
  const int64_t size = parameter.shape[static_cast<size_t>(cut.dim)];
  if (cut.section_sizes.empty()) {
    if (cut.num_sections < 1 || size % cut.num_sections != 0)
      parameter.refuse(concat("has num_sections ", cut.num_sections, " along dim ", cut.dim,
                              ", which must divide its size ", size));
    return std::vector<int64_t>(static_cast<size_t>(cut.num_sections), size / cut.num_sections);
  }
  if (cut.num_sections != 1)
    parameter.refuse(concat("has num_sections ", cut.num_sections,
                            " and section_sizes; declare one of the two"));
  const int64_t sum =
      std::accumulate(cut.section_sizes.begin(), cut.section_sizes.end(), int64_t{0});
  if (sum != size)
    parameter.refuse(concat("has section_sizes ", list_text(cut.section_sizes), " along dim ",
                            cut.dim, ", whose sum is ", sum, " and not ", size));
  return cut.section_sizes;
}

DeclaredPlacement as_declared(const TpPlacement& placement) {
  return std::visit([](const auto& each) { return DeclaredPlacement(each); }, placement);
}

bool is_per_expert(const DeclaredPlacement& declared) {
  return std::holds_alternative<PerExpert>(declared);
}

PlacedParameter placed_as(TpEqual, const Mesh&, const std::string&, std::span<const int64_t>) {
  return {};
}

PlacedParameter placed_as(TpPartial, const Mesh& mesh, const std::string&,
                          std::span<const int64_t>) {
  return {mesh.tp() == nullptr ? ParameterKind::kEqual : ParameterKind::kPartial};
}

PlacedParameter placed_as(const TpShard& cut, const Mesh& mesh, const std::string& name,
                          std::span<const int64_t> shape) {
  const MeshAxis* tp = mesh.tp();
  if (tp == nullptr) return {};
  const SharedParameter parameter{name, shape, *tp};
  std::vector<int64_t> sections = sections_of(cut, parameter);
  for (const int64_t section : sections) {
    if (section % tp->size() == 0) continue;
    if (cut.partial_if_uneven) return placed_as(TpPartial{}, mesh, name, shape);
    parameter.refuse(concat(sections.size() == 1 ? "has a size of " : "has a section of ", section,
                            " along dim ", cut.dim, ", which tp ", tp->size(),
                            " ranks cannot share evenly; choose a tp that divides it"));
  }
  return {ParameterKind::kTensor, {tp->rank(), tp->size(), cut.dim, std::move(sections)}};
}

PlacedParameter placed_as(PerExpert, const Mesh& mesh, const std::string& name,
                          std::span<const int64_t> shape) {
  const MeshAxis* ep = mesh.ep();
  // Every rank has all experts: those of a tp group have tokens of their own.
  if (ep == nullptr) return placed_as(TpPartial{}, mesh, name, shape);
  const SharedParameter parameter{name, shape, *ep};
  if (shape.empty()) parameter.refuse("has no dimension, but one slice per expert; give it one");
  const int64_t num_experts = shape.front();
  if (num_experts % ep->size() != 0)
    parameter.refuse(concat("has one slice per expert, ", num_experts, ", which ep ", ep->size(),
                            " ranks cannot share evenly (", num_experts, " = ", ep->size(), " x ",
                            num_experts / ep->size(), " + ", num_experts % ep->size(),
                            "); choose an ep that divides the number of experts"));
  return {ParameterKind::kExpert, {ep->rank(), ep->size(), 0, {shape.front()}}};
}

bool is_called(const OwnedParameter& parameter, const std::string& pattern) {
  return std::any_of(parameter.names.begin(), parameter.names.end(),
                     [&](const std::string& name) { return matches_glob(pattern, name); });
}

// Whether a pattern of `except` matches the parameter; marks those that do.
bool is_excepted(const OwnedParameter& parameter, const std::vector<std::string>& except,
                 std::vector<bool>& is_used) {
  bool any = false;
  for (size_t i = 0; i < except.size(); ++i)
    if (is_called(parameter, except[i])) any = is_used[i] = true;
  return any;
}

// For a pattern of an option that matches no parameter; those that it might mean have at least so
// many dimensions.
[[noreturn]] void refuse_unused(const char* option, const std::string& pattern, const char* what,
                                const ModuleUnits& found, int64_t least_dims) {
  std::vector<std::string> names;
  for (const FoundUnit& unit : found.units)
    for (const OwnedParameter& parameter : unit.parameters)
      if (parameter.tensor.dim() >= least_dims)
        names.insert(names.end(), parameter.names.begin(), parameter.names.end());
  const std::string guess = nearest_to_glob(pattern, names);
  throw UsageError(concat(option, " has '", pattern, "', but no ", what,
                          " of the model is called so",
                          guess.empty() ? "" : concat("; did you mean '", guess, "'?")));
}

}  // namespace

// --- placement -----------------------------------------------------------------------------------

DeclaredPlacement declared_placement(const torch::nn::Module& module,
                                     const std::string& parameter) {
  const auto* tensors = dynamic_cast<const TensorParallelModule*>(&module);
  const bool has_experts = dynamic_cast<const ExpertModule*>(&module) != nullptr;
  if (has_experts && tensors != nullptr)
    throw UsageError(concat("the module of parameter '", parameter,
                            "' is an ExpertModule and a TensorParallelModule; its parameters can "
                            "be cut over one of ep and tp: derive it from one of them"));
  if (has_experts) return PerExpert{};
  if (tensors == nullptr) return TpEqual{};
  return as_declared(tensors->tp_placement(parameter));
}

std::string to_text(const DeclaredPlacement& declared) {
  struct Words {
    std::string operator()(TpEqual) const { return ""; }
    std::string operator()(TpPartial) const { return "partial over tp"; }
    std::string operator()(PerExpert) const { return "of experts"; }
    std::string operator()(const TpShard& cut) const {
      return concat(
          "cut over tp along dim ", cut.dim,
          cut.num_sections == 1 ? "" : concat(" in ", cut.num_sections, " sections"),
          cut.section_sizes.empty() ? "" : concat(" in sections ", list_text(cut.section_sizes)),
          cut.partial_if_uneven ? ", or partial" : "");
    }
  };
  return std::visit(Words{}, declared);
}

std::string to_text(const TensorParameters& named) {
  const std::string placement = to_text(as_declared(named.placement));
  return concat(named.pattern, " ", placement.empty() ? "equal over tp" : placement);
}

std::string NamedPlacements::Pattern::text() const {
  const std::string words = to_text(placement);
  return concat("'", words.empty() ? "equal over tp" : words, "' by the pattern '", glob, "' in ",
                option);
}

NamedPlacements::NamedPlacements(const ShardOptions& options) {
  for (const std::string& glob : options.expert_parameters)
    patterns_.push_back({"expert_parameters", glob, PerExpert{}});
  for (const TensorParameters& each : options.tensor_parameters)
    patterns_.push_back({"tensor_parameters", each.pattern, as_declared(each.placement)});
}

DeclaredPlacement NamedPlacements::placement_of(const std::string& parameter,
                                                const DeclaredPlacement& by_module) {
  const Pattern* counts = nullptr;
  for (Pattern& each : patterns_) {
    if (!matches_glob(each.glob, parameter)) continue;
    each.is_used = true;
    if (counts == nullptr) counts = &each;
    // Patterns of tensor_parameters may narrow each other; a slice per expert goes with none.
    if (is_per_expert(counts->placement) != is_per_expert(each.placement))
      throw UsageError(concat("parameter '", parameter, "' is ", counts->text(), " and ",
                              each.text(),
                              "; it can be cut over one of ep and tp: narrow one of "
                              "the patterns"));
  }
  if (counts == nullptr) return by_module;
  if (by_module != DeclaredPlacement(TpEqual{}) && by_module != counts->placement)
    throw UsageError(concat("parameter '", parameter, "' is '", to_text(by_module),
                            "' by its module and ", counts->text(),
                            "; narrow the pattern, which is for modules that say nothing"));
  return counts->placement;
}

void NamedPlacements::check_all_are_used(const std::vector<std::string>& names) const {
  for (const Pattern& each : patterns_) {
    if (each.is_used) continue;
    const std::string guess = nearest_to_glob(each.glob, names);
    throw UsageError(concat(each.option, " has '", each.glob, "', which matches no parameter",
                            guess.empty() ? "" : concat("; did you mean '", guess, "'?")));
  }
}

PlacedParameter place_on(const Mesh& mesh, const DeclaredPlacement& declared,
                         const std::string& name, std::span<const int64_t> shape) {
  return std::visit([&](const auto& each) { return placed_as(each, mesh, name, shape); }, declared);
}

bool wants_ranks(const torch::nn::Module& module) {
  return dynamic_cast<const ExpertModule*>(&module) != nullptr ||
         dynamic_cast<const TensorParallelModule*>(&module) != nullptr;
}

void join_ranks(torch::nn::Module& module, const Mesh& mesh) {
  if (auto* experts = dynamic_cast<ExpertModule*>(&module); experts != nullptr && mesh.ep())
    experts->join(*mesh.ep());
  if (auto* tensors = dynamic_cast<TensorParallelModule*>(&module); tensors != nullptr && mesh.tp())
    tensors->join(*mesh.tp());
}

// --- recipes -------------------------------------------------------------------------------------

WeightRecipe ParameterRecipes::of(const OwnedParameter& parameter, const OwnedSlice& owned) {
  const bool is_excepted_by_name = is_excepted(parameter, options_.except, is_used_);
  const at::Tensor& tensor = parameter.tensor;
  if (options_.recipe == WeightRecipe::kPlain || is_excepted_by_name || !parameter.is_quantizable ||
      (!tensor.requires_grad() && !options_.frozen) || tensor.dim() != 2)
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
  for (size_t i = 0; i < is_used_.size(); ++i)
    if (!is_used_[i])
      refuse_unused("quantization.except", options_.except[i], "parameter", found, 0);
  if (options_.recipe == WeightRecipe::kPlain || quantizes_) return;
  throw UsageError(concat("quantization.recipe is ", row_of(options_.recipe).name,
                          ", but the model has no trained matrix that can be quantised; linear "
                          "layers of fsdp::nn can, and modules that implement "
                          "fsdp::QuantizableModule"));
}

// --- matrices ------------------------------------------------------------------------------------

std::vector<int64_t> ParameterMatrices::wanted_rows(const OwnedParameter& parameter) {
  if (is_excepted(parameter, options_.except, is_excepted_)) return {};
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
    if (!is_named_[i])
      refuse_unused("matrices.named", options_.named[i].pattern, "trained matrix", found, 2);
  for (size_t i = 0; i < is_excepted_.size(); ++i)
    if (!is_excepted_[i])
      refuse_unused("matrices.except", options_.except[i], "trained matrix", found, 2);
  if (found_any_ || options_ == WholeMatrices{}) return;
  throw UsageError(
      "matrices is set, but the model has no trained matrix that it finds; linear layers of "
      "fsdp::nn and modules that implement fsdp::MatrixModule declare theirs, others are named in "
      "matrices.named");
}

}  // namespace fsdp
