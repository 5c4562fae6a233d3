// The optimizers that users make: their options, checked, compared among ranks, and as rules.
#include <cmath>
#include <sstream>
#include <string>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/optim/muon.h"
#include "fsdp/optim/optimizer.h"
#include "fsdp/optim/optimizer_impl.h"
#include "fsdp/optim/optimizer_options.h"
#include "fsdp/optim/option_fields.h"
#include "fsdp/optim/sgd.h"
#include "fsdp/shard/sharded.h"

namespace fsdp {

namespace {

// --- rules ---------------------------------------------------------------------------------------

void check(bool is_good, const std::string& field, double value, const char* fix) {
  if (!is_good) throw UsageError(concat(field, " is ", value, "; ", fix));
}

void check_fraction(const std::string& field, double value) {
  check(value >= 0.0 && value < 1.0, field, value, "use a number from 0 up to, but not, 1");
}

// AdamW's, also of the parameters that Muon does not move; `name` is the optimizer's.
UpdateRule adamw_rule_of(const AdamWOptions& options, const std::string& name) {
  check_fraction(name + "'s beta1", options.beta1);
  check_fraction(name + "'s beta2", options.beta2);
  check(options.eps > 0.0, name + "'s eps", options.eps,
        "use a small positive number, such as 1e-8");
  check(options.weight_decay >= 0.0, name + "'s weight_decay", options.weight_decay,
        "use 0 or more");
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
                         .rules = options.rules},
          .facts = optimizer_facts(name, options)};
}

UpdateRule sgd_rule_of(const SGDOptions& options) {
  check_fraction("SGD's momentum", options.momentum);
  if (options.nesterov && options.momentum == 0.0)
    throw UsageError("SGD's nesterov is on without a momentum; set momentum, such as 0.9");
  check(options.weight_decay >= 0.0, "SGD's weight_decay", options.weight_decay, "use 0 or more");
  UpdateRule rule{.name = "SGD",
                  .math = SgdRule{.momentum = options.momentum,
                                  .nesterov = options.nesterov,
                                  .rounding = options.step.rounding,
                                  .seed = options.step.seed},
                  .moments = {},
                  .learning_rate = options.lr,
                  .parameters = {.weight_decay = options.weight_decay,
                                 .spares_vectors = options.decay_spares_vectors,
                                 .rules = options.rules},
                  .facts = optimizer_facts("SGD", options)};
  if (options.momentum > 0.0)
    rule.moments.push_back(
        {"momentum_buffer", moment_dtype("momentum_dtype", options.momentum_dtype)});
  return rule;
}

UpdateRule muon_rule_of(const MuonOptions& options) {
  check(options.momentum > 0.0 && options.momentum < 1.0, "Muon's momentum", options.momentum,
        "use a number above 0 and below 1, such as 0.95");
  check(options.iterations >= 1 && options.iterations < 100, "Muon's iterations",
        options.iterations, "use 1 to 99, such as 5");
  check(options.c == 0.0 || std::abs(options.b) <= 8.0 * std::abs(options.c), "Muon's c", options.c,
        "use 0, or a number that is no less than an eighth of b");
  check(options.norm_eps > 0.0, "Muon's norm_eps", options.norm_eps,
        "use a small positive number, such as 1e-7");
  check(options.adamw_rate_scale >= 0.0, "Muon's adamw_rate_scale", options.adamw_rate_scale,
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
  rule.facts = optimizer_facts("Muon", options);
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
  if (sharded.options().matrices == WholeMatrices{})
    throw UsageError(
        "Muon finds no whole matrices; set ShardOptions::matrices to {.declared = true}, or name "
        "them in its `named`, when the model is sharded");
  return sharded;
}

}  // namespace

// --- texts of options ----------------------------------------------------------------------------

std::string to_text(const LossScale& scale) {
  const std::string initial = number_text(scale.initial);
  if (scale.backoff == 1.0 && scale.growth == 1.0) return initial;
  const LossScale usual = LossScale::dynamic();
  const std::string start = concat("dynamic:", initial);
  if (scale.backoff == usual.backoff && scale.growth == usual.growth) return start;
  return concat(start, " times ", number_text(scale.backoff), " or ", number_text(scale.growth));
}

void read_text(const std::string& option, const std::string& text, LossScale& value) {
  const std::string dynamic = "dynamic";
  const std::string start = dynamic + ":";
  const bool has_start = text.starts_with(start);
  value = text.starts_with(dynamic) ? LossScale::dynamic() : LossScale();
  if (text == dynamic) return;
  try {
    value.initial =
        parse_number(option, has_start ? text.substr(start.size()) : text, 0x1p-24, 0x1p24);
  } catch (const UsageError&) {
    refuse_option(option, text,
                  "it must be a number from 2^-24 to 2^24, dynamic, or dynamic:START");
  }
}

