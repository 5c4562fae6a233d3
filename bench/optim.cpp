// How fast the fused updates are on this machine's cores: beside a plain copy of memory, and beside
// libtorch's fused AdamW with a separate cast of the weights.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <deque>
#include <string>
#include <thread>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/torch_dtype.h"
#include "fsdp/memory/slab_allocator.h"
#include "fsdp/optim/kernels/thread_team.h"
#include "fsdp/optim/kernels/update_kernels.h"
#include "fsdp/optim/kernels/update_math.h"
#include "fsdp/optim/kernels/update_span.h"
#include "fsdp/optim/shard_passes.h"
#include "fsdp/shard/group/flat_buffer.h"
#include "timings.h"

namespace {

using bench::Contender;
using bench::Timings;
using fsdp::DType;
using fsdp::MainWeight;

struct Settings {
  int64_t numel = int64_t{1} << 24;
  int threads = 0;
  int rounds = 11;
};

const fsdp::AdamWRule kRule{.rounding = fsdp::Rounding::kStochastic, .seed = 1};
constexpr double kRate = 1e-3;
constexpr float kWeightDecay = 0.1f;
constexpr size_t kCopies = 4;

// Runs body(index, count) on every thread of the team, as the optimizer does it: threads that wait
// for work, as libtorch's do.
template <typename Body>
void on_all_threads(fsdp::ThreadTeam& team, const Body& body) {
  team.run(team.size(), [&](int64_t index) { body(index, team.size()); });
}

// --- what is updated -----------------------------------------------------------------------------

struct Policy {
  std::string name;
  DType gradient = DType::kFloat32;
  DType weight = DType::kFloat32;
  MainWeight main = MainWeight::kIsWeight;
  DType first = DType::kFloat32;
  DType second = DType::kFloat32;
  bool marks = false;  // which weights change
};

std::vector<Policy> policies() {
  const DType bf16 = DType::kBFloat16;
  const DType fp8 = DType::kFloat8E4M3;
  const DType fp32 = DType::kFloat32;
  const DType fp16 = DType::kFloat16;
  return {
      {"fp32", fp32, fp32, MainWeight::kIsWeight, fp32, fp32},
      {"fp32 gradient, bf16 + remainder", fp32, bf16, MainWeight::kSplit, fp32, fp32},
      {"bf16 gradient, bf16 + remainder", bf16, bf16, MainWeight::kSplit, fp32, fp32},
      {"bf16 gradient, bf16 + fp32", bf16, bf16, MainWeight::kSeparate, fp32, fp32},
      {"the same + remainder, bf16 moments", bf16, bf16, MainWeight::kSplit, bf16, bf16},
      {"the same + remainder, fp16 moments", bf16, bf16, MainWeight::kSplit, fp16, fp16},
      {"the same + remainder, fp8 moments", bf16, bf16, MainWeight::kSplit, fp8, fp8},
      {"all bf16, stochastic", bf16, bf16, MainWeight::kIsWeight, bf16, bf16},
      {"fp32, marks", fp32, fp32, MainWeight::kIsWeight, fp32, fp32, true},
      {"bf16 + remainder, marks", fp32, bf16, MainWeight::kSplit, fp32, fp32, true},
      {"bf16 gradient, the same", bf16, bf16, MainWeight::kSplit, fp32, fp32, true},
      {"bf16 gradient, bf16 + fp32, marks", bf16, bf16, MainWeight::kSeparate, fp32, fp32, true}};
}

// Tensors in memory as the optimizer has it.
class Memory {
 public:
  at::Tensor make(int64_t numel, at::ScalarType type) {
    const auto bytes = numel * static_cast<int64_t>(c10::elementSize(type));
    slabs_.emplace_back(allocator_, bytes, 128);
    return fsdp::tensor_over(slabs_.back().at(0), numel, type, c10::kCPU).zero_();
  }
  at::Tensor copy_of(const at::Tensor& values, at::ScalarType type) {
    return make(values.numel(), type).copy_(values);
  }

