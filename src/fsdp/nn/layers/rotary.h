// Rotary positions: pairs of channels are rotated by an angle that grows with the position.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <mutex>
#include <vector>

#include "fsdp/nn/config/model_config.h"

namespace fsdp::nn {

// Angle per position of each pair of channels (i, i + rotary_dim / 2). The channels of a head from
// rotary_dim on have no positions.
std::vector<double> rotary_frequencies(const LlamaConfig& config, int64_t rotary_dim);
inline std::vector<double> rotary_frequencies(const LlamaConfig& config) {
  return rotary_frequencies(config, head_dim_of(config));
}

// Yarn's factor of attention for so many times the positions.
double yarn_mscale(double factor, double mscale);

struct RotaryTables {
  // [positions, rotary_dim / 2], or [batch, positions, rotary_dim / 2] where sequences have
  // positions of their own; fp32, times yarn's factor.
  at::Tensor cosine;
  at::Tensor sine;
};

// Makes tables when they are first needed, each twice as long as the last, and keeps them. Shared
// by the layers of a model; neither parameter nor buffer, since they can be made again.
class Rotary {
 public:
  explicit Rotary(const LlamaConfig& config) : Rotary(config, head_dim_of(config)) {}
  Rotary(const LlamaConfig& config, int64_t rotary_dim);

  // For positions [begin, end).
  RotaryTables tables(int64_t begin, int64_t end, const at::Device& device);

 private:
  const std::vector<double> frequencies_;
  const double magnitude_;          // the factor of cosines and sines
  std::mutex mutex_;                // a backward may recompute on a thread of its own
  std::vector<RotaryTables> made_;  // all lengths: a recorded step goes on reading its own
};

struct QueryAndKey {
  at::Tensor query;  // [batch, sequence, heads, head_dim]
  at::Tensor key;    // likewise, with as many heads or fewer
};

// Computes in fp32 and rounds to the heads' type; the result is dense. Channels beyond those of the
// tables pass unchanged. Keeps only the tables for the backward.
QueryAndKey rotate(const QueryAndKey& heads, const RotaryTables& tables);

// rotate() for heads of the tables' size, without autograd: for whoever has a formula of its own.
// Gradients are rotated back.
enum class RotationDirection : uint8_t { kForward, kBack };
QueryAndKey rotated(const QueryAndKey& heads, const RotaryTables& tables,
                    RotationDirection direction);

}  // namespace fsdp::nn
