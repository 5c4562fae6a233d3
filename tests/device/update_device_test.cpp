// The update kernels of a device give the same bits as those of the host.
#include "fsdp/optim/kernels/update_kernels.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/optim/kernels/split_weight.h"
#include "fsdp/optim/kernels/update_math.h"
#include "support/require.h"
#include "support/update_case.h"

#define FSDP_REQUIRE_DEVICE_UPDATES() \
  FSDP_REQUIRE_GPU();                 \
  if (!has_device_updates()) GTEST_SKIP() << "built without CUDA kernels"

namespace fsdp::update_device_test {
namespace {

using testing::all_update_types;
using testing::text_of;
using testing::UpdateMemory;
using testing::UpdateTypes;

// An array on the device; the default stream keeps everything in order.
template <typename T>
at::Tensor on_device(const std::vector<T>& values) {
  const auto bytes = static_cast<int64_t>(values.size() * sizeof(T));
  at::Tensor host = at::empty({bytes}, at::kByte);
  if (bytes > 0) std::memcpy(host.mutable_data_ptr(), values.data(), values.size() * sizeof(T));
  return host.to(at::kCUDA);
}

template <typename T>
void fetch(const at::Tensor& from, std::vector<T>& values) {
  const at::Tensor host = from.cpu();
  if (!values.empty()) std::memcpy(values.data(), host.const_data_ptr(), values.size() * sizeof(T));
}

// The memory of an update, on the device.
class DeviceMemory {
 public:
  explicit DeviceMemory(const UpdateMemory& host)
      : host_(host),
        gradient_(on_device(host.gradient)),
        weight_(on_device(host.weight)),
        main_weight_(on_device(host.main_weight)),
        first_(on_device(host.first)),
        second_(on_device(host.second)),
        first_scales_(on_device(host.first_scales)),
        second_scales_(on_device(host.second_scales)),
        marks_(on_device(host.marks)) {}

  UpdateSpan span() {
    UpdateSpan span = host_.span();
    span.gradient = gradient_.data_ptr();
    span.weight = weight_.data_ptr();
    span.main_weight = main_weight_.data_ptr();
    span.first.values = first_.data_ptr();
    span.second.values = second_.data_ptr();
    span.first.scales = static_cast<float*>(first_scales_.data_ptr());
    span.second.scales = static_cast<float*>(second_scales_.data_ptr());
    if (span.marks != nullptr) span.marks = static_cast<uint16_t*>(marks_.data_ptr());
    return span;
  }

  UpdateMemory fetched() const {
    UpdateMemory result = host_;
    fetch(gradient_, result.gradient);
    fetch(weight_, result.weight);
    fetch(main_weight_, result.main_weight);
    fetch(first_, result.first);
    fetch(second_, result.second);
    fetch(first_scales_, result.first_scales);
    fetch(second_scales_, result.second_scales);
    fetch(marks_, result.marks);
    return result;
  }

 private:
  UpdateMemory host_;
  at::Tensor gradient_, weight_, main_weight_, first_, second_, first_scales_, second_scales_,
      marks_;
};

class DeviceState {
 public:
  explicit DeviceState(const StepState& state) : tensor_(on_device(std::vector{state})) {}
  StepState* get() { return static_cast<StepState*>(tensor_.data_ptr()); }
  StepState fetched() const {
    std::vector<StepState> states(1);
    fetch(tensor_, states);
    return states[0];
  }

