#include "fsdp/train/model/adapters.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <iterator>
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
constexpr const char* kA = "lora_A";
constexpr const char* kB = "lora_B";
constexpr const char* kDown = ".lora_A.weight";
constexpr int64_t kNoted = 256;  // numbers of each tensor

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

std::vector<std::string> last_words(const AdapterDescription& adapters) {
  std::set<std::string> words;
  for (const std::string& layer : adapters.layers) words.insert(last_word(layer));
  return {words.begin(), words.end()};
}

std::string words_of(const AdapterDescription& adapters) {
  const LoraOptions& lora = adapters.lora;
  return concat("rank ", lora.rank, ", alpha ", lora.resolved_alpha(), ", on ",
                join(last_words(adapters), ", "));
}

// The flags of a run with such adapters.
std::string flags_of(const AdapterDescription& adapters) {
  const LoraOptions& lora = adapters.lora;
  const bool is_usual = lora.resolved_alpha() == LoraOptions{.rank = lora.rank}.resolved_alpha();
  return concat("--lora ", lora.rank, is_usual ? "" : concat(" --lora-alpha ", *lora.alpha),
                " --lora-on ", join(last_words(adapters), " "));
}

// "...q_proj.weight" to "...q_proj.lora_A.weight".
std::string matrix_of(const std::string& weight, const char* matrix) {
  return concat(weight.substr(0, weight.rfind('.') + 1), matrix, ".weight");
}

std::string without_prefix(const std::string& name) {
  return name.starts_with(kPrefix) ? name.substr(std::string_view(kPrefix).size()) : name;
}

// Those with an adapter, by the names of its tensors: a run describes them by their last words,
// and PEFT by patterns of several kinds.
std::vector<std::string> layers_of(const std::string& checkpoint) {
  std::vector<std::string> names;
  if (is_of_peft(checkpoint)) {
    const TensorCatalog catalog(checkpoint);
    for (const auto& [name, tensor] : catalog.model()) names.push_back(name);
  } else {
    const Manifest manifest = read_manifest(checkpoint);
    for (const StoredTensor& tensor : manifest.model) names.push_back(tensor.name);
  }
  std::set<std::string> layers;
  for (const std::string& name : names)
    if (name.ends_with(kDown))
      layers.insert(without_prefix(name.substr(0, name.size() - std::string_view(kDown).size())));
  return {layers.begin(), layers.end()};
}

bool is_off(const nlohmann::json& value) {
  return value.is_null() || value == false || value == "" || value == "none" ||
         (value.is_structured() && value.empty());
}

// Each is absent or off where adapters compute W x + scale * B (A x).
constexpr const char* kOtherComputations[] = {
    "use_dora",    "fan_in_fan_out",    "rank_pattern", "alpha_pattern",
    "bias",        "modules_to_save",   "lora_bias",    "target_parameters",
    "use_qalora",  "layer_replication", "use_bdlora",   "trainable_token_indices",
    "kasa_config", "monteclora_config", "arrow_config", "alora_invocation_tokens"};
// First values that leave the base as it is; others, such as "pissa", take a part out of it.
constexpr const char* kFirstValues[] = {"gaussian", "eva", "orthogonal"};

void check_computation(const nlohmann::json& config, const JsonFields& fields) {
  const char* const fix = "adapters with it cannot be read here; merge them with PEFT";
  if (config.value("peft_type", nlohmann::json("LORA")) != "LORA")
    fields.refuse("peft_type", "only LORA can be read here; merge others with PEFT");
  if (fields.integer("r") < 1) fields.refuse("r", "it must be at least 1");
  for (const char* field : kOtherComputations)
    if (config.contains(field) && !is_off(config[field])) fields.refuse(field, fix);
  const nlohmann::json first = config.value("init_lora_weights", nlohmann::json());
  if (first.is_string() && std::none_of(std::begin(kFirstValues), std::end(kFirstValues),
                                        [&](const char* known) { return first == known; }))
    fields.refuse("init_lora_weights",
                  "such adapters belong to a changed base; save them with PEFT's "
                  "path_initial_model_for_weight_conversion");
}

}  // namespace

