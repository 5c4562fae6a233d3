#include "fsdp/shard/agreement.h"

#include <ATen/ATen.h>

#include <optional>
#include <string>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"

namespace fsdp {

namespace {

std::string type_fact(std::optional<at::ScalarType> type) {
  return type ? c10::toString(*type) : "nullopt";
}

void add_precision(RankFacts& facts, const PrecisionPolicy& precision) {
  const auto& [params, main_params, main_storage, main_grads, grad_comm] = precision;
  facts.emplace_back("precision.params", type_fact(params));
  facts.emplace_back("precision.main_params", type_fact(main_params));
  facts.emplace_back("precision.main_storage", name_of(main_storage));
  facts.emplace_back("precision.main_grads", type_fact(main_grads));
  facts.emplace_back("precision.grad_comm", type_fact(grad_comm));
}

void add_quantization(RankFacts& facts, const Quantization& quantization) {
  const auto& [recipe, except, scaling, weight_gradient] = quantization;
  facts.emplace_back("quantization.recipe", row_of(recipe).name);
  facts.emplace_back("quantization.except", join(except, ", "));
  facts.emplace_back("quantization.scaling", name_of(scaling));
  facts.emplace_back("quantization.weight_gradient",
                     choice_fact(weight_gradient, {"kQuantized", "kPlain"}));
}

void add_matrices(RankFacts& facts, const WholeMatrices& matrices) {
  const auto& [declared, named, except] = matrices;
  std::vector<std::string> texts;
  for (const auto& [pattern, rows] : named)
    texts.push_back(rows.empty() ? pattern : concat(pattern, " of rows ", list_text(rows)));
  facts.emplace_back("matrices.declared", declared ? "true" : "false");
  facts.emplace_back("matrices.named", join(texts, ", "));
  facts.emplace_back("matrices.except", join(except, ", "));
}

void add_options(RankFacts& facts, const ShardOptions& options, c10::Device device) {
  // Names all fields, so that a new field does not compile until it is added here. Fields that may
  // differ are left out: the number of the device, how much is offloaded (numbers do not depend on
  // it, and hosts have more memory or less), and the allocators.
  const auto& [strategy, units, expert_parameters, tensor_parameters, precision, quantization, pool,
               prefetch, pool_budget_bytes, on_move, other_units, user_buffers, gradient,
               gradient_lifetime, offload, report_nan, collectives, granularity, matrices,
               initial_values, device_wish, allocator, host_allocator] = options;
  facts.emplace_back("strategy", to_text(strategy));
  facts.emplace_back("units", join(units, ", "));
  facts.emplace_back("expert_parameters", join(expert_parameters, ", "));
  facts.emplace_back("tensor_parameters", join(to_texts(tensor_parameters), ", "));
  add_precision(facts, precision);
  add_quantization(facts, quantization);
  facts.emplace_back("pool", name_of(pool));
  facts.emplace_back("prefetch", concat(prefetch));
  facts.emplace_back("pool_budget_bytes", concat(pool_budget_bytes));
  facts.emplace_back("on_move", choice_fact(on_move, {"kFollow", "kRefuse"}));
  facts.emplace_back("other_units", choice_fact(other_units, {"kOnDemand", "kPersistent"}));
  facts.emplace_back("user_buffers", name_of(user_buffers));
  facts.emplace_back("gradient", choice_fact(gradient, {"kMeanOverRanks", "kSumOverRanks"}));
  facts.emplace_back("gradient_lifetime", choice_fact(gradient_lifetime, {"kPersistent", "kStep"}));
  facts.emplace_back("report_nan", choice_fact(report_nan, {"kOff", "kPerParameter"}));
  facts.emplace_back("collectives", choice_fact(collectives, {"kBetweenRanks", "kAlways"}));
  facts.emplace_back("granularity", to_text(granularity));
  add_matrices(facts, matrices);
  facts.emplace_back("initial_values",
                     choice_fact(initial_values, {"kOfEveryRank", "kOfRankZero"}));
  facts.emplace_back("device", c10::DeviceTypeName(device.type(), /*lower_case=*/true));
}

at::Tensor bits_of(const at::Tensor& flat) {
  switch (flat.element_size()) {
    case 1:
      return flat.view(at::kByte);
    case 2:
      return flat.view(at::kShort);
    case 4:
      return flat.view(at::kInt);
    default:
      return flat.view(at::kLong);
  }
}

// The sum of the elements' bits, exact and independent of the order of summation.
at::Tensor checksum(const at::Tensor& value) {
  // Piece by piece, because a wide sum of narrow numbers on the CPU first makes a wide copy.
  constexpr int64_t kPiece = int64_t{1} << 20;
  const at::Tensor bits = bits_of(value.detach().contiguous().view({-1}));
  at::Tensor sum = at::zeros({}, bits.options().dtype(at::kLong));
  for (const at::Tensor& piece : bits.split(kPiece)) sum += piece.sum(at::kLong);
  return sum;
}

}  // namespace

RankFacts shard_facts(const ShardOptions& options, c10::Device device, const ModuleUnits& found) {
  RankFacts facts;
  add_options(facts, options, device);
  int64_t number = 0;
  for (const FoundUnit& unit : found.units)
    for (const OwnedParameter& parameter : unit.parameters) {
      const at::Tensor& tensor = parameter.tensor;
      const std::string declared = to_text(parameter.declared);
      facts.emplace_back(
          concat("parameter ", number++),
          concat(join(parameter.names, " = "), " ", c10::toString(tensor.scalar_type()), " ",
                 list_text(tensor.sizes()), tensor.requires_grad() ? "" : " frozen",
                 declared.empty() ? "" : " ", declared,
                 unit.unit == nullptr ? " outside any unit" : concat(" of unit ", unit.name)));
    }
  return facts;
}

bool ValueAgreement::are_made_here() const {
  return from_ == InitialValues::kOfEveryRank ||
         (mesh_.outer().rank() == 0 && mesh_.inner().rank() == 0);
}

void ValueAgreement::note(const at::Tensor& value, const std::string& name) {
  if (mesh_.size() == 1 || from_ != InitialValues::kOfEveryRank) return;
  names_.push_back(name);
  checksums_.push_back(checksum(value));
}

at::Tensor ValueAgreement::agreed(const at::Tensor& value, const std::string& name) const {
  if (mesh_.size() == 1 || from_ == InitialValues::kOfEveryRank) return value;
  const at::Tensor agreed = value.detach().contiguous();
  // Down the column of rank 0, then along every row.
  for (const MeshAxis* axis : {&mesh_.outer(), &mesh_.inner()})
    if (axis->size() > 1) axis->gather().broadcast(agreed, 0, name).wait();
  return agreed;
}

void ValueAgreement::check_agreement() {
  if (checksums_.empty()) return;
  const at::Tensor own = at::stack(std::exchange(checksums_, {}));
  const std::vector<std::string> names = std::exchange(names_, {});
  at::Tensor lowest = own.clone();
  at::Tensor highest = own.clone();
  for (const MeshAxis* axis : {&mesh_.inner(), &mesh_.outer()}) {
    if (axis->size() == 1) continue;
    axis->gather().all_reduce(lowest, {.op = ReduceOp::kMin}, "initial values").wait();
    axis->gather().all_reduce(highest, {.op = ReduceOp::kMax}, "initial values").wait();
  }
  const at::Tensor differs = lowest.ne(highest).cpu();
  for (size_t i = 0; i < names.size(); ++i)
    FSDP_CHECK(!differs[static_cast<int64_t>(i)].item<bool>(), "parameter '", names[i],
               "' has different values on different ranks; build the model from the same seed or "
               "file everywhere, or set initial_values to kOfRankZero");
}

}  // namespace fsdp
