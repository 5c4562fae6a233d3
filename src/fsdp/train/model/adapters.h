// The adapters of a run beside its frozen weights: their description in PEFT's words, which
// checkpoints and exports have; the files that PEFT reads; and both multiplied into whole weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fsdp/checkpoint/format/tensor_catalog.h"
#include "fsdp/checkpoint/format/tensor_stream.h"
#include "fsdp/nn/config/lora_options.h"
#include "fsdp/nn/config/model_config.h"

namespace fsdp::train {

inline constexpr const char* kAdapterConfigName = "adapter_config.json";

// The content of adapter_config.json.
struct AdapterDescription {
  LoraOptions lora;  // with layers in `on`: PEFT's target_modules
  std::string base;  // the directory or checkpoint with the frozen weights
  // A sum over names, shapes and first numbers of these weights; "": not known.
  std::string fingerprint;
};

// nullopt: the checkpoint has whole weights.
std::optional<AdapterDescription> stored_adapters(const std::string& checkpoint);

// For a run whose `layers` have adapters beside the weights of `base`. Names layers by their last
// words where these mean the same to PEFT: not in models whose experts have words in common.
AdapterDescription describe_adapters(const LoraOptions& lora, std::vector<std::string> layers,
                                     const std::string& base, const ModelConfig& model);

// The text of adapter_config.json. PEFT complains about fields that it does not know, so `kPeft`
// leaves the fingerprint out.
enum class AdapterReader : uint8_t { kOurs, kPeft };
std::string to_json(const AdapterDescription& adapters, AdapterReader reader);

// The frozen weights, wherever they are now: `elsewhere`, or those that the checkpoint names if it
// is empty. Error if there are none, or others than the adapters were trained with; `option` names
// them.
std::string find_base(const AdapterDescription& adapters, const std::string& elsewhere,
                      const char* option);

// Throws a UsageError if a run with these options cannot go on with the checkpoint: one has
// adapters, and the other none, or others.
void check_resumed_adapters(const std::string& checkpoint,
                            const std::optional<AdapterDescription>& of_run);

// The adapters under the names that PEFT gives them.
std::vector<CatalogTensor> tensors_for_peft(const TensorCatalog& adapters);

// Adds what adapters do to weights, in fp32: W + scale * B A.
class MergedAdapters {
 public:
  MergedAdapters(const TensorCatalog& adapters, const LoraOptions& lora);

  // For ConvertedReads of the base. Refers to this object.
  WeightChange change() const;

 private:
  void add_to(const CatalogTensor& weight, FlatRange range, std::span<float> values) const;

  const TensorCatalog& adapters_;
  const double scale_;
};

}  // namespace fsdp::train
