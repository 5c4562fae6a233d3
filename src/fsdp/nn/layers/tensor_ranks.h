// Exchanges between the ranks of a tp group inside a layer, with the way back of gradients.
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

#include "fsdp/comm/communicator.h"
#include "fsdp/shard/module_roles.h"

namespace fsdp {
class MeshAxis;
}

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

at::Tensor mean_over_ranks(const at::Tensor& own, const MeshAxis* tp);

// --- logits of which each rank has a part --------------------------------------------------------

enum class LogitPart : uint8_t {
  kVocabulary,  // [batch, sequence, vocabulary / tp]: tokens of the vocabulary, in order
  kSequence,    // [batch, sequence / tp, vocabulary]: places of each sequence, in order
};

struct LogitRanks {
  const MeshAxis* tp = nullptr;  // nullptr: this rank has all
  LogitPart part = LogitPart::kSequence;
};

// All logits on every rank. The loss of them that a caller computes is the same on all ranks, so
// the gradient is this rank's slice.
at::Tensor whole_logits(const at::Tensor& logits, const LogitRanks& ranks);

}  // namespace fsdp::nn
