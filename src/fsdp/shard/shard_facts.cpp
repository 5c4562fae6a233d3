#include "fsdp/shard/shard_facts.h"

#include <optional>
#include <string>

#include "fsdp/base/text.h"

namespace fsdp {

namespace {

std::string type_fact(std::optional<at::ScalarType> type) {
  return type ? c10::toString(*type) : "nullopt";
}

void add_precision(RankFacts& facts, const PrecisionPolicy& precision) {
  const auto& [main_params, main_storage, main_grads, grad_comm] = precision;
  facts.emplace_back("precision.main_params", type_fact(main_params));
  facts.emplace_back("precision.main_storage", name_of(main_storage));
  facts.emplace_back("precision.main_grads", type_fact(main_grads));
  facts.emplace_back("precision.grad_comm", type_fact(grad_comm));
}

void add_options(RankFacts& facts, const ShardOptions& options, c10::Device device) {
  // All fields have a name here, so that this does not compile until a new one is thought of. Left
  // out are those that may differ: the number of the device, how much is offloaded (numbers do not
  // depend on it, and hosts have more memory or less), and where memory comes from.
  const auto& [strategy, precision, pool, prefetch, budget_bytes, on_move, other_units,
               user_buffers, gradient, gradient_lifetime, offload, report_nan, collectives,
               granularity, initial_values, device_wish, allocator, host_allocator] = options;
  facts.emplace_back("strategy", to_text(strategy));
  add_precision(facts, precision);
  facts.emplace_back("pool", name_of(pool));
  facts.emplace_back("prefetch", concat(prefetch));
  facts.emplace_back("budget_bytes", concat(budget_bytes));
  facts.emplace_back("on_move", choice_fact(on_move, {"kFollow", "kRefuse"}));
  facts.emplace_back("other_units", choice_fact(other_units, {"kOnDemand", "kPersistent"}));
  facts.emplace_back("user_buffers", name_of(user_buffers));
  facts.emplace_back("gradient", choice_fact(gradient, {"kMeanOverRanks", "kSumOverRanks"}));
  facts.emplace_back("gradient_lifetime", choice_fact(gradient_lifetime, {"kPersistent", "kStep"}));
  facts.emplace_back("report_nan", choice_fact(report_nan, {"kOff", "kPerParameter"}));
  facts.emplace_back("collectives", choice_fact(collectives, {"kBetweenRanks", "kAlways"}));
  facts.emplace_back("granularity", to_text(granularity));
  facts.emplace_back("initial_values",
                     choice_fact(initial_values, {"kOfEveryRank", "kOfRankZero"}));
  facts.emplace_back("device", c10::DeviceTypeName(device.type(), /*lower_case=*/true));
}

}  // namespace

RankFacts shard_facts(const ShardOptions& options, c10::Device device, const ModuleUnits& found) {
  RankFacts facts;
  add_options(facts, options, device);
  int64_t number = 0;
  for (const FoundUnit& unit : found.units)
    for (const OwnedParameter& parameter : unit.parameters) {
      const at::Tensor& tensor = parameter.tensor;
      facts.emplace_back(
          concat("parameter ", number++),
          concat(join(parameter.names, " = "), " ", c10::toString(tensor.scalar_type()), " ",
                 list_text(tensor.sizes()), tensor.requires_grad() ? "" : " frozen",
                 unit.unit == nullptr ? " outside any unit" : concat(" of unit ", unit.name)));
    }
  return facts;
}

}  // namespace fsdp