 private:
  at::Tensor tensor_;
};

StepState begun(int64_t steps) {
  StepState state{.learning_rate = 0.01};
  for (int64_t step = 0; step < steps; ++step) {
    state.squared_norm = 9.0;
    begin_step(state, {.max_norm = 1.0});
  }
  return state;
}

UpdateMemory drawn(const UpdateTypes& types, int64_t numel, int64_t flat_begin) {
  UpdateMemory memory(types, numel, flat_begin);
  memory.draw_weights(1);
  memory.draw_gradients(2);
  return memory;
}

UpdateMemory with_marks(UpdateMemory memory) {
  memory.keep_marks();
  return memory;
}

void expect_same_adamw(UpdateMemory host, const AdamWRule& rule) {
  DeviceMemory device(host);
  for (int64_t step = 1; step <= 3; ++step) {
    const StepState state = begun(step);
    DeviceState device_state(state);
    adamw_on_cpu(host.span(), rule, state, {0, host.numel});
    adamw_on_device(device.span(), rule, device_state.get(), nullptr);
  }
  EXPECT_TRUE(device.fetched() == host) << text_of(host.types) << ", " << host.numel << " elements";
}

// Where spans begin: at places from which vectors are aligned, with and without a block that is
// cut, and at one from which they are not. Each has kernels of its own.
constexpr int64_t kBegins[] = {256, 100, 77};

TEST(UpdateOnDevice, AdamWGivesTheBitsOfTheHostInEveryCombinationOfTypes) {
  FSDP_REQUIRE_DEVICE_UPDATES();
  for (const UpdateTypes& types : all_update_types())
    for (const int64_t flat_begin : kBegins)
      for (const Rounding rounding : {Rounding::kNearest, Rounding::kStochastic})
        expect_same_adamw(drawn(types, 1001, flat_begin), {.rounding = rounding, .seed = 5});
}

TEST(UpdateOnDevice, AdamWMarksTheWeightsThatTheHostMarks) {
  FSDP_REQUIRE_DEVICE_UPDATES();
  for (const UpdateTypes& types : all_update_types())
    for (const int64_t flat_begin : kBegins)
      for (const Rounding rounding : {Rounding::kNearest, Rounding::kStochastic})
        expect_same_adamw(with_marks(drawn(types, 1001, flat_begin)),
                          {.rounding = rounding, .seed = 5});
}

// Roots and quotients are computed otherwise where numbers are very large or small.
TEST(UpdateOnDevice, AdamWGivesTheBitsOfTheHostForGradientsOfEverySize) {
  FSDP_REQUIRE_DEVICE_UPDATES();
  const UpdateTypes narrow{.weight = DType::kBFloat16,
                           .main = MainWeight::kSplit,
                           .first = DType::kFloat8E4M3,
                           .second = DType::kFloat8E4M3};
  for (const UpdateTypes& types : {UpdateTypes{}, UpdateTypes{.second = DType::kBFloat16},
                                   UpdateTypes{.second = DType::kFloat8E4M3}, narrow}) {
    UpdateMemory host = drawn(types, 400'000, 128);
    for (int64_t i = 0; i < host.numel; ++i) {
      float gradient = 0.0f;
      std::memcpy(&gradient, host.gradient.data() + 4 * i, 4);
      // Neighbours of one size, which go together, and of sizes that differ.
      const auto exponent = static_cast<int>((i < 200'000 ? i / 100 : i) % 190);
      gradient = exponent == 0 ? 0.0f : std::ldexp(gradient, exponent - 130);
      std::memcpy(host.gradient.data() + 4 * i, &gradient, 4);
    }
    expect_same_adamw(host, {.seed = 5});
  }
}

// Expects two arrays to have the same bits, or both NaN, whose bits are a machine's own.
void expect_same_numbers(DType dtype, const UpdateMemory::Bytes& actual,
                         const UpdateMemory::Bytes& expected, const std::string& what) {
  const int64_t bytes = element_bytes(dtype);
  for (int64_t i = 0; i < static_cast<int64_t>(expected.size()) / bytes; ++i) {
    const bool same_bits = std::memcmp(actual.data() + i * bytes, expected.data() + i * bytes,
                                       static_cast<size_t>(bytes)) == 0;
    const bool both_nan = std::isnan(testing::decoded(dtype, actual.data(), i)) &&
                          std::isnan(testing::decoded(dtype, expected.data(), i));
    ASSERT_TRUE(same_bits || both_nan) << what << ", element " << i;
  }
}

TEST(UpdateOnDevice, GradientsThatAreNotFiniteDoWhatTheyDoOnTheHost) {
  FSDP_REQUIRE_DEVICE_UPDATES();
  for (const UpdateTypes& types : all_update_types()) {
    if (types.gradient != DType::kFloat32) continue;
    UpdateMemory host = drawn(types, 1001, 100);
    const float bad[] = {std::numeric_limits<float>::infinity(),
                         -std::numeric_limits<float>::infinity(),
                         std::numeric_limits<float>::quiet_NaN()};
    for (int64_t i = 0; i < 3; ++i)
      std::memcpy(host.gradient.data() + 4 * (200 + 150 * i), &bad[i], 4);
    DeviceMemory device(host);
    const StepState state = begun(1);
    DeviceState device_state(state);
    adamw_on_cpu(host.span(), {.seed = 5}, state, {0, host.numel});
    adamw_on_device(device.span(), {.seed = 5}, device_state.get(), nullptr);
    const UpdateMemory fetched = device.fetched();
    expect_same_numbers(types.weight, fetched.weight, host.weight, text_of(types));
    if (types.main == MainWeight::kSplit) {  // NaN has one form there
      EXPECT_EQ(fetched.weight, host.weight) << text_of(types);
      EXPECT_EQ(fetched.main_weight, host.main_weight) << text_of(types);
    }
    expect_same_numbers(types.first, fetched.first, host.first, text_of(types));
    expect_same_numbers(types.second, fetched.second, host.second, text_of(types));
    EXPECT_EQ(fetched.first_scales, host.first_scales) << text_of(types);
    EXPECT_EQ(fetched.second_scales, host.second_scales) << text_of(types);
  }
}

TEST(UpdateOnDevice, AdamWGivesTheBitsOfTheHostForEveryLengthAndBegin) {
  FSDP_REQUIRE_DEVICE_UPDATES();
  const UpdateTypes types{.gradient = DType::kBFloat16,
                          .weight = DType::kBFloat16,
                          .main = MainWeight::kSplit,
                          .first = DType::kFloat8E4M3,
                          .second = DType::kFloat16};
  for (const int64_t numel : {0, 1, 31, 32, 33, 127, 128, 129, 5000})
    for (const int64_t flat_begin :
         {int64_t{0}, int64_t{1}, int64_t{127}, int64_t{128}, (int64_t{1} << 32) - 100})
      expect_same_adamw(drawn(types, numel, flat_begin), {.seed = 5});
  // More blocks than the grid has warps.
  expect_same_adamw(drawn({}, 5'000'001, 77), {.seed = 5});
  expect_same_adamw(drawn({}, 5'000'001, 128), {.seed = 5});
  // Vectors of a span whose positions go past 2^32, where random numbers have another key.
  expect_same_adamw(drawn(types, 1000, (int64_t{1} << 32) - 500), {.seed = 5});
}

// So many blocks that a warp takes several in a row, in one run or in two, the last of them short.
TEST(UpdateOnDevice, AdamWGivesTheBitsOfTheHostForRunsOfBlocks) {
  FSDP_REQUIRE_DEVICE_UPDATES();
  const std::pair<DType, DType> moments[] = {{DType::kFloat8E4M3, DType::kFloat8E4M3},
                                             {DType::kFloat8E5M2, DType::kFloat16},
                                             {DType::kFloat16, DType::kFloat32},
                                             {DType::kFloat32, DType::kFloat8E4M3}};
  for (const auto& [first, second] : moments)
    for (const int64_t numel : {2'000'001, 7'000'003})
      expect_same_adamw(drawn({.gradient = DType::kFloat32,
                               .weight = DType::kBFloat16,
                               .main = MainWeight::kSplit,
                               .first = first,
                               .second = second},
                              numel, 128),
                        {.seed = 5});
}

TEST(UpdateOnDevice, SgdGivesTheBitsOfTheHost) {
  FSDP_REQUIRE_DEVICE_UPDATES();
  for (const UpdateTypes& types : all_update_types()) {
    if (types.second != DType::kFloat32) continue;
    for (const auto& [rule, flat_begin] :
         {std::pair{SgdRule{.rounding = Rounding::kStochastic}, int64_t{77}},
          {SgdRule{.rounding = Rounding::kStochastic}, 100},
          {SgdRule{.momentum = 0.9}, 100},
          {SgdRule{.momentum = 0.9, .nesterov = true}, 100},
          {SgdRule{.momentum = 0.9, .nesterov = true}, 77}}) {
      const UpdateMemory plain = drawn(types, 1001, flat_begin);
      for (UpdateMemory host : {plain, with_marks(plain)}) {
        DeviceMemory device(host);
        for (int64_t step = 1; step <= 3; ++step) {
          const StepState state = begun(step);
          DeviceState device_state(state);
          sgd_on_cpu(host.span(), rule, state, {0, host.numel});
          sgd_on_device(device.span(), rule, device_state.get(), nullptr);
        }
        EXPECT_TRUE(device.fetched() == host) << text_of(types);
      }
    }
  }
}

TEST(UpdateOnDevice, SkippedStepsChangeNothing) {
  FSDP_REQUIRE_DEVICE_UPDATES();
  const UpdateMemory host = drawn({.second = DType::kBFloat16}, 1001, 77);
  DeviceMemory device(host);
  StepState state = begun(1);
  state.skips = 1;
  DeviceState device_state(state);
  adamw_on_device(device.span(), {}, device_state.get(), nullptr);
  sgd_on_device(device.span(), {.momentum = 0.9}, device_state.get(), nullptr);
  EXPECT_TRUE(device.fetched() == host);
}

TEST(UpdateOnDevice, StepsBeginAsOnTheHost) {
  FSDP_REQUIRE_DEVICE_UPDATES();
  const StepRule rule{.max_norm = 1.5, .growth = 2.0, .backoff = 0.5, .growth_interval = 2};
  StepState host{.learning_rate = 0.01, .loss_scale = 1024.0};
  for (const double squared_norm : {1.0, 1e7, 0.1, std::numeric_limits<double>::infinity(), 3e6}) {
    host.squared_norm = squared_norm;
    DeviceState device(host);
    begin_step_on_device(device.get(), rule, nullptr);
    begin_step(host, rule);
    const StepState fetched = device.fetched();
    EXPECT_EQ(std::memcmp(&fetched, &host, sizeof(StepState)), 0) << squared_norm;
  }
}

TEST(UpdateOnDevice, SquaredSumsAgreeWithTheHostAndRepeat) {
  FSDP_REQUIRE_DEVICE_UPDATES();
  const at::Tensor workspace =
      at::empty({squared_sum_workspace_numel()}, at::device(at::kCUDA).dtype(at::kDouble));
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16})
    for (const int64_t numel : {1, 1000, 1'000'003}) {
      const UpdateMemory host = drawn({.gradient = dtype}, numel, 0);
      const at::Tensor values = on_device(host.gradient);
      const double expected = squared_sum_on_cpu(host.gradient.data(), dtype, numel);
      const auto sum = [&](double begin) {
        at::Tensor total = at::full({1}, begin, at::device(at::kCUDA).dtype(at::kDouble));
        squared_sum_on_device(values.data_ptr(), dtype, numel, total.mutable_data_ptr<double>(),
                              workspace.mutable_data_ptr<double>(), nullptr);
        return total.item<double>();
      };
      EXPECT_NEAR(sum(0.0), expected, 1e-12 * expected);
      EXPECT_EQ(sum(0.0), sum(0.0));
      EXPECT_NEAR(sum(expected), 2 * expected, 1e-12 * expected) << "adds to what is there";
    }
}

}  // namespace
}  // namespace fsdp::update_device_test
