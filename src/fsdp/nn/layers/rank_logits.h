// Logits of which each rank of a tp group has a part: the loss of them, and all of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fsdp {
class MeshAxis;
}

namespace fsdp::nn {

enum class LogitPart : uint8_t {
  kVocabulary,  // [batch, sequence, vocabulary / tp]: tokens of the vocabulary, in order
  kSequence,    // [batch, sequence / tp, vocabulary]: places of each sequence, in order
};

struct LogitRanks {
  const MeshAxis* tp = nullptr;  // nullptr: this rank has all
  LogitPart part = LogitPart::kSequence;
};

// cross_entropy() of all logits, the same on all ranks; targets: [batch, sequence], all of them.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets,
                         const LogitRanks& ranks);

// All logits on every rank. The loss of them that a caller computes is one, the same on all ranks.
at::Tensor whole_logits(const at::Tensor& logits, const LogitRanks& ranks);

}  // namespace fsdp::nn
