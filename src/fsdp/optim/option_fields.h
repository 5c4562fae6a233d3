// The lists of the fields of the optimizers' options (base/option_fields.h), with the words of
// their choices.
#pragma once

#include <limits>
#include <string>
#include <vector>

#include "fsdp/base/option_fields.h"
#include "fsdp/comm/rank_facts.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/optim/muon.h"
#include "fsdp/optim/sgd.h"
#include "fsdp/shard/option_fields.h"

namespace fsdp {

// --- words and texts of values -------------------------------------------------------------------

inline ChoiceNames choice_names(OnNonfinite) { return {"update", "skip"}; }
inline ChoiceNames choice_names(Updates) { return {"hidden", "blocking"}; }
inline ChoiceNames choice_names(WithoutGradient) { return {"skip", "update"}; }
inline ChoiceNames choice_names(Rounding) { return {"nearest", "stochastic"}; }
inline ChoiceNames choice_names(MuonScale) { return {"original", "match-adamw"}; }
inline ChoiceNames choice_names(MuonProducts) { return {"single", "batched"}; }

// "1024", "dynamic:65536"; its interval is a field of its own.
std::string to_text(const LossScale& scale);
void read_text(const std::string& option, const std::string& text, LossScale& value);

// "*.bias decay=0.1 rate=0.5": either or both.
std::string to_text(const ParameterRule& rule);
void read_text(const std::string& option, const std::string& text, ParameterRule& value);

// --- fields --------------------------------------------------------------------------------------
// Each takes its struct apart by the names of all its fields, so that a new field does not compile
// until it is added here.

template <typename Visit>
void visit_fields(StepOptions& options, const Visit& visit) {
  auto& [max_norm, measures_norm, on_nonfinite, loss_scale, updates, without_gradient, rounding,
         seed, marks_changes] = options;
  constexpr const char* kGroup = "optimizer";
  visit({"step.max_norm", "max_norm"}, max_norm,
        OptionFlag{kGroup, "clip", "X", "Gradients are clipped to this norm; 0: not", 0,
                   std::numeric_limits<double>::max()});
  visit({"step.measures_norm", "measures_norm"}, measures_norm, kNoFlag);
  visit({"step.on_nonfinite", "on_nonfinite"}, on_nonfinite,
        OptionFlag{kGroup, "on-nonfinite", "WHAT", "What a step with NaN or Inf gradients does"});
  visit({"step.loss_scale", "loss_scale"}, loss_scale,
        OptionFlag{kGroup, "loss-scale", "X|dynamic",
                   "Losses are multiplied by it, for fp16 gradients"});
  visit({"step.loss_scale.interval", "loss_scale_interval"}, loss_scale.interval, kNoFlag);
  visit({"step.updates", "updates"}, updates,
        OptionFlag{kGroup, "updates", "WHEN", "Beside the next forward, or before it"});
  visit({"step.without_gradient", "without_gradient"}, without_gradient, kNoFlag);
  visit({"step.rounding", "rounding"}, rounding,
        OptionFlag{kGroup, "rounding", "HOW", "Of narrow weights without main weights"});
  visit({"step.seed", "seed"}, seed, kNoFlag);
  visit({"step.marks_changes", "marks_changes"}, marks_changes, kNoFlag);
}

template <typename Visit>
void visit_fields(AdamWOptions& options, const Visit& visit) {
  auto& [lr, beta1, beta2, eps, weight_decay, decay_spares_vectors, rules, first_moment,
         second_moment, step] = options;
  visit({"lr", "lr"}, lr, kNoFlag);
  visit({"beta1", "beta1"}, beta1, kNoFlag);
  visit({"beta2", "beta2"}, beta2, kNoFlag);
  visit({"eps", "eps"}, eps, kNoFlag);
  visit({"weight_decay", "weight_decay"}, weight_decay, kNoFlag);
  visit({"decay_spares_vectors"}, decay_spares_vectors, kNoFlag);
  visit({"rules", "rules"}, rules, kNoFlag);
  visit({"first_moment", "first_moment"}, first_moment, kNoFlag);
  visit({"second_moment", "second_moment"}, second_moment, kNoFlag);
  visit_fields(step, visit);
}

template <typename Visit>
void visit_fields(SGDOptions& options, const Visit& visit) {
  auto& [lr, momentum, nesterov, weight_decay, decay_spares_vectors, rules, momentum_dtype, step] =
      options;
  visit({"lr", "lr"}, lr, kNoFlag);
  visit({"momentum", "momentum"}, momentum, kNoFlag);
  visit({"nesterov", "nesterov"}, nesterov, kNoFlag);
  visit({"weight_decay", "weight_decay"}, weight_decay, kNoFlag);
  visit({"decay_spares_vectors"}, decay_spares_vectors, kNoFlag);
  visit({"rules", "rules"}, rules, kNoFlag);
  visit({"momentum_dtype", "momentum_dtype"}, momentum_dtype, kNoFlag);
  visit_fields(step, visit);
}

template <typename Visit>
void visit_fields(MuonOptions& options, const Visit& visit) {
  auto& [lr, adamw_rate_scale, momentum, nesterov, scale, iterations, a, b, c, norm_eps,
         products_dtype, products, weight_decay, decay_spares_vectors, rules, momentum_dtype, beta1,
         beta2, eps, first_moment, second_moment, step] = options;
  visit({"lr", "lr"}, lr, kNoFlag);
  visit({"adamw_rate_scale", "adamw_rate_scale"}, adamw_rate_scale, kNoFlag);
  visit({"momentum", "momentum"}, momentum, kNoFlag);
  visit({"nesterov", "nesterov"}, nesterov, kNoFlag);
  visit({"scale", "adjust_lr_fn"}, scale, kNoFlag);
  visit({"iterations", "ns_steps"}, iterations, kNoFlag);
  visit({"a", "a"}, a, kNoFlag);
  visit({"b", "b"}, b, kNoFlag);
  visit({"c", "c"}, c, kNoFlag);
  visit({"norm_eps", "norm_eps"}, norm_eps, kNoFlag);
  visit({"products_dtype", "products_dtype"}, products_dtype, kNoFlag);
  visit({"products", "products"}, products, kNoFlag);
  visit({"weight_decay", "weight_decay"}, weight_decay, kNoFlag);
  visit({"decay_spares_vectors"}, decay_spares_vectors, kNoFlag);
  visit({"rules", "rules"}, rules, kNoFlag);
  visit({"momentum_dtype", "momentum_dtype"}, momentum_dtype, kNoFlag);
  visit({"beta1", "beta1"}, beta1, kNoFlag);
  visit({"beta2", "beta2"}, beta2, kNoFlag);
  visit({"eps", "eps"}, eps, kNoFlag);
  visit({"first_moment", "first_moment"}, first_moment, kNoFlag);
  visit({"second_moment", "second_moment"}, second_moment, kNoFlag);
  visit_fields(step, visit);
}

// A rate that is set later is not among them.
template <typename Options>
RankFacts optimizer_facts(const std::string& name, const Options& options) {
  RankFacts facts = option_facts(options);
  facts.insert(facts.begin(), {"optimizer", name});
  return facts;
}

}  // namespace fsdp
