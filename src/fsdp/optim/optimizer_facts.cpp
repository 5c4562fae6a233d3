// Every struct is taken apart by the names of all its fields, so that this does not compile until a
// new field is thought of.
#include "fsdp/optim/optimizer_facts.h"

#include <string>

#include "fsdp/base/text.h"

namespace fsdp {

namespace {

// Rounding and seed are those of StepOptions.
void add(RankFacts& facts, const AdamWRule& rule) {
  const auto& [beta1, beta2, eps, rounding, seed] = rule;
  facts.emplace_back("beta1", number_fact(beta1));
  facts.emplace_back("beta2", number_fact(beta2));
  facts.emplace_back("eps", number_fact(eps));
}

void add(RankFacts& facts, const SgdRule& rule) {
  const auto& [momentum, nesterov, rounding, seed] = rule;
  facts.emplace_back("momentum", number_fact(momentum));
  facts.emplace_back("nesterov", nesterov ? "true" : "false");
}

void add(RankFacts& facts, const StepOptions& step) {
  const auto& [max_norm, measures_norm, on_nonfinite, loss_scale, updates, rounding, seed] = step;
  const auto& [initial, backoff, growth, interval] = loss_scale;
  facts.emplace_back("step.max_norm", number_fact(max_norm));
  facts.emplace_back("step.measures_norm", measures_norm ? "true" : "false");
  facts.emplace_back("step.on_nonfinite", choice_fact(on_nonfinite, {"kUpdate", "kSkip"}));
  facts.emplace_back("step.loss_scale.initial", number_fact(initial));
  facts.emplace_back("step.loss_scale.backoff", number_fact(backoff));
  facts.emplace_back("step.loss_scale.growth", number_fact(growth));
  facts.emplace_back("step.loss_scale.interval", concat(interval));
  facts.emplace_back("step.updates", choice_fact(updates, {"kHidden", "kBlocking"}));
  facts.emplace_back("step.rounding", choice_fact(rounding, {"kNearest", "kStochastic"}));
  facts.emplace_back("step.seed", concat(seed));
}

void add(RankFacts& facts, const ParameterRuleOptions& parameters) {
  const auto& [weight_decay, spares_vectors, rules] = parameters;
  facts.emplace_back("weight_decay", number_fact(weight_decay));
  facts.emplace_back("decay_spares_vectors", spares_vectors ? "true" : "false");
  int number = 0;
  for (const auto& [pattern, decay, rate_scale] : rules)
    facts.emplace_back(concat("rules[", number++, "]"),
                       concat(pattern, " weight_decay ", decay ? number_fact(*decay) : "nullopt",
                              " rate_scale ", number_fact(rate_scale)));
}

}  // namespace

RankFacts optimizer_facts(const UpdateRule& rule, const StepOptions& step) {
  const auto& [name, math, moments, learning_rate, parameters] = rule;
  RankFacts facts{{"optimizer", name}, {"lr", number_fact(learning_rate)}};
  std::visit([&facts](const auto& each) { add(facts, each); }, math);
  for (const auto& [moment, dtype] : moments)
    facts.emplace_back(concat("moment ", moment), name_of(dtype));
  add(facts, step);
  add(facts, parameters);  // last: how many rules there are may differ
  return facts;
}

}  // namespace fsdp
