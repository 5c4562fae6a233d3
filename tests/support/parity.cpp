#include "support/parity.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <tuple>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/shard/fully_shard.h"
#include "support/run_ranks.h"

namespace fsdp::testing {

namespace {

// With a usual epsilon AdamW hides a wrong factor of its gradients, and moves a weight by the full
// learning rate if its gradient is pure rounding. An epsilon as large as the gradients of these
// models prevents both.
constexpr double kLearningRate = 1e-2;
constexpr double kEpsilon = 1e-2;
constexpr double kWeightDecay = 0.1;
constexpr double kBeta2 = 0.95;

torch::optim::AdamWOptions adamw_options() {
  return torch::optim::AdamWOptions(kLearningRate)
      .betas({0.9, kBeta2})
      .eps(kEpsilon)
      .weight_decay(kWeightDecay);
}

// kSumOverRanks: every rank divides by the rows of all ranks.
double loss_scale(const ParityCase& parity, int rank, int step, int microbatch) {
  const auto rows = [&](int of_rank) {
    return static_cast<double>(
        make_batch(parity.model, of_rank, step, microbatch, parity.compute()).num_rows);
  };
  if (parity.gradient == GradientOf::kMeanOverRanks) return 1.0 / rows(rank);
  double all_rows = 0.0;
  for (int each = 0; each < parity.ranks(); ++each) all_rows += rows(each);
  return 1.0 / all_rows;
}

at::Tensor microbatch_loss(ParityModel& model, const ParityCase& parity, int rank, int step,
                           int microbatch) {
  const Batch batch = make_batch(parity.model, rank, step, microbatch, parity.compute());
  return model.summed_loss(batch) * loss_scale(parity, rank, step, microbatch);
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && at::equal(a, b);
}

}  // namespace

// --- the case ------------------------------------------------------------------------------------

const char* name_of(Precision precision) {
  switch (precision) {
    case Precision::kFp32:
      return "fp32";
    case Precision::kBf16:
      return "bf16";
    case Precision::kBf16Wire:
      return "bf16wire";
    case Precision::kBf16Grads:
      return "bf16grads";
    case Precision::kBf16Alone:
      return "bf16alone";
  }
  return "";
}

const char* name_of(UpdatedBy updated_by) {
  switch (updated_by) {
    case UpdatedBy::kLibtorch:
      return "libtorch";
    case UpdatedBy::kOurs:
      return "ours";
    case UpdatedBy::kOursOffloaded:
      return "offloaded";
  }
  return "";
}

at::ScalarType ParityCase::compute() const {
  return precision == Precision::kFp32 ? at::kFloat : at::kBFloat16;
}

ShardOptions ParityCase::options() const {
  ShardOptions options{.strategy = parse_strategy(strategy), .pool = pool};
  if (updated_by == UpdatedBy::kLibtorch)
    options.precision.main_storage = MainStorage::kSeparate;  // for views
  if (updated_by == UpdatedBy::kOursOffloaded)
    options.offload = {.fraction = 0.4, .chunk_numel = 128};  // many chunks of these models
  options.precision.main_grads = at::kFloat;
  if (precision == Precision::kBf16Wire) options.precision.grad_comm = at::kBFloat16;
  if (precision == Precision::kBf16Grads) options.precision.main_grads = at::kBFloat16;
  if (precision == Precision::kBf16Alone)
    options.precision.main_params = options.precision.main_grads = std::nullopt;
  options.gradient = gradient;
  options.gradient_lifetime = lifetime;
  return options;
}

std::string ParityCase::name() const {
  std::string text =
      concat(name_of(model), "_", strategy, "_", outer, "x", inner, "_", name_of(pool), "_mb",
             microbatches, "_", name_of(precision), "_",
             lifetime == GradientLifetime::kStep ? "step" : "persistent", "_",
             gradient == GradientOf::kMeanOverRanks ? "mean" : "sum", "_", name_of(updated_by));
  std::replace_if(
      text.begin(), text.end(), [](char c) { return c == '+' || c == '/'; }, '_');
  return text;
}

void PrintTo(const ParityCase& parity, std::ostream* out) { *out << parity.name(); }

// --- sharded -------------------------------------------------------------------------------------

namespace {

class LibtorchUpdates {
 public:
  explicit LibtorchUpdates(const Sharded& sharded) : sharded_(sharded) {
    std::vector<at::Tensor> trained;
    for (const ShardedParameter& parameter : sharded.parameters()) {
      main_weights_.push_back(parameter.main_weight);
      if (parameter.is_trainable && parameter.main_weight.numel() > 0)
        trained.push_back(parameter.main_weight);
    }
    optimizer_.emplace(trained, adamw_options());
  }

