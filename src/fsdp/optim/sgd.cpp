#include "fsdp/optim/sgd.h"

#include "fsdp/base/check.h"
#include "fsdp/optim/optimizer_impl.h"

namespace fsdp {

namespace {

UpdateRule sgd_rule_of(const SGDOptions& options) {
  if (!(options.momentum >= 0.0 && options.momentum < 1.0))
    throw UsageError(
        concat("SGD's momentum is ", options.momentum, "; use a number from 0 up to, but not, 1"));
  if (options.nesterov && options.momentum == 0.0)
    throw UsageError("SGD's nesterov is on without a momentum; set momentum, such as 0.9");
  if (!(options.weight_decay >= 0.0))
    throw UsageError(concat("SGD's weight_decay is ", options.weight_decay, "; use 0 or more"));
  UpdateRule rule{.name = "SGD",
                  .math = SgdRule{.momentum = options.momentum,
                                  .nesterov = options.nesterov,
                                  .rounding = options.step.rounding,
                                  .seed = options.step.seed},
                  .moments = {},
                  .learning_rate = options.lr,
                  .parameters = {.weight_decay = options.weight_decay,
                                 .spares_vectors = options.decay_spares_vectors,
                                 .rules = options.rules}};
  if (options.momentum > 0.0)
    rule.moments.push_back(
        {"momentum_buffer", moment_dtype("momentum_dtype", options.momentum_dtype)});
  return rule;
}

}  // namespace

SGD::SGD(const Sharded& sharded, const SGDOptions& options)
    : Optimizer(std::make_unique<Impl>(sharded, sgd_rule_of(options), options.step)) {}

}  // namespace fsdp