 private:
  fsdp::HostSlabAllocator allocator_;
  std::deque<fsdp::Slab> slabs_;
};

// Memory of one optimizer.
class Trained {
 public:
  Trained(const Policy& policy, int64_t numel, fsdp::ThreadTeam& team)
      : policy_(policy), team_(team) {
    const at::Tensor values = at::randn({numel});
    gradient_ = memory_.copy_of(values.mul(0.01), fsdp::scalar_type_of(policy.gradient));
    weight_ = memory_.copy_of(values, fsdp::scalar_type_of(policy.weight));
    if (policy.main == MainWeight::kSeparate) main_ = memory_.copy_of(weight_, at::kFloat);
    if (policy.main == MainWeight::kSplit) main_ = memory_.make(numel, at::kShort);
    first_ = memory_.make(numel * fsdp::element_bytes(policy.first), at::kByte);
    second_ = memory_.make(numel * fsdp::element_bytes(policy.second), at::kByte);
    const int64_t scales = fsdp::num_scales({0, numel});
    first_scales_ = at::zeros({scales});
    second_scales_ = at::zeros({scales});
    span_ = {
        .gradient = gradient_.data_ptr(),
        .gradient_dtype = policy.gradient,
        .weight = weight_.data_ptr(),
        .weight_dtype = policy.weight,
        .main = policy.main,
        .main_weight = main_.defined() ? main_.data_ptr() : nullptr,
        .first = {first_.data_ptr(), first_scales_.mutable_data_ptr<float>(), policy.first},
        .second = {second_.data_ptr(), second_scales_.mutable_data_ptr<float>(), policy.second},
        .numel = numel,
        .weight_decay = kWeightDecay};
    if (policy.marks) {
      marks_ = memory_.make(fsdp::num_mark_lanes({0, numel}), at::kShort);
      span_.marks = static_cast<uint16_t*>(marks_.mutable_data_ptr());
    }
  }

  // With a norm to clip at, the squares of the gradients are summed in a pass of their own.
  void step(double max_norm = 0.0) {
    state_.learning_rate = kRate;
    state_.squared_norm = max_norm > 0.0 ? squared_norm() : 0.0;
    fsdp::begin_step(state_, {.max_norm = max_norm});
    fsdp::update_on_cpu(span_, kRule, state_, team_);
  }

  // With a clip factor, but no pass to find it: what is left where reductions sum the squares.
  void clipped_step() {
    state_.learning_rate = kRate;
    state_.squared_norm = 4.0;
    fsdp::begin_step(state_, {.max_norm = 1.0});
    fsdp::update_on_cpu(span_, kRule, state_, team_);
  }

  // The bytes that a step must read and write.
  int64_t bytes() const {
    const auto of = [](DType dtype) { return fsdp::element_bytes(dtype); };
    int64_t each = of(policy_.gradient) + 2 * of(policy_.first) + 2 * of(policy_.second);
    each += policy_.main == MainWeight::kSeparate ? 8 + of(policy_.weight) : 2 * of(policy_.weight);
    if (policy_.main == MainWeight::kSplit) each += 4;
    return each * span_.numel;
  }

  const at::Tensor& gradient() const { return gradient_; }
  const at::Tensor& weight() const { return weight_; }

 private:
  double squared_norm() const {
    std::vector<double> sums(static_cast<size_t>(team_.size()));
    on_all_threads(team_, [&](int64_t index, int64_t count) {
      const fsdp::ElementRange piece = fsdp::piece_of_span(span_, index, count);
      const auto* begin = static_cast<const char*>(span_.gradient) +
                          piece.begin * fsdp::element_bytes(policy_.gradient);
      sums[static_cast<size_t>(index)] =
          fsdp::squared_sum_on_cpu(begin, policy_.gradient, piece.end - piece.begin);
    });
    double total = 0;
    for (const double sum : sums) total += sum;
    return total;
  }

