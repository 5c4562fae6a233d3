// Bytes that the layers of a model keep from a forward to its backward on a GPU, and what that
// backward has at most beside it: from the code of the layers (nn/).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "fsdp/base/dtype.h"
#include "fsdp/nn/config/model_config.h"
#include "fsdp/plan/model_layers.h"

namespace fsdp {

// A tensor that stays from a layer's forward to its backward.
struct KeptTensor {
  const char* what;
  int64_t elements_per_token;
  int64_t element_bytes;
};

// A moment of a backward, beside all that the block has kept; less than 0 where much of that is
// gone by then.
struct WorkingBytes {
  int64_t per_token = 0;
  int64_t of_weights = 0;  // gradients that are whole before they are reduced
};

struct BlockActivations {
  std::vector<KeptTensor> kept = {};
  std::vector<WorkingBytes> moments = {};
  std::vector<KeptTensor> input = {};  // of a layer of a block: what it keeps of its normed input
  int64_t weights = 0;                 // bytes of wider copies of weights
  int64_t inputs = 1;                  // hidden states, all that recomputation needs

  int64_t kept_bytes(int64_t tokens) const;
  int64_t working_bytes(int64_t tokens) const;  // of the largest moment
};

struct ModelActivations {
  int64_t hidden_size = 0;
  int64_t vocab_size = 0;
  std::vector<BlockActivations> blocks;  // those that predict further tokens behind the others
};

struct ActivationOptions {
  DType compute = DType::kBFloat16;
  int64_t ep = 1;
  int64_t tp = 1;
  double expert_capacity = 0.0;  // as BuildOptions has it
  bool pads_experts = true;      // else rows travel as they are; counted as in an even load
  int64_t rows = 1;              // sequences of a rank at a time
  int64_t sequence = 0;          // tokens; 0: more than a chunk of any layer
  // Linear layers keep their inputs as fp8 codes (docs/fp8.md, "kept of X for the backward"). Of
  // experts and Gated DeltaNets numbers stay.
  bool keeps_codes = false;
};

// Per token of a rank: those of a tp group have equal parts of a batch's tokens, or for all of them
// equal parts of heads and channels. nullopt: they are not known, of windows that are shorter than
// a sequence.
std::optional<ModelActivations> activations_of(const ModelConfig& config,
                                               const ActivationOptions& options);

// Rows of one token among those of a rank's experts: its own choices, or with several ranks all
// that there is room for.
double rows_per_token(int64_t chosen, int64_t experts, const ActivationOptions& options);

// After the last block; the fp32 gradient of the head's weight is kept beside it.
std::vector<KeptTensor> kept_by_head(int64_t hidden_size, DType compute);

// In blocks of libtorch's allocator.
int64_t kept_bytes(int64_t tokens, int64_t elements_per_token, int64_t element_bytes);
int64_t kept_bytes(int64_t tokens, std::span<const KeptTensor> kept);

// --- the parts of blocks, for tests --------------------------------------------------------------

BlockActivations experts_activations(const ExpertsLayer& experts, int64_t hidden,
                                     const ActivationOptions& options);

// The selective scan of Mamba-2, and the delta rule of Gated DeltaNet.
BlockActivations scan_activations(const NemotronHConfig& config, const ActivationOptions& options);
BlockActivations delta_rule_activations(const Qwen3NextConfig& config,
                                        const ActivationOptions& options);

}  // namespace fsdp