  void step() {
    // The gradient in the main weight's dtype, as the optimizer expects it.
    const std::vector<ShardedParameter> now = sharded_.parameters();
    for (size_t i = 0; i < now.size(); ++i)
      if (now[i].is_trainable)
        main_weights_[i].mutable_grad() = now[i].gradient.to(main_weights_[i].scalar_type());
    optimizer_->step();
    sharded_.refresh_weights();
    sharded_.zero_grad();
  }

 private:
  const Sharded sharded_;
  std::vector<at::Tensor> main_weights_;
  std::optional<torch::optim::AdamW> optimizer_;
};

// The update function: step() is an update and the end of the cycle.
std::function<void()> updates_of(const Sharded& sharded, const ParityCase& parity) {
  if (parity.updated_by == UpdatedBy::kLibtorch)
    return [updates = std::make_shared<LibtorchUpdates>(sharded)] { updates->step(); };
  const auto adamw = std::make_shared<AdamW>(
      sharded, AdamWOptions{.lr = kLearningRate,
                            .beta2 = kBeta2,
                            .eps = kEpsilon,
                            .weight_decay = kWeightDecay,
                            .decay_spares_vectors = false,
                            // The plain model here does so, too.
                            .step = {.without_gradient = WithoutGradient::kUpdate}});
  return [adamw] {
    adamw->step();
    adamw->zero_grad();
  };
}

std::vector<Piece> pieces_of(const Sharded& sharded, at::Tensor ShardedParameter::*what) {
  std::vector<Piece> pieces;
  for (const ShardedParameter& parameter : sharded.parameters())
    if ((parameter.*what).defined())
      pieces.push_back({parameter.name, parameter.begin, (parameter.*what).clone()});
  return pieces;
}

}  // namespace

RankOutcome train_rank(World& world, const ParityCase& parity) {
  const Mesh mesh = world.mesh({.outer = parity.outer});
  const std::shared_ptr<ParityModel> model = make_model(parity.model, parity.compute());
  const Sharded sharded = fully_shard(model, mesh, parity.options());
  const std::function<void()> update = updates_of(sharded, parity);
  RankOutcome outcome;
  for (int step = 0; step < kParitySteps; ++step) {
    for (int i = 0; i < parity.microbatches; ++i) {
      sharded.microbatch({.last = i + 1 == parity.microbatches});
      const at::Tensor loss = microbatch_loss(*model, parity, world.rank(), step, i);
      outcome.losses.push_back(loss.item<float>());
      loss.backward();
    }
    if (step == 0) outcome.first_gradients = pieces_of(sharded, &ShardedParameter::gradient);
    update();
  }
  outcome.main_weights = pieces_of(sharded, &ShardedParameter::main_weight);
  const auto whole = sharded.full_parameters();
  for (const auto& [name, parameter] : distinct_parameters(*model))
    outcome.weights[name] = parameter.detach().clone();
  return outcome;
}

std::vector<RankOutcome> train_threads(const ParityCase& parity) {
  std::vector<RankOutcome> outcomes(static_cast<size_t>(parity.ranks()));
  run_ranks(parity.ranks(), [&](World& world) {
    outcomes[static_cast<size_t>(world.rank())] = train_rank(world, parity);
  });
  return outcomes;
}

void expect_equal_bits(const RankOutcome& actual, const RankOutcome& expected) {
  EXPECT_EQ(actual.losses, expected.losses);
  using Member = std::vector<Piece> RankOutcome::*;
  for (const Member member : {&RankOutcome::first_gradients, &RankOutcome::main_weights}) {
    const std::vector<Piece>& a = actual.*member;
    const std::vector<Piece>& b = expected.*member;
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) {
      EXPECT_EQ(a[i].name, b[i].name);
      EXPECT_EQ(a[i].begin, b[i].begin) << a[i].name;
      EXPECT_TRUE(same_bits(a[i].value, b[i].value)) << a[i].name;
    }
  }
  ASSERT_EQ(actual.weights.size(), expected.weights.size());
  for (const auto& [name, weight] : actual.weights)
    EXPECT_TRUE(same_bits(weight, expected.weights.at(name))) << name;
}

