#include <ATen/ATen.h>

#include <memory>
#include <utility>

#include "fsdp/base/device_stream.h"
#include "fsdp/base/text.h"
#include "fsdp/base/torch_dtype.h"
#include "fsdp/optim/kernels/thread_team.h"
#include "fsdp/optim/kernels/update_on_cpu.h"
#include "fsdp/optim/kernels/update_on_device.h"
#include "fsdp/train/calibration/measured_work.h"

namespace fsdp::train {

namespace {

using Call = std::function<void()>;

// Types of an update. Others move other numbers of bytes, and are taken to be as fast per byte.
struct UpdateTypes {
  const char* name;
  DType gradient;
  DType weight;
  MainWeight main;
};

constexpr UpdateTypes kWide = {"update fp32", DType::kFloat32, DType::kFloat32,
                               MainWeight::kIsWeight};
constexpr UpdateTypes kSplit = {"update split", DType::kFloat32, DType::kBFloat16,
                                MainWeight::kSplit};
constexpr UpdateTypes kSeparate = {"update separate", DType::kFloat32, DType::kBFloat16,
                                   MainWeight::kSeparate};

// The memory of one update, and the numbers of a step.
struct Updated {
  at::Tensor gradient, weight, main, first, second, state;

  Updated(const UpdateTypes& types, int64_t numel, c10::Device device) {
    const auto zeros = [&](DType type) {
      return at::zeros({numel}, at::device(device).dtype(scalar_type_of(type)));
    };
    gradient = zeros(types.gradient);
    weight = zeros(types.weight);
    if (types.main == MainWeight::kSplit)
      main = at::zeros({numel}, at::device(device).dtype(at::kShort));
    if (types.main == MainWeight::kSeparate) main = zeros(DType::kFloat32);
    first = zeros(DType::kFloat32);
    second = zeros(DType::kFloat32);
    at::Tensor bytes = at::zeros({static_cast<int64_t>(sizeof(StepState))}, at::kByte);
    *static_cast<StepState*>(bytes.mutable_data_ptr()) = {
        .learning_rate = 1e-3, .step = 1, .beta1_power = 0.9, .beta2_power = 0.999};
    state = bytes.to(device);
  }

  UpdateSpan span(const UpdateTypes& types) const {
    return {.gradient = gradient.data_ptr(),
            .gradient_dtype = types.gradient,
            .weight = weight.data_ptr(),
            .weight_dtype = types.weight,
            .main = types.main,
            .main_weight = main.defined() ? main.data_ptr() : nullptr,
            .first = {first.data_ptr(), nullptr, DType::kFloat32},
            .second = {second.data_ptr(), nullptr, DType::kFloat32},
            .numel = gradient.numel()};
  }
};

const StepState* state_of(const Updated& updated) {
  return static_cast<const StepState*>(updated.state.const_data_ptr());
}

Call device_update(const UpdateTypes& types, int64_t numel, c10::Device device) {
  const auto updated = std::make_shared<const Updated>(types, numel, device);
  return [=] {
    adamw_on_device(updated->span(types), AdamWRule{}, state_of(*updated),
                    current_stream(device).native_handle());
  };
}

Call host_update(const UpdateTypes& types, int64_t numel, int64_t threads) {
  const auto updated = std::make_shared<const Updated>(types, numel, c10::kCPU);
  const auto team = std::make_shared<ThreadTeam>(threads);
  return [=] {
    const UpdateSpan span = updated->span(types);
    team->run(team->size(), [&](int64_t index) {
      adamw_on_cpu(span, AdamWRule{}, *state_of(*updated),
                   piece_of_span(span, index, team->size()));
    });
  };
}

Call squared_sum(int64_t numel, c10::Device device) {
  const at::Tensor values = at::zeros({numel}, at::device(device).dtype(at::kFloat));
  if (device.is_cpu())
    return [=] { squared_sum_on_cpu(values.const_data_ptr(), DType::kFloat32, numel); };
  const auto doubles = at::device(device).dtype(at::kDouble);
  const at::Tensor sum = at::zeros({1}, doubles);
  const at::Tensor workspace = at::empty({squared_sum_workspace_numel()}, doubles);
  return [=] {
    squared_sum_on_device(values.const_data_ptr(), DType::kFloat32, numel,
                          sum.mutable_data_ptr<double>(), workspace.mutable_data_ptr<double>(),
                          current_stream(device).native_handle());
  };
}

}  // namespace

std::vector<MeasuredWork> update_works(const WorkPlace& place, const WorkSizes& sizes,
                                       int64_t threads) {
  std::vector<MeasuredWork> works;
  const bool on_cpu = place.device.is_cpu();
  for (const UpdateTypes& types : {kWide, kSplit, kSeparate}) {
    works.push_back(
        pass_work(types.name, sizes.update_elements, [=, device = place.device](int64_t numel) {
          return on_cpu ? host_update(types, numel, threads) : device_update(types, numel, device);
        }));
  }
  works.push_back(
      pass_work("squared sum", sizes.update_elements,
                [device = place.device](int64_t numel) { return squared_sum(numel, device); }));
  return works;
}

}  // namespace fsdp::train
