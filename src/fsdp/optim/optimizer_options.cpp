#include "fsdp/optim/optimizer_options.h"

#include <cmath>
#include <string>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/comm/rank_facts.h"
#include "fsdp/optim/optimizer_impl.h"

namespace fsdp {

namespace {

// Takes every struct apart by the names of all its fields, so that a new field does not compile
// until it is added here.

// Rounding and seed are those of StepOptions.
void add_facts(RankFacts& facts, const AdamWRule& rule) {
  const auto& [beta1, beta2, eps, rounding, seed] = rule;
  facts.emplace_back("beta1", number_fact(beta1));
  facts.emplace_back("beta2", number_fact(beta2));
  facts.emplace_back("eps", number_fact(eps));
}

void add_facts(RankFacts& facts, const SgdRule& rule) {
  const auto& [momentum, nesterov, rounding, seed] = rule;
  facts.emplace_back("momentum", number_fact(momentum));
  facts.emplace_back("nesterov", nesterov ? "true" : "false");
}

void add_facts(RankFacts& facts, const MatrixRule& rule) {
  const auto& [momentum, nesterov, scale, iterations, a, b, c, norm_eps, products_dtype, products,
               rounding, seed, adamw_rate_scale, momentum_kind] = rule;
  facts.emplace_back("momentum", number_fact(momentum));
  facts.emplace_back("nesterov", nesterov ? "true" : "false");
  facts.emplace_back("scale", choice_fact(scale, {"kOriginal", "kMatchAdamW"}));
  facts.emplace_back("iterations", concat(iterations));
  facts.emplace_back("a", number_fact(a));
  facts.emplace_back("b", number_fact(b));
  facts.emplace_back("c", number_fact(c));
  facts.emplace_back("norm_eps", number_fact(norm_eps));
  facts.emplace_back("products_dtype", products_dtype ? c10::toString(*products_dtype) : "nullopt");
  facts.emplace_back("products", choice_fact(products, {"kSingle", "kBatched"}));
  facts.emplace_back("adamw_rate_scale", number_fact(adamw_rate_scale));
  facts.emplace_back(concat("moment ", momentum_kind.name), name_of(momentum_kind.dtype));
}

void add_facts(RankFacts& facts, const StepOptions& step) {
  const auto& [max_norm, measures_norm, on_nonfinite, loss_scale, updates, without_gradient,
               rounding, seed, marks_changes] = step;
  const auto& [initial, backoff, growth, interval] = loss_scale;
  facts.emplace_back("step.max_norm", number_fact(max_norm));
  facts.emplace_back("step.measures_norm", measures_norm ? "true" : "false");
  facts.emplace_back("step.on_nonfinite", choice_fact(on_nonfinite, {"kUpdate", "kSkip"}));
  facts.emplace_back("step.loss_scale.initial", number_fact(initial));
  facts.emplace_back("step.loss_scale.backoff", number_fact(backoff));
  facts.emplace_back("step.loss_scale.growth", number_fact(growth));
  facts.emplace_back("step.loss_scale.interval", concat(interval));
  facts.emplace_back("step.updates", choice_fact(updates, {"kHidden", "kBlocking"}));
  facts.emplace_back("step.without_gradient", choice_fact(without_gradient, {"kSkip", "kUpdate"}));
  facts.emplace_back("step.rounding", choice_fact(rounding, {"kNearest", "kStochastic"}));
  facts.emplace_back("step.seed", concat(seed));
  facts.emplace_back("step.marks_changes", marks_changes ? "true" : "false");
}

void add_facts(RankFacts& facts, const ParameterRuleOptions& parameters) {
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

void StepOptions::validate() const {
  const auto check = [](bool is_good, const char* field, double value, const char* fix) {
    if (!is_good) throw UsageError(concat("step.", field, " is ", value, "; ", fix));
  };
  check(max_norm >= 0.0 && std::isfinite(max_norm), "max_norm", max_norm,
        "use a positive number, or 0 for no clipping");
  check(loss_scale.initial > 0.0 && std::isfinite(loss_scale.initial), "loss_scale.initial",
        loss_scale.initial, "use a positive number, or 1 for no scaling");
  check(loss_scale.backoff > 0.0 && loss_scale.backoff <= 1.0, "loss_scale.backoff",
        loss_scale.backoff, "use a number above 0 and up to 1");
  check(loss_scale.growth >= 1.0 && std::isfinite(loss_scale.growth), "loss_scale.growth",
        loss_scale.growth, "use a number of 1 or more");
  check(loss_scale.interval >= 1, "loss_scale.interval", static_cast<double>(loss_scale.interval),
        "use 1 or more steps");
}

DType moment_dtype(const char* field, at::ScalarType type) {
  if (type == at::kFloat) return DType::kFloat32;
  if (type == at::kBFloat16) return DType::kBFloat16;
  if (type == at::kHalf) return DType::kFloat16;
  if (type == at::kFloat8_e4m3fn) return DType::kFloat8E4M3;
  if (type == at::kFloat8_e5m2) return DType::kFloat8E5M2;
  throw UsageError(concat(field, " is ", c10::toString(type),
                          "; moments are kept in Float, BFloat16, Half, Float8_e4m3fn or "
                          "Float8_e5m2"));
}

RankFacts optimizer_facts(const UpdateRule& rule, const StepOptions& step) {
  const auto& [name, math, moments, learning_rate, parameters, matrices] = rule;
  RankFacts facts{{"optimizer", name}, {"lr", number_fact(learning_rate)}};
  std::visit([&facts](const auto& each) { add_facts(facts, each); }, math);
  for (const auto& [moment, dtype] : moments)
    facts.emplace_back(concat("moment ", moment), name_of(dtype));
  if (matrices) add_facts(facts, *matrices);
  add_facts(facts, step);
  add_facts(facts, parameters);  // last: the number of rules may differ
  return facts;
}

}  // namespace fsdp