std::string to_text(const ParameterRule& rule) {
  std::string text = rule.pattern;
  if (rule.weight_decay) text += concat(" decay=", number_text(*rule.weight_decay));
  if (rule.rate_scale != 1.0 || !rule.weight_decay)
    text += concat(" rate=", number_text(rule.rate_scale));
  return text;
}

void read_text(const std::string& option, const std::string& text, ParameterRule& value) {
  constexpr const char* kForm =
      "a rule is PATTERN decay=X rate=Y (either or both), e.g. "
      "'*.bias decay=0'";
  std::istringstream words(text);
  value = {};
  std::string word;
  if (!(words >> value.pattern)) refuse_option(option, text, kForm);
  bool says_something = false;
  while (words >> word) {
    const size_t equals = word.find('=');
    const std::string field = word.substr(0, equals);
    if (equals == std::string::npos || (field != "decay" && field != "rate"))
      refuse_option(option, text, kForm);
    const double number = parse_number(concat(option, " ", field), word.substr(equals + 1), 0, 1e6);
    if (field == "decay")
      value.weight_decay = number;
    else
      value.rate_scale = number;
    says_something = true;
  }
  if (!says_something) refuse_option(option, text, kForm);
}

// --- optimizers ----------------------------------------------------------------------------------

void StepOptions::validate() const {
  check(max_norm >= 0.0 && std::isfinite(max_norm), "step.max_norm", max_norm,
        "use a positive number, or 0 for no clipping");
  check(loss_scale.initial > 0.0 && std::isfinite(loss_scale.initial), "step.loss_scale.initial",
        loss_scale.initial, "use a positive number, or 1 for no scaling");
  check(loss_scale.backoff > 0.0 && loss_scale.backoff <= 1.0, "step.loss_scale.backoff",
        loss_scale.backoff, "use a number above 0 and up to 1");
  check(loss_scale.growth >= 1.0 && std::isfinite(loss_scale.growth), "step.loss_scale.growth",
        loss_scale.growth, "use a number of 1 or more");
  check(loss_scale.interval >= 1, "step.loss_scale.interval",
        static_cast<double>(loss_scale.interval), "use 1 or more steps");
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

AdamW::AdamW(const Sharded& sharded, const AdamWOptions& options)
    : Optimizer(std::make_unique<Impl>(sharded, adamw_rule_of(options, "AdamW"), options.step)) {}

SGD::SGD(const Sharded& sharded, const SGDOptions& options)
    : Optimizer(std::make_unique<Impl>(sharded, sgd_rule_of(options), options.step)) {}

Muon::Muon(const Sharded& sharded, const MuonOptions& options)
    : Optimizer(
          std::make_unique<Impl>(with_matrices(sharded), muon_rule_of(options), options.step)) {}

Optimizer::Optimizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Optimizer::~Optimizer() = default;

void Optimizer::step() { impl_->step(); }
void Optimizer::zero_grad() { impl_->sharded().zero_grad(); }
void Optimizer::set_learning_rate(double rate) { impl_->set_learning_rate(rate); }
double Optimizer::learning_rate() const { return impl_->learning_rate(); }
const at::Tensor& Optimizer::learning_rate_on_device() const {
  return impl_->learning_rate_on_device();
}
void Optimizer::set_rule(size_t index, double weight_decay, double rate_scale) {
  impl_->set_rule(index, weight_decay, rate_scale);
}
void Optimizer::set_momenta(const Momenta& momenta) { impl_->set_momenta(momenta); }
at::Tensor Optimizer::scaled(const at::Tensor& loss) const { return impl_->scaled(loss); }
StepState Optimizer::state() const { return impl_->state(); }
double Optimizer::gradient_norm() const { return impl_->gradient_norm(); }
void Optimizer::wait() const { impl_->wait(); }
const std::string& Optimizer::name() const { return impl_->name(); }
std::vector<OptimizerShard> Optimizer::shards() const { return impl_->shards(); }
void Optimizer::set_shards(std::span<const OptimizerShard> shards) { impl_->set_shards(shards); }
void Optimizer::set_state(const StepState& state) { impl_->set_state(state); }
const Sharded& Optimizer::sharded() const { return impl_->sharded(); }

}  // namespace fsdp
