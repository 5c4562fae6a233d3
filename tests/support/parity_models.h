// Small models with every shape that sharding has to survive, and the data to train them with.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support/test_device.h"

namespace fsdp::testing {

enum class ModelKind : uint8_t {
  kMlp,     // odd shapes; a scalar, an empty and a frozen parameter; one parameter outside any unit
  kLlama,   // embedding, three blocks (RMSNorm, causal attention with rope, SwiGLU), head
  kHybrid,  // wide MLP, narrow recurrence, experts of which some stay unused, a head tied to the
            // embedding
};

const char* name_of(ModelKind kind);

// One rank's input in one microbatch.
struct Batch {
  at::Tensor input;
  at::Tensor target;
  int64_t num_rows = 0;  // the divisor of a mean loss
};

class ParityModel : public torch::nn::Module {
 public:
  // Summed over the rows of the batch, always in fp32.
  virtual at::Tensor summed_loss(const Batch& batch) = 0;
};

// Equal values on every call. May be called by several ranks at the same time, although libtorch's
// generator belongs to the process.
std::shared_ptr<ParityModel> make_model(ModelKind kind, at::ScalarType compute);

// Different for every rank, step and microbatch, and of unequal size. kHybrid: tokens of two of the
// three experts, another two each time.
Batch make_batch(ModelKind kind, int64_t rank, int64_t step, int64_t microbatch,
                 at::ScalarType compute);

// Each parameter once, under its first name.
std::vector<std::pair<std::string, at::Tensor>> distinct_parameters(const torch::nn::Module& model);

}  // namespace fsdp::testing