std::optional<AdapterDescription> stored_adapters(const std::string& checkpoint) {
  for (const ModelFile& file : stored_model_files(checkpoint)) {
    if (file.name != kAdapterConfigName) continue;
    const std::string source = concat(checkpoint, "/", file.name);
    const nlohmann::json document = parse_json(file.text, source);
    const JsonFields fields(document, source, "");
    check_computation(document, fields);
    AdapterDescription adapters{.lora = {.rank = fields.integer("r")},
                                .layers = layers_of(checkpoint),
                                .base = fields.text_or("base_model_name_or_path", ""),
                                .fingerprint = fields.text_or(kFingerprint, "")};
    double alpha = fields.number_or("lora_alpha", adapters.lora.resolved_alpha());
    // Its scale is alpha / sqrt(rank), ours always alpha / rank.
    if (fields.boolean_or("use_rslora", false))
      alpha *= std::sqrt(static_cast<double>(adapters.lora.rank));
    adapters.lora.alpha = alpha;
    if (is_of_peft(checkpoint))
      adapters.lora.on = adapters.layers;
    else
      for (const nlohmann::json& layer : fields.array("target_modules"))
        adapters.lora.on.push_back(layer.get<std::string>());
    return adapters;
  }
  return std::nullopt;
}

bool is_of_peft(const std::string& checkpoint) {
  return !path_exists(concat(checkpoint, "/", kManifestName));
}

NameRules with_names_of_peft(const NameRules& names) {
  std::vector<NameRule> rules = {
      {.title = "PEFT's wrappers", .pattern = concat(kPrefix, "*"), .sections = {{.name = "$1"}}}};
  rules.insert(rules.end(), names.rules().begin(), names.rules().end());
  return NameRules(std::move(rules), names.fields());
}

