// The tensors of a stream of patches under the names that its receivers know: as models are
// published, or fused as vLLM has them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/checkpoint/format/manifest.h"

namespace fsdp {

// Where a published tensor lies in the output: its elements are consecutive there.
struct OutputPlace {
  size_t tensor = 0;   // in OutputTensors::tensors
  int64_t offset = 0;  // of its first element
};

struct OutputTensors {
  std::vector<StoredTensor> tensors;
  std::map<std::string, OutputPlace> places;  // by published name
};

OutputTensors as_published(const std::vector<StoredTensor>& published);

// vLLM keeps these parts one after the other, along dim 0:
//
//   X.q_proj, X.k_proj, X.v_proj                    X.qkv_proj
//   X.gate_proj, X.up_proj                          X.gate_up_proj
//   X.experts.N.gate_proj (w1), .up_proj (w3)       X.experts.w13_weight  [experts, 2 f, h]
//   X.experts.N.down_proj (w2)                      X.experts.w2_weight   [experts, h, f]
//
// Parts of which one is missing, or of different types, stay as they are.
OutputTensors as_vllm_has_them(const std::vector<StoredTensor>& published);

}  // namespace fsdp