  Policy policy_;
  fsdp::ThreadTeam& team_;
  Memory memory_;
  at::Tensor gradient_, weight_, main_, first_, second_, first_scales_, second_scales_, marks_;
  fsdp::UpdateSpan span_;
  fsdp::StepState state_;
};

// libtorch's fused AdamW on fp32, and the cast of its weights to bf16.
class TorchTrained {
 public:
  TorchTrained(const at::Tensor& weight, const at::Tensor& gradient)
      : weight_(memory_.copy_of(weight, at::kFloat)),
        gradient_(memory_.copy_of(gradient, at::kFloat)),
        first_(memory_.make(weight.numel(), at::kFloat)),
        second_(memory_.make(weight.numel(), at::kFloat)),
        step_(at::zeros({})),
        compute_(memory_.copy_of(weight, at::kBFloat16)) {}

  void step() {
    step_.add_(1);
    at::_fused_adamw_({weight_}, {gradient_}, {first_}, {second_}, {}, {step_}, kRate, kRule.beta1,
                      kRule.beta2, kWeightDecay, kRule.eps, /*amsgrad=*/false, /*maximize=*/false);
  }
  void cast() { compute_.copy_(weight_); }
  void cast_gradient() { gradient_.copy_(compute_); }
  const at::Tensor& weight() const { return weight_; }

 private:
  Memory memory_;
  at::Tensor weight_, gradient_, first_, second_, step_, compute_;
};

// --- the race ------------------------------------------------------------------------------------

class Copy {
 public:
  Copy(int64_t numel, fsdp::ThreadTeam& team, bool lies_as_ours)
      : team_(team), from_(make(numel, lies_as_ours)), to_(make(numel, lies_as_ours)) {}
  void step() {
    on_all_threads(team_, [&](int64_t index, int64_t count) {
      const int64_t begin = from_.numel() / count * index;
      const int64_t end = index + 1 == count ? from_.numel() : from_.numel() / count * (index + 1);
      std::memcpy(to_.mutable_data_ptr<float>() + begin, from_.const_data_ptr<float>() + begin,
                  static_cast<size_t>(end - begin) * sizeof(float));
    });
  }
  int64_t bytes() const { return from_.numel() * 8; }

 private:
  at::Tensor make(int64_t numel, bool lies_as_ours) {
    return lies_as_ours ? memory_.make(2 * numel, at::kFloat) : at::zeros({2 * numel});
  }

