// The adapters of a run beside its frozen weights: their description in PEFT's words, which
// checkpoints and exports have; the files that PEFT reads; and both multiplied into whole weights.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fsdp/checkpoint/format/tensor_catalog.h"
#include "fsdp/checkpoint/format/tensor_stream.h"
#include "fsdp/checkpoint/names/name_rules.h"
#include "fsdp/nn/config/lora_options.h"
#include "fsdp/nn/config/model_config.h"

namespace fsdp::train {

inline constexpr const char* kAdapterConfigName = "adapter_config.json";

// The content of adapter_config.json.
struct AdapterDescription {
  LoraOptions lora;                      // with layers in `on`: PEFT's target_modules
  std::vector<std::string> layers = {};  // with an adapter, by their whole names, in order
  std::string base;  // the directory or checkpoint with the frozen weights; "": not known
  // A sum over names, shapes and first numbers of these weights; "": not known.
  std::string fingerprint;
};

// Those of a checkpoint, or of a directory that PEFT wrote. nullopt: whole weights. UsageError for
// settings of PEFT that compute something else than W x + scale * B (A x).
std::optional<AdapterDescription> stored_adapters(const std::string& checkpoint);

// Whether these are files for PEFT, or a checkpoint of a run.
bool is_of_peft(const std::string& checkpoint);

// These rules, and before them one that takes PEFT's wrappers from the names.
NameRules with_names_of_peft(const NameRules& names);

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

// Throws a UsageError if a run with these options cannot go on with the checkpoint, or begin with
// it: one has adapters, and the other none, or others. `option` names it.
void check_same_adapters(const std::string& checkpoint,
                         const std::optional<AdapterDescription>& of_run, const char* option);

// The adapters under the names that PEFT gives them.
std::vector<CatalogTensor> tensors_for_peft(const TensorCatalog& adapters);

// Adds what adapters do to weights, in fp32: W + scale * B A.
class MergedAdapters {
 public:
  // `weights` are those of `base` that are written. Error if a tensor of the adapters belongs to
  // none of them, which would silently write other weights.
  MergedAdapters(const TensorCatalog& adapters, const LoraOptions& lora,
                 std::span<const CatalogTensor> weights, const std::string& base);

  // For ConvertedReads of the base. Refers to this object.
  WeightChange change() const;

 private:
  // A matrix of the weight's adapter; nullptr: it has none.
  const CatalogTensor* find(const std::string& weight, const char* matrix) const;
  bool adapts(const std::string& weight) const;
  void check_fits(const CatalogTensor& weight, int64_t rank, const std::string& base) const;
  at::Tensor numbers_of(const CatalogTensor& tensor) const;
  void add_to(const CatalogTensor& weight, FlatRange range, std::span<float> values) const;

  const TensorCatalog& adapters_;
  TensorSet tensors_;  // by our names
  const double scale_;
};

}  // namespace fsdp::train
