#include "update_kernels.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "fsdp/base/device_stream.h"
#include "fsdp/base/text.h"
#include "fsdp/comm/operation.h"
#include "fsdp/comm/reduce/reduce_ranks.h"
#include "fsdp/optim/kernels/update_kernels.h"
#include "fsdp/optim/shard_passes.h"
#include "fsdp/shard/group/pack_on_device.h"
#include "timings.h"

namespace bench {

namespace {

using fsdp::DType;
using fsdp::MainWeight;

constexpr int64_t kNumel = int64_t{1} << 28;  // 1 GiB of fp32: far more than a cache holds

struct Kernel {
  std::string name;
  double bytes = 0.0;  // per element: read and written
  std::function<void()> run;
};

// Memory that all kernels share, one after the other: up to fp32 numbers in every array.
class Arrays {
 public:
  explicit Arrays(c10::Device on)
      : device(on),
        gradient(at::randn({kNumel}, at::device(on))),
        narrow_gradient(gradient.to(at::kBFloat16)),
        weight(zeros()),
        main(zeros()),
        first(zeros()),
        second(zeros()),
        scales(at::zeros({2, kNumel / fsdp::kScaleBlock}, at::device(on))),
        squares(at::zeros({1}, at::device(on).dtype(at::kDouble))),
        marks(at::zeros({kNumel / 16}, at::device(on).dtype(at::kShort))) {
    at::Tensor bytes = at::zeros({static_cast<int64_t>(sizeof(fsdp::StepState))}, at::kByte);
    *static_cast<fsdp::StepState*>(bytes.mutable_data_ptr()) = {
        .learning_rate = 1e-3, .step = 1, .beta1_power = 0.9, .beta2_power = 0.999};
    state_ = bytes.to(on);
  }

  // The bits of one type are no good numbers of another.
  void clear() const {
    for (const at::Tensor& array : {weight, main, first, second, scales}) array.zero_();
  }

  // The memory of an array as numbers of another type, as many.
  static at::Tensor as(const at::Tensor& array, at::ScalarType type) {
    return array.view(at::kByte)
        .narrow(0, 0, kNumel * static_cast<int64_t>(c10::elementSize(type)))
        .view(type);
  }

  const fsdp::StepState* state() const {
    return static_cast<const fsdp::StepState*>(state_.const_data_ptr());
  }
  void* stream() const { return fsdp::current_stream(device).native_handle(); }

  const c10::Device device;
  const at::Tensor gradient, narrow_gradient, weight, main, first, second, scales, squares, marks;

 private:
  at::Tensor zeros() const { return at::zeros({kNumel}, at::device(device)); }