AdapterDescription describe_adapters(const LoraOptions& lora, std::vector<std::string> layers,
                                     const std::string& base, const ModelConfig& model) {
  AdapterDescription adapters{
      .lora = lora, .layers = layers, .base = real_path(base), .fingerprint = fingerprint_of(base)};
  std::sort(adapters.layers.begin(), adapters.layers.end());
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
  if (base.empty())
    throw Error(concat(kAdapterConfigName,
                       " does not say which weights the adapters belong to; name their directory "
                       "with ",
                       option));
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

void check_same_adapters(const std::string& checkpoint,
                         const std::optional<AdapterDescription>& of_run, const char* option) {
  const std::optional<AdapterDescription> stored = stored_adapters(checkpoint);
  if (!stored && !of_run) return;
  if (!of_run)
    throw UsageError(concat(
        checkpoint, " holds adapters alone (", words_of(*stored), "); give ", flags_of(*stored),
        " to train them on, or make whole weights of them first: fsdp convert ", checkpoint,
        " DIR --to hf --merge", path_exists(stored->base) ? "" : " --base MODEL"));
  if (!stored)
    throw UsageError(concat("--lora is ", of_run->lora.rank, ", but ", checkpoint,
                            " has whole weights and no adapters; choose another ", option,
                            ", and name weights to begin with by --init"));
  if (words_of(*stored) != words_of(*of_run))
    throw UsageError(concat(checkpoint, " has adapters of ", words_of(*stored), ", but here are ",
                            words_of(*of_run), "; give ", flags_of(*stored), ", or choose another ",
                            option));
  std::vector<std::string> different;
  std::set_symmetric_difference(stored->layers.begin(), stored->layers.end(),
                                of_run->layers.begin(), of_run->layers.end(),
                                std::back_inserter(different));
  if (!different.empty())
    throw UsageError(concat(checkpoint, " has adapters on ", stored->layers.size(),
                            " layers, and here are ", of_run->layers.size(), ": '",
                            different.front(), "' has one in one of them alone; ",
                            "give the same --lora-on, or choose another ", option));
  if (!stored->fingerprint.empty() && stored->fingerprint != of_run->fingerprint)
    throw UsageError(concat(checkpoint, " has adapters for the weights of ", stored->base,
                            ", which were others than those of ", of_run->base,
                            " now; give the same weights, or choose another ", option));
}

std::vector<CatalogTensor> tensors_for_peft(const TensorCatalog& adapters) {
  std::vector<CatalogTensor> tensors;
  for (const auto& [name, tensor] : adapters.model()) {
    tensors.push_back(tensor);
    tensors.back().tensor.name = concat(kPrefix, without_prefix(name));
  }
  return tensors;
}

MergedAdapters::MergedAdapters(const TensorCatalog& adapters, const LoraOptions& lora,
                               std::span<const CatalogTensor> weights, const std::string& base)
    : adapters_(adapters), scale_(lora.scale()) {
  for (const auto& [name, tensor] : adapters.model()) tensors_[without_prefix(name)] = tensor;
  FSDP_CHECK(!tensors_.empty(), adapters.path(),
             " holds no adapters; name the directory of the adapters to merge");
  std::set<std::string> left;
  for (const auto& [name, tensor] : tensors_) left.insert(name);
  for (const CatalogTensor& weight : weights) {
    if (!adapts(weight.tensor.name)) continue;
    check_fits(weight, lora.rank, base);
    for (const char* matrix : {kA, kB}) left.erase(matrix_of(weight.tensor.name, matrix));
  }
  if (left.empty()) return;
  throw Error(concat(adapters.path(), " has '", shown(tensors_[*left.begin()].tensor.name), "'",
                     left.size() > 1 ? concat(" and ", left.size() - 1, " more tensors") : "",
                     ", which adapt no weight of ", base,
                     "; name the weights that they were trained on with --base, or merge with PEFT "
                     "what is no plain adapter of a linear layer"));
}

const CatalogTensor* MergedAdapters::find(const std::string& weight, const char* matrix) const {
  const auto found = tensors_.find(matrix_of(weight, matrix));
  return found == tensors_.end() ? nullptr : &found->second;
}

bool MergedAdapters::adapts(const std::string& weight) const {
  return weight.ends_with(".weight") && find(weight, kA) != nullptr && find(weight, kB) != nullptr;
}

void MergedAdapters::check_fits(const CatalogTensor& weight, int64_t rank,
                                const std::string& base) const {
  const std::vector<int64_t>& shape = weight.tensor.shape;
  const std::vector<int64_t>& down = find(weight.tensor.name, kA)->tensor.shape;
  const std::vector<int64_t>& up = find(weight.tensor.name, kB)->tensor.shape;
  FSDP_CHECK(shape.size() == 2 && down == std::vector<int64_t>({rank, shape[1]}) &&
                 up == std::vector<int64_t>({shape[0], rank}),
             adapters_.path(), ": the adapter of '", shown(weight.tensor.name), "' is ",
             list_text(down), " and ", list_text(up), ", of rank ", rank,
             ", which does not fit the weight's ", list_text(shape), " in ", base,
             "; name the weights that it was trained on with --base");
}

WeightChange MergedAdapters::change() const {
  return {.is_of = [this](const std::string& name) { return adapts(name); },
          .apply = [this](const CatalogTensor& tensor, FlatRange range,
                          std::span<float> values) { add_to(tensor, range, values); }};
}

at::Tensor MergedAdapters::numbers_of(const CatalogTensor& tensor) const {
  const at::Tensor numbers = at::empty(tensor.tensor.shape, at::kFloat);
  ConvertedReads(adapters_.files(), DType::kFloat32)
      .read(tensor, {0, numbers.numel()}, static_cast<std::byte*>(numbers.mutable_data_ptr()));
  return numbers;
}

// Whole rows, of which a range may have parts.
void MergedAdapters::add_to(const CatalogTensor& weight, FlatRange range,
                            std::span<float> values) const {
  const std::string& name = weight.tensor.name;
  const int64_t columns = weight.tensor.shape[1];
  const int64_t first = range.begin / columns;
  const int64_t last = (range.end + columns - 1) / columns;
  const at::Tensor rows = numbers_of(*find(name, kB)).slice(0, first, last);
  const at::Tensor added = rows.mm(numbers_of(*find(name, kA))).mul_(scale_);
  at::from_blob(values.data(), {range.numel()}, at::kFloat)
      .add_(added.view({-1}).narrow(0, range.begin - first * columns, range.numel()));
}

}  // namespace fsdp::train
