// The ways to train one model that bench_gpu compares, each a step that can be timed or recorded.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include "fsdp/nn/config/model_config.h"

namespace bench {

// Every row trains on this, here and in gpu_peers.py.
struct Batch {
  at::Tensor tokens;   // [batch, sequence], int64
  at::Tensor targets;  // the same shape: what follows each token
};

struct AdamWRates {
  double lr = 3e-4;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
};

struct RowSetup {
  fsdp::ModelConfig config;
  c10::Device device;
  // Rows compute in this type, and rows "in bf16" keep everything in it: bf16, but not on CPUs,
  // many of which cannot multiply it.
  at::ScalarType compute = at::kBFloat16;
  AdamWRates rates;
  int64_t offload_chunk = 0;  // of the rows that offload; 0: the default
};

// One model and its optimizer. It begins with the same values in every row.
class Trainee {
 public:
  // `loss` is where the losses go.
  explicit Trainee(at::Tensor loss) : loss_(std::move(loss)) {}
  virtual ~Trainee() = default;
  Trainee(const Trainee&) = delete;
  Trainee& operator=(const Trainee&) = delete;

  // Forward, backward and update. The host reads nothing, so that a step can be recorded; one that
  // is takes the same batch every time.
  virtual void step(const Batch& batch) = 0;

  // Until the host has done its part of what was begun; the device may go on.
  virtual void finish() {}

  // The loss of the last step, before its update: one fp32 element on the device, always the same
  // one.
  const at::Tensor& loss() const { return loss_; }

 protected:
  const at::Tensor loss_;
};

enum class Launch : uint8_t {
  kEager,  // every step is launched kernel by kernel
  kGraph,  // the step is recorded once and replayed
};

struct Row {
  std::string_view name;
  std::string_view summary;
  Launch launch = Launch::kEager;
  std::unique_ptr<Trainee> (*make)(const RowSetup& setup) = nullptr;
};

std::span<const Row> rows();

// UsageError with the names there are.
const Row& find_row(std::string_view name);

// Embedding, layers and head.
int64_t num_units(const fsdp::ModelConfig& config);

}  // namespace bench