// --- plain ---------------------------------------------------------------------------------------

namespace {

// A parameter, and its main weight: another tensor if the dtype differs.
struct Trained {
  std::string name;
  at::Tensor parameter;
  at::Tensor main_weight;
  at::Tensor gradient = {};  // fp32
  at::Tensor magnitude = {};
  at::Tensor second_moment;
};

std::vector<Trained> prepare(const ParityModel& model, const ParityCase& parity) {
  const bool has_main = parity.precision != Precision::kBf16Alone;
  std::vector<Trained> all;
  for (const auto& [name, parameter] : distinct_parameters(model))
    all.push_back({.name = name,
                   .parameter = parameter,
                   .main_weight = parameter.detach().to(has_main ? at::kFloat : parity.compute()),
                   .second_moment = at::zeros_like(parameter, at::kFloat)});
  return all;
}

bool has_narrow_gradients(const ParityCase& parity) {
  return parity.precision == Precision::kBf16Grads || parity.precision == Precision::kBf16Alone;
}

// Adds the gradients that one rank's backward left in the parameters; a missing one counts as zero.
void collect_gradients(std::vector<Trained>& all, const ParityCase& parity, double scale) {
  // Several ranks round narrow sums in other places.
  const bool rounds = has_narrow_gradients(parity) && parity.ranks() == 1;
  for (Trained& each : all) {
    if (!each.parameter.requires_grad()) continue;
    at::Tensor& gradient = each.parameter.mutable_grad();
    const at::Tensor part =
        gradient.defined() ? gradient.to(at::kFloat) * scale : at::zeros_like(each.second_moment);
    gradient = at::Tensor();
    each.gradient = each.gradient.defined() ? each.gradient + part : part;
    each.magnitude = each.magnitude.defined() ? each.magnitude + part.abs() : part.abs();
    if (rounds) each.gradient = each.gradient.to(at::kBFloat16).to(at::kFloat);
  }
}

// AdamW divides a gradient by sqrt(second moment) + epsilon. The mean magnitude of the tensor is
// added because weights of later steps are already a little off, which changes every gradient,
// those near zero, too.
void note_sensitivity(std::vector<Trained>& all, PlainOutcome& outcome, int step) {
  const double correction = 1.0 - std::pow(kBeta2, step + 1);
  for (Trained& each : all) {
    if (!each.parameter.requires_grad()) continue;
    const at::Tensor& gradient = each.gradient;
    each.second_moment.mul_(kBeta2).addcmul_(gradient, gradient, 1.0 - kBeta2);
    const at::Tensor magnitude =
        each.magnitude.numel() > 0 ? each.magnitude + each.magnitude.mean() : each.magnitude;
    const at::Tensor moved =
        kLearningRate * magnitude / ((each.second_moment / correction).sqrt() + kEpsilon);
    PlainParameter& kept = outcome.parameters[each.name];
    kept.sensitivity = kept.sensitivity.defined() ? kept.sensitivity + moved : moved;
    if (step > 0) continue;
    kept.first_gradient = gradient.clone();
    kept.first_magnitude = magnitude;
  }
}

PlainOutcome compute_plain(const ParityCase& parity) {
  const std::shared_ptr<ParityModel> model = make_model(parity.model, parity.compute());
  std::vector<Trained> all = prepare(*model, parity);
  std::vector<at::Tensor> main_weights;
  for (const Trained& each : all)
    if (each.parameter.requires_grad()) main_weights.push_back(each.main_weight);
  torch::optim::AdamW optimizer(main_weights, adamw_options());
  const double scale = parity.gradient == GradientOf::kMeanOverRanks ? 1.0 / parity.ranks() : 1.0;
  PlainOutcome outcome;
  outcome.losses.resize(static_cast<size_t>(parity.ranks()));
  for (int step = 0; step < kParitySteps; ++step) {
    for (int microbatch = 0; microbatch < parity.microbatches; ++microbatch)
      for (int rank = 0; rank < parity.ranks(); ++rank) {
        const at::Tensor loss = microbatch_loss(*model, parity, rank, step, microbatch);
        outcome.losses[static_cast<size_t>(rank)].push_back(loss.item<float>());
        loss.backward();
        collect_gradients(all, parity, scale);
      }
    note_sensitivity(all, outcome, step);
    for (Trained& each : all) {
      if (!each.parameter.requires_grad()) continue;
      each.main_weight.mutable_grad() = each.gradient.to(each.main_weight.scalar_type());
      each.gradient = each.magnitude = at::Tensor();
    }
    optimizer.step();
    const at::NoGradGuard no_grad;
    for (const Trained& each : all) each.parameter.copy_(each.main_weight);
  }
  for (const Trained& each : all) {
    outcome.parameters[each.name].main_weight = each.main_weight;
    outcome.parameters[each.name].weight = each.parameter.detach();
  }
  return outcome;
}

}  // namespace

