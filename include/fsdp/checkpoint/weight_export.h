// Sends a model's weights out of a sharded training, tensor by tensor: no rank ever has the model.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "fsdp/checkpoint/checkpoint_options.h"
#include "fsdp/checkpoint/checkpoint_state.h"

namespace fsdp {

enum class WeightValues : uint8_t {
  // The weights that a forward computes with, in its type. For quantised ones: the main weights, in
  // the type
  // of the products' results.
  kCompute,
  kMain,  // what the optimizer updates, as checkpoints hold it
};

struct ExportOptions {
  // Names, and sections of fused tensors; and another type for floating-point weights, to which
  // their values are rounded. nullopt: the values' own.
  StoredForm form = {};
  WeightValues values = WeightValues::kCompute;
  // Who gets the tensors. Ranks that do not, take part in the transfers alone.
  enum class Receivers : uint8_t { kRank0, kAllRanks };
  Receivers receivers = Receivers::kRank0;
  // Bytes that travel at a time. A rank takes at most export_bytes() beside its own shards.
  int64_t chunk_bytes = int64_t{16} << 20;
};

// The most memory for tensors that an export takes on any rank: two chunks, and kExportReadBytes
// for conversions. A receiver of whole tensors has the largest one of them, too.
inline constexpr int64_t kExportReadBytes = int64_t{4} << 20;
int64_t export_bytes(const ExportOptions& options);

// A whole tensor, contiguous in host memory; the function may keep it.
using OnTensor = std::function<void(const std::string& name, const at::Tensor& value)>;

// Calls `on_tensor` on the receivers for every tensor of the model, in the order in which a
// checkpoint lists them; then for the state's buffers. All ranks call it, between steps. An
// exception of one rank's `on_tensor` ends the export on all ranks, after the tensor it was given.
void export_weights(const CheckpointState& state, const OnTensor& on_tensor,
                    const ExportOptions& options = {});

struct ExportFiles {
  // Limit for the tensors in one file. A larger tensor gets a file of its own.
  int64_t max_file_bytes = 5'000'000'000;
  // The text of the model's config.json, in which the type of the weights is set; "": none.
  std::string model_config = {};
  // Other files that the model is published with.
  std::vector<ModelFile> model_files = {};
  // Whether a directory of that name that has safetensors files is replaced.
  enum class Existing : uint8_t { kRefuse, kReplace };
  Existing existing = Existing::kRefuse;
};

struct ExportedFiles {
  int64_t num_tensors = 0;
  int64_t bytes = 0;  // of the tensors
};

// Writes the same tensors as HuggingFace's packages do (docs/checkpoints.md, fsdp convert --to hf).
// Rank 0 writes; it never has a whole tensor. The directory appears complete, or not at all.
ExportedFiles export_weights(const CheckpointState& state, const std::string& directory,
                             const ExportFiles& files = {}, const ExportOptions& options = {});

}  // namespace fsdp
