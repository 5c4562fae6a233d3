// Logits of which each rank of a tp group has a part.
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

// All logits on every rank. The loss of them that a caller computes is one, the same on all ranks.
at::Tensor whole_logits(const at::Tensor& logits, const LogitRanks& ranks);

}  // namespace fsdp::nn
