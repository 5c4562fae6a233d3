#include "fsdp/optim/muon.h"

#include <cmath>

#include "fsdp/base/check.h"
#include "fsdp/optim/optimizer_impl.h"
#include "fsdp/shard/engine/engine.h"

namespace fsdp {

namespace {

UpdateRule muon_rule_of(const MuonOptions& options) {
  const auto check = [](bool is_good, const char* field, double value, const char* fix) {
    if (!is_good) throw UsageError(concat("Muon's ", field, " is ", value, "; ", fix));
  };
  check(options.momentum > 0.0 && options.momentum < 1.0, "momentum", options.momentum,
        "use a number above 0 and below 1, such as 0.95");
  check(options.iterations >= 1 && options.iterations < 100, "iterations", options.iterations,
        "use 1 to 99, such as 5");
  check(options.c == 0.0 || std::abs(options.b) <= 8.0 * std::abs(options.c), "c", options.c,
        "use 0, or a number that is no less than an eighth of b");
  check(options.norm_eps > 0.0, "norm_eps", options.norm_eps,
        "use a small positive number, such as 1e-7");
  check(options.adamw_rate_scale >= 0.0, "adamw_rate_scale", options.adamw_rate_scale,
        "use 0 or more");
  if (options.products_dtype && options.products_dtype != at::kFloat &&
      options.products_dtype != at::kBFloat16)
    throw UsageError(concat("Muon's products_dtype is ", c10::toString(*options.products_dtype),
                            "; use Float, BFloat16 or nullopt"));
  UpdateRule rule = adamw_rule_of({.lr = options.lr,
                                   .beta1 = options.beta1,
                                   .beta2 = options.beta2,
                                   .eps = options.eps,
                                   .weight_decay = options.weight_decay,
                                   .decay_spares_vectors = options.decay_spares_vectors,
                                   .rules = options.rules,
                                   .first_moment = options.first_moment,
                                   .second_moment = options.second_moment,
                                   .step = options.step},
                                  "Muon");
  rule.matrices = MatrixRule{
      .momentum = options.momentum,
      .nesterov = options.nesterov,
      .scale = options.scale,
      .iterations = options.iterations,
      .a = options.a,
      .b = options.b,
      .c = options.c,
      .norm_eps = options.norm_eps,
      .products_dtype = options.products_dtype,
      .products = options.products,
      .rounding = options.step.rounding,
      .seed = options.step.seed,
      .adamw_rate_scale = options.adamw_rate_scale,
      .momentum_kind = {"momentum_buffer", moment_dtype("momentum_dtype", options.momentum_dtype)}};
  return rule;
}

// Before the optimizer takes its seat.
const Sharded& with_matrices(const Sharded& sharded) {
  if (EngineAccess::of(sharded).options().matrices == WholeMatrices{})
    throw UsageError(
        "Muon finds no whole matrices; set ShardOptions::matrices to {.declared = true}, or name "
        "them in its `named`, when the model is sharded");
  return sharded;
}

}  // namespace

Muon::Muon(const Sharded& sharded, const MuonOptions& options)
    : Optimizer(
          std::make_unique<Impl>(with_matrices(sharded), muon_rule_of(options), options.step)) {}

}  // namespace fsdp