  fsdp::ThreadTeam& team_;
  Memory memory_;
  at::Tensor from_, to_;
};

void check_against_torch(int64_t numel) {
  fsdp::ThreadTeam team(1);
  Trained ours(policies()[0], numel, team);
  TorchTrained theirs(ours.weight(), ours.gradient());
  for (int step = 0; step < 5; ++step) {
    ours.step();
    theirs.step();
  }
  const double difference = (ours.weight() - theirs.weight()).abs().max().item<double>();
  FSDP_CHECK(difference < 1e-6, "after 5 steps a weight differs by ", difference,
             " from libtorch's");
}

void print_row(const std::string& name, double us, int64_t bytes, double copy_bandwidth) {
  const double bandwidth = static_cast<double>(bytes) / us * 1e-3;
  std::printf("%-42s %10.2f %8.1f %10.0f %%\n", name.c_str(), us * 1e-3, bandwidth,
              100 * bandwidth / copy_bandwidth);
}

void race(const Settings& settings, int threads) {
  at::set_num_threads(threads);
  fsdp::ThreadTeam team(threads);
  // The fastest of some that lie differently in memory.
  std::deque<Copy> copies;
  std::vector<Contender> contenders;
  for (size_t i = 0; i < kCopies; ++i) {
    Copy& each = copies.emplace_back(settings.numel, team, /*lies_as_ours=*/i % 2 == 0);
    contenders.push_back({"copy", [&] { each.step(); }});
  }
  std::deque<Trained> trained;
  for (const Policy& policy : policies()) {
    Trained& each = trained.emplace_back(policy, settings.numel, team);
    contenders.push_back({policy.name, [&] { each.step(); }});
  }
  TorchTrained theirs(trained[0].weight(), trained[0].gradient());
  Trained& split = trained[1];
  const size_t torch_fused = contenders.size();
  contenders.push_back({"libtorch's fused AdamW, fp32", [&] { theirs.step(); }});
  contenders.push_back({"libtorch's copy_ to bf16", [&] { theirs.cast(); }});
  contenders.push_back({"libtorch's copy_ from bf16", [&] { theirs.cast_gradient(); }});
  const size_t clipped = contenders.size();
  contenders.push_back({"clipped", [&] { split.clipped_step(); }});
  contenders.push_back({"clipped, norm in its own pass", [&] { split.step(1.0); }});

  const auto alone = [] {};
  bench::take_turns(contenders, {.rounds = 1, .steps = 1}, alone);
  const Timings times = bench::take_turns(contenders, {settings.rounds, 1}, alone);
  double copy_us = times.best_us(0);
  for (size_t i = 1; i < kCopies; ++i) copy_us = std::min(copy_us, times.best_us(i));
  const double copy_bandwidth = static_cast<double>(copies[0].bytes()) / copy_us * 1e-3;

  std::printf("# AdamW on %lld elements, %d thread%s; best of %d\n",
              static_cast<long long>(settings.numel), threads, threads == 1 ? "" : "s",
              settings.rounds);
  std::printf("%-42s %10s %8s %12s\n", "# what", "ms", "GB/s", "of copy");
  print_row("copy", copy_us, copies[0].bytes(), copy_bandwidth);
  for (size_t i = 0; i < trained.size(); ++i)
    print_row(contenders[kCopies + i].name, times.best_us(kCopies + i), trained[i].bytes(),
              copy_bandwidth);
  print_row(contenders[torch_fused].name, times.best_us(torch_fused), trained[0].bytes(),
            copy_bandwidth);
  for (const size_t cast : {torch_fused + 1, torch_fused + 2})
    print_row(contenders[cast].name, times.best_us(cast), 6 * settings.numel, copy_bandwidth);

  constexpr size_t kFirst = kCopies, kSplit = kFirst + 1, kSplitBf16 = kFirst + 2;
  const double theirs_us = times.best_us(torch_fused) + times.best_us(torch_fused + 1);
  std::printf("# %-84s %8.2f\n", "libtorch's fused AdamW / ours, both fp32",
              times.median_ratio(torch_fused, kFirst));
  std::printf("# %-84s %8.2f\n",
              "libtorch's fused AdamW and copy_ / ours with fp32 gradient, bf16 + remainder",
              theirs_us / times.best_us(kSplit));
  std::printf("# %-84s %8.2f\n",
              "libtorch's copy_, fused AdamW and copy_ / ours with bf16 gradient, bf16 + remainder",
              (theirs_us + times.best_us(torch_fused + 2)) / times.best_us(kSplitBf16));
  std::printf("# %-84s %8.3f\n", "ours clipped / not clipped", times.median_ratio(clipped, kSplit));
  std::printf("# %-84s %8.3f\n", "ours clipped, norm found in a pass of its own / not clipped",
              times.median_ratio(clipped + 1, kSplit));
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Fused updates beside a copy of memory and libtorch's", "bench_optim"};
  Settings settings;
  app.add_option("--numel", settings.numel, "elements; their state should not fit in any cache")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 34));
  app.add_option("--threads", settings.threads, "threads (default: one per core)")
      ->check(CLI::Range(1, 1024));
  app.add_option("--rounds", settings.rounds, "turns of each contender; the best counts")
      ->check(CLI::Range(1, 1000));
  CLI11_PARSE(app, argc, argv);
  if (settings.threads == 0)
    settings.threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));

  check_against_torch(1 << 16);
  race(settings, settings.threads);
  if (settings.threads != 1) race(settings, 1);
  std::puts("# result: OK");
  return 0;
}