const PlainOutcome& train_plain(const ParityCase& parity) {
  using Key = std::tuple<ModelKind, int, int, Precision, GradientOf>;
  static std::map<Key, PlainOutcome> kept;
  const Key key{parity.model, parity.ranks(), parity.microbatches, parity.precision,
                parity.gradient};
  const auto it = kept.find(key);
  if (it != kept.end()) return it->second;
  return kept.emplace(key, compute_plain(parity)).first->second;
}

// --- comparison ----------------------------------------------------------------------------------

namespace {

constexpr double kFp32Rounding = 0x1p-24;  // relative error of one rounding
constexpr double kBf16Rounding = 0x1p-8;

// A layer that adds to a narrow gradient itself rounds the sum once, autograd twice.
bool has_equal_gradients(const ParityCase& parity) {
  return parity.ranks() == 1 && (parity.microbatches == 1 || !has_narrow_gradients(parity));
}

// Our AdamW rounds in other places than libtorch's.
bool is_equal_bit_by_bit(const ParityCase& parity) {
  return has_equal_gradients(parity) && parity.updated_by == UpdatedBy::kLibtorch;
}

// The error of a reduced gradient, relative to the magnitude of the summands, from equal weights.
// fp32: sums over ranks and microbatches are added in another order and divided at another time; a
// sum of n numbers has n roundings on both sides. (A layer that adds to a gradient itself does so
// within its dot product, of at most 18 terms in these models.)
// bf16 wire: one rounding to travel along an axis and one for the result there, two axes at most.
// bf16 main gradients: one more for each microbatch that is added.
double gradient_tolerance(const ParityCase& parity) {
  const double summed = 2.0 * (parity.ranks() * parity.microbatches + 18) * kFp32Rounding;
  if (has_narrow_gradients(parity)) return summed + (4 + parity.microbatches) * kBf16Rounding;
  return parity.precision == Precision::kBf16Wire ? summed + 4 * kBf16Rounding : summed;
}

// The error after some steps. fp32: errors of the weights add errors to gradients of later steps; a
// factor of four allows for them (the largest error of the covering subset is a seventh of it).
// bf16: a weight that differs in its last fp32 bit may round to another bf16 value, and so may
// later activations, so that every later gradient has the errors of bf16 anew.
double drift_tolerance(const ParityCase& parity) {
  const double amplified = 4.0 * gradient_tolerance(parity);
  return parity.precision == Precision::kFp32 ? amplified : amplified + 4 * kBf16Rounding;
}

void expect_near(const std::string& what, const at::Tensor& actual, const at::Tensor& expected,
                 const at::Tensor& tolerance) {
  ASSERT_EQ(actual.numel(), expected.numel()) << what;
  if (actual.numel() == 0) return;
  const at::Tensor error =
      (actual.to(at::kDouble).flatten() - expected.to(at::kDouble).flatten()).abs();
  const at::Tensor allowed = tolerance.to(at::kDouble).flatten();
  const at::Tensor is_near = error.le(allowed);  // in this form, so that a NaN fails
  const auto worst = (error - allowed).argmax().item<int64_t>();
  EXPECT_TRUE(is_near.all().item<bool>())
      << what << ": " << is_near.logical_not().sum().item<int64_t>() << " of " << actual.numel()
      << " values are off; element " << worst << " by " << error[worst].item<double>() << ", where "
      << allowed[worst].item<double>() << " is allowed";
}

at::Tensor part_of(const at::Tensor& whole, const Piece& piece) {
  return whole.flatten().narrow(0, piece.begin, piece.value.numel());
}

void expect_losses(const RankOutcome& actual, const std::vector<float>& expected,
                   const ParityCase& parity) {
  ASSERT_EQ(actual.losses.size(), expected.size());
  // Weights are off by drift_tolerance times the change of a step; so is a step's change of the
  // loss, which is less than the loss itself. 2^-20: the loss's own sum.
  const double relative = drift_tolerance(parity) + 0x1p-20;
  for (size_t i = 0; i < expected.size(); ++i) {
    const bool is_first_step = i < static_cast<size_t>(parity.microbatches);
    if (is_equal_bit_by_bit(parity) || is_first_step) {
      EXPECT_EQ(actual.losses[i], expected[i]) << "loss " << i;
    } else {
      EXPECT_NEAR(actual.losses[i], expected[i], relative * std::abs(expected[i])) << "loss " << i;
    }
  }
}

}  // namespace

