#include "fsdp/optim/adamw.h"

#include "fsdp/base/check.h"
#include "fsdp/optim/optimizer_impl.h"

namespace fsdp {

UpdateRule adamw_rule_of(const AdamWOptions& options, const std::string& name) {
  const auto check = [&](bool is_good, const char* field, double value, const char* fix) {
    if (!is_good) throw UsageError(concat(name, "'s ", field, " is ", value, "; ", fix));
  };
  check(options.beta1 >= 0.0 && options.beta1 < 1.0, "beta1", options.beta1,
        "use a number from 0 up to, but not, 1");
  check(options.beta2 >= 0.0 && options.beta2 < 1.0, "beta2", options.beta2,
        "use a number from 0 up to, but not, 1");
  check(options.eps > 0.0, "eps", options.eps, "use a small positive number, such as 1e-8");
  check(options.weight_decay >= 0.0, "weight_decay", options.weight_decay, "use 0 or more");
  return {.name = name,
          .math = AdamWRule{.beta1 = options.beta1,
                            .beta2 = options.beta2,
                            .eps = options.eps,
                            .rounding = options.step.rounding,
                            .seed = options.step.seed},
          .moments = {{"exp_avg", moment_dtype("first_moment", options.first_moment)},
                      {"exp_avg_sq", moment_dtype("second_moment", options.second_moment)}},
          .learning_rate = options.lr,
          .parameters = {.weight_decay = options.weight_decay,
                         .spares_vectors = options.decay_spares_vectors,
                         .rules = options.rules}};
}

AdamW::AdamW(const Sharded& sharded, const AdamWOptions& options)
    : Optimizer(std::make_unique<Impl>(sharded, adamw_rule_of(options, "AdamW"), options.step)) {}

}  // namespace fsdp