  at::Tensor state_;
};

// --- updates -------------------------------------------------------------------------------------

struct UpdateCase {
  const char* name;
  DType gradient;
  DType weight;
  MainWeight main;
  DType first;
  DType second;
};

constexpr DType kFp32 = DType::kFloat32;
constexpr DType kBf16 = DType::kBFloat16;
constexpr DType kE4M3 = DType::kFloat8E4M3;
constexpr MainWeight kSplit = MainWeight::kSplit;

const std::vector<UpdateCase> kAdamWCases = {
    {"fp32 weights", kFp32, kFp32, MainWeight::kIsWeight, kFp32, kFp32},
    {"bf16 weights + remainder", kFp32, kBf16, kSplit, kFp32, kFp32},
    {"the same, bf16 gradients", kBf16, kBf16, kSplit, kFp32, kFp32},
    {"bf16 weights beside fp32", kFp32, kBf16, MainWeight::kSeparate, kFp32, kFp32},
    {"remainder, bf16 moments", kFp32, kBf16, kSplit, kBf16, kBf16},
    {"remainder, fp16 moments", kFp32, kBf16, kSplit, DType::kFloat16, DType::kFloat16},
    {"remainder, fp8 moments", kFp32, kBf16, kSplit, kE4M3, kE4M3},
    {"remainder, fp8 and bf16 moments", kFp32, kBf16, kSplit, kE4M3, kBf16},
};

double main_bytes(MainWeight main) {
  if (main == MainWeight::kIsWeight) return 0.0;
  return main == MainWeight::kSplit ? 2.0 : 4.0;
}

double moment_bytes(DType dtype) {
  const double scale = fsdp::is_scaled(dtype) ? 4.0 / fsdp::kScaleBlock : 0.0;
  return static_cast<double>(fsdp::element_bytes(dtype)) + scale;
}

// A weight beside its main weight is written only.
double update_bytes(const UpdateCase& types, int num_moments) {
  const auto weight = static_cast<double>(fsdp::element_bytes(types.weight));
  double bytes = static_cast<double>(fsdp::element_bytes(types.gradient)) +
                 (types.main == MainWeight::kSeparate ? weight : 2 * weight) +
                 2 * main_bytes(types.main);
  if (num_moments > 0) bytes += 2 * moment_bytes(types.first);
  if (num_moments > 1) bytes += 2 * moment_bytes(types.second);
  return bytes;
}

fsdp::UpdateSpan span_of(const Arrays& arrays, const UpdateCase& types) {
  const bool is_wide = types.gradient == kFp32;
  return {.gradient = (is_wide ? arrays.gradient : arrays.narrow_gradient).const_data_ptr(),
          .gradient_dtype = types.gradient,
          .weight = arrays.weight.mutable_data_ptr(),
          .weight_dtype = types.weight,
          .main = types.main,
          .main_weight = arrays.main.mutable_data_ptr(),
          .first = {.values = arrays.first.mutable_data_ptr(),
                    .scales = arrays.scales[0].mutable_data_ptr<float>(),
                    .dtype = types.first},
          .second = {.values = arrays.second.mutable_data_ptr(),
                     .scales = arrays.scales[1].mutable_data_ptr<float>(),
                     .dtype = types.second},
          .numel = kNumel,
          .weight_decay = 0.1f};
}

Kernel update_kernel(const Arrays& arrays, const std::string& name, const UpdateCase& types,
                     const fsdp::UpdateMath& math, int num_moments) {
  return {name, update_bytes(types, num_moments), [&arrays, span = span_of(arrays, types), math] {
            fsdp::update_on_device(span, math, arrays.state(), arrays.device);
          }};
}

// AdamW that marks the weights it changes: at this rate and from zeros, all of them.
Kernel marking_kernel(const Arrays& arrays, const UpdateCase& types) {
  fsdp::UpdateSpan span = span_of(arrays, types);
  span.marks = static_cast<uint16_t*>(arrays.marks.mutable_data_ptr());
  return {fsdp::concat("AdamW: ", types.name, ", marks"), update_bytes(types, 2) + 0.25,
          [&arrays, span] {
            fsdp::update_on_device(span, fsdp::AdamWRule{}, arrays.state(), arrays.device);
          }};
}

std::vector<Kernel> update_kernels(const Arrays& arrays) {
  std::vector<Kernel> kernels;
  for (const UpdateCase& types : kAdamWCases) {
    kernels.push_back(
        update_kernel(arrays, fsdp::concat("AdamW: ", types.name), types, fsdp::AdamWRule{}, 2));
    kernels.push_back(marking_kernel(arrays, types));
  }
  const UpdateCase narrow{"", kBf16, kBf16, MainWeight::kIsWeight, kBf16, kBf16};
  kernels.push_back(update_kernel(arrays, "AdamW: all bf16", narrow, fsdp::AdamWRule{}, 2));
  kernels.push_back(update_kernel(arrays, "AdamW: all bf16, stochastic rounding", narrow,
                                  fsdp::AdamWRule{.rounding = fsdp::Rounding::kStochastic}, 2));
  const UpdateCase split{"", kFp32, kBf16, kSplit, kFp32, kFp32};
  kernels.push_back(
      update_kernel(arrays, "SGD: bf16 weights + remainder", split, fsdp::SgdRule{}, 0));
  kernels.push_back(update_kernel(arrays, "SGD: the same with fp32 momentum", split,
                                  fsdp::SgdRule{.momentum = 0.9}, 1));
  return kernels;
}

// libtorch's fused AdamW, and the cast it needs.
std::vector<Kernel> libtorch_kernels(const Arrays& arrays) {
  const at::Tensor step = at::ones({}, arrays.gradient.options());
  return {
      {"libtorch's fused AdamW, fp32", 28,
       [&arrays, step] {
         at::_fused_adamw_({arrays.weight}, {arrays.gradient}, {arrays.first}, {arrays.second}, {},
                           {step}, 1e-3, 0.9, 0.999, 0.01, 1e-8, false, false);
       }},
      {"libtorch's copy_ to bf16", 6,
       [from = arrays.main, to = Arrays::as(arrays.weight, at::kBFloat16)] { to.copy_(from); }}};
}

// --- gradients -----------------------------------------------------------------------------------

// Gradients that arrive in a type and are added to (or become) main gradients.
Kernel sum_kernel(const Arrays& arrays, int num_ranks, at::ScalarType wire, fsdp::Store store,
                  at::ScalarType result = at::kFloat) {
  const std::vector<at::Tensor> memory = {arrays.gradient, arrays.weight, arrays.first,
                                          arrays.second};
  std::vector<at::Tensor> inputs;
  for (int rank = 0; rank < num_ranks; ++rank)
    inputs.push_back(Arrays::as(memory[static_cast<size_t>(rank)], wire));
  const bool adds = store == fsdp::Store::kAdd;
  const fsdp::Reduction reduction{
      .scale = 0.5, .accumulate = at::kFloat, .store = store, .squares = arrays.squares};
  const auto name = [](at::ScalarType type) { return type == at::kFloat ? "fp32" : "bf16"; };
  return {fsdp::concat("sum of ", num_ranks, " x ", name(wire), adds ? ", added to " : " as ",
                       name(result), ", with squares"),
          num_ranks * static_cast<double>(c10::elementSize(wire)) +
              (adds ? 2 : 1) * static_cast<double>(c10::elementSize(result)),
          [inputs, reduction, output = Arrays::as(arrays.main, result),
           workspace = at::Tensor()]() mutable {
            fsdp::reduce_on_device(inputs, reduction, output, workspace);
          }};
}

Kernel squares_kernel(const Arrays& arrays, DType dtype) {
  const at::Tensor workspace =
      at::empty({fsdp::squared_sum_workspace_numel()}, arrays.squares.options());
  return {fsdp::concat("squared sum of ", fsdp::name_of(dtype)),
          static_cast<double>(fsdp::element_bytes(dtype)), [&arrays, workspace, dtype] {
            fsdp::squared_sum_on_device(arrays.gradient.const_data_ptr(), dtype, kNumel,
                                        arrays.squares.mutable_data_ptr<double>(),
                                        workspace.mutable_data_ptr<double>(), arrays.stream());
          }};
}

enum class Pack : uint8_t { kWrite, kAdd };

// Tensors of many lengths, as a unit has them, into one buffer.
Kernel pack_kernel(const Arrays& arrays, DType from, DType to, Pack pack) {
  constexpr int64_t kPattern[] = {2048, 4096 * 4096, 128, 1024 * 11008, 5000, 4096 * 1024};
  std::vector<fsdp::PackedTensor> tensors;
  for (int64_t begin = 0, i = 0; begin < kNumel; ++i) {
    const int64_t numel = std::min(kPattern[static_cast<size_t>(i) % 6], kNumel - begin);
    tensors.push_back({.from = static_cast<const std::byte*>(arrays.first.const_data_ptr()) +
                               begin * fsdp::element_bytes(from),
                       .from_dtype = from,
                       .to = static_cast<std::byte*>(arrays.main.mutable_data_ptr()) +
                             begin * fsdp::element_bytes(to),
                       .numel = numel,
                       .adds = pack == Pack::kAdd});
    begin += numel;
  }
  const bool adds = pack == Pack::kAdd;
  return {fsdp::concat("pack ", tensors.size(), " tensors of ", fsdp::name_of(from),
                       adds ? ", added to " : " as ", fsdp::name_of(to)),
          static_cast<double>(fsdp::element_bytes(from) + (adds ? 2 : 1) * fsdp::element_bytes(to)),
          [&arrays, tensors, to] { fsdp::pack_on_device(tensors, to, arrays.stream()); }};
}

std::vector<Kernel> gradient_kernels(const Arrays& arrays) {
  using fsdp::Store;
  return {sum_kernel(arrays, 1, at::kBFloat16, Store::kAdd),
          sum_kernel(arrays, 2, at::kBFloat16, Store::kAdd),
          sum_kernel(arrays, 4, at::kBFloat16, Store::kAdd),
          sum_kernel(arrays, 2, at::kBFloat16, Store::kWrite),
          sum_kernel(arrays, 2, at::kFloat, Store::kAdd),
          sum_kernel(arrays, 2, at::kBFloat16, Store::kWrite, at::kBFloat16),
          squares_kernel(arrays, kFp32),
          squares_kernel(arrays, kBf16),
          pack_kernel(arrays, kBf16, kFp32, Pack::kWrite),
          pack_kernel(arrays, kBf16, kFp32, Pack::kAdd),
          pack_kernel(arrays, kBf16, kBf16, Pack::kWrite),
          pack_kernel(arrays, kFp32, kBf16, Pack::kWrite)};
}

}  // namespace

void compare_kernels(c10::Device device, int rounds) {
  const Arrays arrays(device);
  const Kernel copy{"copy", 8, [&] { arrays.second.copy_(arrays.gradient); }};
  std::vector<Kernel> kernels = {copy};
  for (const auto& more :
       {update_kernels(arrays), libtorch_kernels(arrays), gradient_kernels(arrays)})
    kernels.insert(kernels.end(), more.begin(), more.end());
  const auto meet = [&] {
    c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
  };
  std::printf("# kernels on %lld elements on %s, each by turns with a copy\n",
              static_cast<long long>(kNumel), device.str().c_str());
  std::printf("# %-46s %10s %10s %10s\n", "what", "us", "GB/s", "of copy");
  for (const Kernel& kernel : kernels) {
    arrays.clear();
    kernel.run();
    const at::Tensor target = at::empty_like(arrays.gradient);
    const Timings times =
        take_turns({{"copy", [&] { target.copy_(arrays.gradient); }}, {kernel.name, kernel.run}},
                   {.rounds = rounds, .steps = 4}, meet);
    const auto rate = [&](size_t which, double bytes) {
      return static_cast<double>(kNumel) * bytes / times.best_us(which) / 1e3;
    };
    std::printf("%-48s %10.1f %10.0f %8.1f %%\n", kernel.name.c_str(), times.best_us(1),
                rate(1, kernel.bytes), 100 * rate(1, kernel.bytes) / rate(0, copy.bytes));
    std::fflush(stdout);
  }
}

}  // namespace bench
