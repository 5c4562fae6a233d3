// Rotary positions: pairs of channels are rotated by an angle that grows with the position.
#pragma once

#include <ATen/core/Tensor.h>

#include <mutex>
#include <vector>

#include "fsdp/nn/config/model_config.h"

namespace fsdp::nn {

// Angle per position of each pair of channels (i, i + head_dim / 2).
std::vector<double> rotary_frequencies(const LlamaConfig& config);

struct RotaryTables {
  at::Tensor cosine;  // [positions, head_dim / 2], fp32
  at::Tensor sine;
};

// Makes tables when they are first needed, each twice as long as the last, and keeps them. Shared
// by the layers of a model; neither parameter nor buffer, since they can be made again.
class Rotary {
 public:
  explicit Rotary(const LlamaConfig& config) : frequencies_(rotary_frequencies(config)) {}

  // For positions [begin, end).
  RotaryTables tables(int64_t begin, int64_t end, const at::Device& device);

 private:
  const std::vector<double> frequencies_;
  std::mutex mutex_;                // a backward may recompute on a thread of its own
  std::vector<RotaryTables> made_;  // all lengths: a recorded step goes on reading its own
};

struct QueryAndKey {
  at::Tensor query;  // [batch, sequence, heads, head_dim]
  at::Tensor key;    // likewise, with as many heads or fewer
};

// Computes in fp32 and rounds to the heads' type; the result is dense. Keeps only the tables for
// the backward.
QueryAndKey rotate(const QueryAndKey& heads, const RotaryTables& tables);

}  // namespace fsdp::nn
