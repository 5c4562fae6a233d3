#include "fsdp/train/model/adapters.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/crc32c.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/json_fields.h"
#include "fsdp/base/text.h"
#include "fsdp/checkpoint/format/model_files.h"
#include "fsdp/checkpoint/run_directory.h"

namespace fsdp::train {

namespace {

constexpr const char* kFingerprint = "fsdp_base_fingerprint";
constexpr const char* kPrefix = "base_model.model.";  // PEFT's, of its wrappers around a model
constexpr int64_t kNoted = 256;                       // numbers of each tensor

std::string last_word(const std::string& layer) { return layer.substr(layer.rfind('.') + 1); }

std::string fingerprint_of(const std::string& base) {
  const TensorCatalog catalog(base);
  uint32_t sum = 0;
  const auto note = [&](std::span<const std::byte> bytes) { sum = crc32c(bytes, sum); };
  for (const auto& [name, tensor] : catalog.model()) {
    const std::string text = concat(name, " ", list_text(tensor.tensor.shape));
    note(std::as_bytes(std::span(text)));
    const FlatRange first{0, std::min(numel_of(tensor.tensor), kNoted)};
    std::vector<std::byte> bytes(
        static_cast<size_t>(first.numel() * element_bytes(tensor.tensor.dtype)));
    if (!first.empty()) read_elements(catalog.files(), tensor, first, bytes.data());
    note(bytes);
  }
  return concat(sum);
}

std::string words_of(const AdapterDescription& adapters) {
  const LoraOptions& lora = adapters.lora;
  return concat("rank ", lora.rank, ", alpha ", lora.resolved_alpha(), ", on ",
                join(lora.on, ", "));
}

at::Tensor numbers_of(const TensorCatalog& catalog, const std::string& name) {
  const CatalogTensor& tensor = catalog.model().at(name);
  const at::Tensor numbers = at::empty(tensor.tensor.shape, at::kFloat);
  ConvertedReads(catalog.files(), DType::kFloat32)
      .read(tensor, {0, numbers.numel()}, static_cast<std::byte*>(numbers.mutable_data_ptr()));
  return numbers;
}

// "...q_proj.weight" to "...q_proj.lora_A.weight".
std::string matrix_of(const std::string& weight, const char* matrix) {
  return concat(weight.substr(0, weight.rfind('.') + 1), matrix, ".weight");
}

}  // namespace

std::optional<AdapterDescription> stored_adapters(const std::string& checkpoint) {
  for (const ModelFile& file : stored_model_files(checkpoint)) {
    if (file.name != kAdapterConfigName) continue;
    const std::string source = concat(checkpoint, "/", file.name);
    const nlohmann::json document = parse_json(file.text, source);
    const JsonFields fields(document, source, "");
    AdapterDescription adapters{.lora = {.rank = fields.integer("r")},
                                .base = fields.text("base_model_name_or_path"),
                                .fingerprint = fields.text_or(kFingerprint, "")};
    adapters.lora.alpha = fields.number_or("lora_alpha", adapters.lora.resolved_alpha());
    for (const nlohmann::json& layer : fields.array("target_modules"))
      adapters.lora.on.push_back(layer.get<std::string>());
    return adapters;
  }
  return std::nullopt;
}

AdapterDescription describe_adapters(const LoraOptions& lora, std::vector<std::string> layers,
                                     const std::string& base, const ModelConfig& model) {
  AdapterDescription adapters{
      .lora = lora, .base = real_path(base), .fingerprint = fingerprint_of(base)};
  adapters.lora.alpha = lora.resolved_alpha();
  const bool by_word = !expert_names(model) &&
                       std::all_of(lora.on.begin(), lora.on.end(), [](const std::string& glob) {
                         return glob.find_first_of(".*?") == glob.npos;
                       });
  if (by_word)
    for (std::string& layer : layers) layer = last_word(layer);
  const std::set<std::string> names(layers.begin(), layers.end());
  adapters.lora.on.assign(names.begin(), names.end());
  return adapters;
}

std::string to_json(const AdapterDescription& adapters, AdapterReader reader) {
  nlohmann::ordered_json config = {{"peft_type", "LORA"},
                                   {"task_type", "CAUSAL_LM"},
                                   {"base_model_name_or_path", adapters.base},
                                   {"r", adapters.lora.rank},
                                   {"lora_alpha", adapters.lora.resolved_alpha()},
                                   {"lora_dropout", 0.0},
                                   {"bias", "none"},
                                   {"fan_in_fan_out", false},
                                   {"use_rslora", false},
                                   {"inference_mode", true},
                                   {"target_modules", adapters.lora.on}};
  const double alpha = adapters.lora.resolved_alpha();
  if (alpha == static_cast<double>(static_cast<int64_t>(alpha)))
    config["lora_alpha"] = static_cast<int64_t>(alpha);
  if (reader == AdapterReader::kOurs) config[kFingerprint] = adapters.fingerprint;
  return config.dump(2) + "\n";
}

std::string find_base(const AdapterDescription& adapters, const std::string& elsewhere,
                      const char* option) {
  const std::string base = elsewhere.empty() ? adapters.base : elsewhere;
  if (!path_exists(base))
    throw Error(concat("the adapters belong to the weights of ", base,
                       ", which are not there; name their directory with ", option));
  const std::string found = checkpoint_or_files(base);
  if (!adapters.fingerprint.empty() && fingerprint_of(found) != adapters.fingerprint)
    throw Error(concat("the weights of ", found,
                       " are others than those that the adapters were trained with (",
                       adapters.base, " then); name the right ones with ", option));
  return found;
}

void check_resumed_adapters(const std::string& checkpoint,
                            const std::optional<AdapterDescription>& of_run) {
  const std::optional<AdapterDescription> stored = stored_adapters(checkpoint);
  if (!stored && !of_run) return;
  if (!of_run)
    throw UsageError(concat(checkpoint, " holds adapters alone (", words_of(*stored),
                            "); give --lora ", stored->lora.rank,
                            " to train them on, or make whole weights of them first: fsdp convert ",
                            checkpoint, " DIR --to hf --merge"));
  if (!stored)
    throw UsageError(concat("--lora is ", of_run->lora.rank, ", but ", checkpoint,
                            " has whole weights and no adapters; choose another --checkpoint-dir, "
                            "and name weights to begin with by --init"));
  if (words_of(*stored) != words_of(*of_run))
    throw UsageError(concat(checkpoint, " has adapters of ", words_of(*stored), ", but here are ",
                            words_of(*of_run),
                            "; give the same --lora, --lora-alpha and --lora-on, or choose another "
                            "--checkpoint-dir"));
  if (stored->fingerprint != of_run->fingerprint)
    throw UsageError(concat(checkpoint, " has adapters for the weights of ", stored->base,
                            ", which were others than those of ", of_run->base,
                            " now; give the same weights, or choose another --checkpoint-dir"));
}

std::vector<CatalogTensor> tensors_for_peft(const TensorCatalog& adapters) {
  std::vector<CatalogTensor> tensors;
  for (const auto& [name, tensor] : adapters.model()) {
    tensors.push_back(tensor);
    tensors.back().tensor.name = concat(kPrefix, name);
  }
  return tensors;
}

MergedAdapters::MergedAdapters(const TensorCatalog& adapters, const LoraOptions& lora)
    : adapters_(adapters), scale_(lora.scale()) {}

WeightChange MergedAdapters::change() const {
  return {.is_of =
              [this](const std::string& name) {
                return name.ends_with(".weight") &&
                       adapters_.model().contains(matrix_of(name, "lora_A"));
              },
          .apply = [this](const CatalogTensor& tensor, FlatRange range,
                          std::span<float> values) { add_to(tensor, range, values); }};
}

// Whole rows, of which a range may have parts.
void MergedAdapters::add_to(const CatalogTensor& weight, FlatRange range,
                            std::span<float> values) const {
  const std::string& name = weight.tensor.name;
  const int64_t columns = weight.tensor.shape[1];
  const int64_t first = range.begin / columns;
  const int64_t last = (range.end + columns - 1) / columns;
  const at::Tensor rows = numbers_of(adapters_, matrix_of(name, "lora_B")).slice(0, first, last);
  const at::Tensor added = rows.mm(numbers_of(adapters_, matrix_of(name, "lora_A"))).mul_(scale_);
  at::from_blob(values.data(), {range.numel()}, at::kFloat)
      .add_(added.view({-1}).narrow(0, range.begin - first * columns, range.numel()));
}

}  // namespace fsdp::train