void expect_parity(const RankOutcome& actual, const ParityCase& parity, int rank) {
  const PlainOutcome& plain = train_plain(parity);
  const bool must_be_equal = is_equal_bit_by_bit(parity);
  expect_losses(actual, plain.losses[static_cast<size_t>(rank)], parity);
  EXPECT_EQ(actual.weights.size(), plain.parameters.size());
  for (const Piece& piece : actual.first_gradients) {
    const PlainParameter& expected = plain.parameters.at(piece.name);
    const at::Tensor gradient = part_of(expected.first_gradient, piece);
    const double relative = has_equal_gradients(parity) ? 0.0 : gradient_tolerance(parity);
    expect_near(concat("gradient of ", piece.name, " in step 1"), piece.value, gradient,
                relative * part_of(expected.first_magnitude, piece));
  }
  const auto tolerance_of = [&](const PlainParameter& expected, double rounding) {
    const at::Tensor size = expected.main_weight.abs();
    if (must_be_equal || !expected.sensitivity.defined()) return at::zeros_like(size);
    // Both sides round the main weight in every step.
    const double in_steps =
        parity.precision == Precision::kBf16Alone ? kBf16Rounding : kFp32Rounding;
    return drift_tolerance(parity) * expected.sensitivity + 2 * kParitySteps * in_steps * size +
           2 * rounding * size;
  };
  for (const Piece& piece : actual.main_weights) {
    const PlainParameter& expected = plain.parameters.at(piece.name);
    expect_near(concat("main weight ", piece.name), piece.value,
                part_of(expected.main_weight, piece), part_of(tolerance_of(expected, 0.0), piece));
  }
  const double rounding = parity.compute() == at::kFloat ? 0.0 : kBf16Rounding;
  for (const auto& [name, weight] : actual.weights) {
    const PlainParameter& expected = plain.parameters.at(name);
    expect_near(concat("weight ", name), weight, expected.weight, tolerance_of(expected, rounding));
  }
}

}  // namespace fsdp::testing
