// plan/: figures that others measured on 8 GPUs, reproduced from element counts and types alone.
//
// An 8B Llama whose blocks' matrices are fp8 and everything else bf16, with fp32 main weights and
// moments, 8 ranks, fully sharded (1 x 8) or with the optimizer sharded over an outer axis too
// (2 x 4). "Allocated" is what the device's allocator had handed out between two steps, in MiB.
// There the embedding and the head were no units: they stayed whole between steps.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "fsdp/plan/forecast.h"
#include "fsdp/plan/load_model.h"

namespace fsdp::measured_memory_test {
namespace {

constexpr double kMiB = 1024.0 * 1024.0;

// The matrices of blocks are fp8: seven each.
ModelShape quantised_llama() {
  ModelShape model = model_by_name("llama3-8b");
  for (UnitShape& unit : model.units)
    for (TensorShape& tensor : unit.tensors)
      if (unit.tensors.size() > 2 && tensor.shape.size() == 2) tensor.dtype = DType::kFloat8E4M3;
  return model;
}

bool is_block(const UnitShape& unit) { return unit.tensors.size() > 2; }

PlanOptions fully_sharded(DType main_grads) {
  PlanOptions options;
  options.ranks = 8;
  options.precision.main_grads = main_grads;
  options.precision.main_storage = MainStorage::kSeparate;  // as the measured program stores them
  options.pool = PoolKind::kOnDemand;
  return options;
}

PlanOptions with_outer_axis(DType main_grads) {
  PlanOptions options = fully_sharded(main_grads);
  options.outer = 2;
  options.strategy = Strategy::optim_grads_params.hfsdp();
  return options;
}

MemoryBytes plan_of(const PlanOptions& options) {
  return Planner(quantised_llama(), options).forecast().bytes;
}

// The memory that stays between steps: the shards, and whole weights outside any unit.
double resting_mib(const PlanOptions& options) {
  const MemoryBytes bytes = plan_of(options);
  double whole = 0;
  for (const UnitShape& unit : quantised_llama().units)
    if (!is_block(unit)) whole += 2.0 * static_cast<double>(unit.numel());
  const int64_t shards = bytes.weight + bytes.main_weight + bytes.main_grad + bytes.moments;
  return (static_cast<double>(shards) + whole) / kMiB;
}

void expect_within(double forecast, double measured, double tolerance) {
  EXPECT_NEAR(forecast, measured, tolerance * measured);
}

TEST(MeasuredMemory, TwoSlotsForWeightsAndForGradientsInBFloat16) {
  // 1 x 8: memory on demand, which is given back between steps, against two slots that stay, with
  // gradients that travel in bf16. Only the blocks are units.
  PlanOptions options = fully_sharded(DType::kFloat32);
  options.precision.grad_comm = DType::kBFloat16;
  options.pool = PoolKind::kDoubleBuffer;
  ModelShape blocks = quantised_llama();
  std::erase_if(blocks.units, [](const UnitShape& unit) { return !is_block(unit); });
  ASSERT_EQ(blocks.units.size(), 32u);
  blocks.uses.clear();
  blocks.ends.clear();
  for (int64_t unit = 0; unit < 32; ++unit) blocks.uses.push_back(unit);
  const MemoryBytes bytes = Planner(blocks, options).forecast().bytes;
  const double slots = static_cast<double>(bytes.weight_pool + bytes.grad_pool) / kMiB;
  expect_within(slots, 19765.60 - 18516.73, 0.001);
}

TEST(MeasuredMemory, AllOfIt) {
  // The rest, about 112 MiB in each, does not depend on the types: activations, workspaces of
  // libraries and scales of quantised weights.
  const auto expect = [](double forecast, double measured) {
    expect_within(forecast, measured, 0.02);
    EXPECT_NEAR(measured - forecast, 112, 4);
  };
  expect(resting_mib(fully_sharded(DType::kFloat32)), 18516.73);
  expect(resting_mib(with_outer_axis(DType::kFloat32)), 23425.69);
  expect(resting_mib(with_outer_axis(DType::kBFloat16)), 19595.55);
}

// Not reproduced, because they are no functions of element counts and types:
//   the most that was allocated in a step (60039.38 -> 60646.15 MiB with two slots; 33573.09 with
//   fp32 gradients at 2 x 4): activations and the gradients that autograd makes were live then;
//   reserved memory: blocks of the allocator;
//   everything of runs whose memory was not reported.

}  // namespace
}  // namespace fsdp::measured_memory_test
