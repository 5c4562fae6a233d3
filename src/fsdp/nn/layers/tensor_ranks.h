// What the ranks of a tp group tell each other inside a layer, with the way back of gradients.
//
// Between layers each rank has equally many tokens of every sequence, in order. A layer that is cut
// by channels gathers the sequence, computes its part of the channels, and scatters its part of the
// sums:
//
//   [batch, sequence / tp, hidden]  gathered_linear   ->  [batch, sequence, channels / tp]
//                                   linear            ->  [batch, sequence, hidden], parts of sums
//                                   scatter_sequence  ->  [batch, sequence / tp, hidden]
//
// All ranks of the group call the backward of the same loss. Without ranks (nullptr) every function
// returns its argument.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "fsdp/shard/parallel_module.h"

namespace fsdp::nn {

// A layer on such tokens: its parameters are whole unless it says otherwise, and their gradients
// are sums over the tokens of all ranks.
class TokenParallelLayer : public TensorParallelModule {
 public:
  TpPlacement tp_placement(const std::string&) const override { return TpPartial{}; }
  void join(const MeshAxis& tp) override { tp_ = &tp; }

 protected:
  const MeshAxis* tp() const { return tp_; }

 private:
  const MeshAxis* tp_ = nullptr;
};

// The sum of the ranks' tensors, of which each keeps its tokens. UsageError if the ranks cannot
// share the sequence evenly.
at::Tensor scatter_sequence(const at::Tensor& parts, const MeshAxis* tp);

// All tokens, of which each rank goes on to use other channels or heads: the gradient is the sum of
// the ranks'.
at::Tensor gather_sequence(const at::Tensor& own, const MeshAxis* tp);

// This rank's tokens of [batch, sequence, ...], which all ranks have. UsageError likewise.
at::Tensor own_sequence(const at::Tensor& whole, const MeshAxis* tp);

at::Tensor sum_over_ranks(const at::Tensor& parts, const MeshAxis* tp);
at::Tensor mean_over_ranks(const at::Tensor& own, const MeshAxis* tp);

// For results that all ranks go on to use in the same way: the gradient is this rank's slice.
at::Tensor whole_along(int64_t dim, const at::Tensor& own, const MeshAxis* tp);

// UsageError if there are ranks.
void check_decodes_alone(const MeshAxis* tp);

}  // namespace fsdp::nn
