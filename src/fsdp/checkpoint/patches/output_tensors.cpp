#include "fsdp/checkpoint/patches/output_tensors.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <utility>

#include "fsdp/base/text.h"
#include "fsdp/checkpoint/format/tensor_stream.h"

namespace fsdp {

namespace {

// One part of a fused tensor, by the name of the module that has it.
struct FusedPart {
  std::string_view module;  // "q_proj"
  std::string_view fused;   // "qkv_proj"
  int64_t index = 0;        // of `count` parts
  int64_t count = 1;
};

constexpr std::array<FusedPart, 5> kLayerParts = {{{"q_proj", "qkv_proj", 0, 3},
                                                   {"k_proj", "qkv_proj", 1, 3},
                                                   {"v_proj", "qkv_proj", 2, 3},
                                                   {"gate_proj", "gate_up_proj", 0, 2},
                                                   {"up_proj", "gate_up_proj", 1, 2}}};
constexpr std::array<FusedPart, 6> kExpertParts = {{{"gate_proj", "w13_weight", 0, 2},
                                                    {"w1", "w13_weight", 0, 2},
                                                    {"up_proj", "w13_weight", 1, 2},
                                                    {"w3", "w13_weight", 1, 2},
                                                    {"down_proj", "w2_weight", 0, 1},
                                                    {"w2", "w2_weight", 0, 1}}};
constexpr std::string_view kExperts = "experts";

// The text before the last dot, and the text behind it.
std::pair<std::string_view, std::string_view> cut_at_last_dot(std::string_view name) {
  const size_t dot = name.rfind('.');
  if (dot == std::string_view::npos) return {"", name};
  return {name.substr(0, dot), name.substr(dot + 1)};
}

std::optional<int64_t> number_in(std::string_view text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

// The tensor that a published one is a part of.
struct PartOf {
  std::string fused;
  int64_t order = 0;       // of all parts
  int64_t per_expert = 0;  // parts of each; 0: the tensor has no experts
  int64_t count = 0;       // of all parts; 0: as many as there are experts
};

std::optional<PartOf> part_of(std::string_view name) {
  const auto [path, kind] = cut_at_last_dot(name);  // "...q_proj", "weight"
  const auto [owner, module] = cut_at_last_dot(path);
  const auto [list, expert_text] = cut_at_last_dot(owner);
  const std::optional<int64_t> expert = number_in(expert_text);
  if (expert && cut_at_last_dot(list).second == kExperts) {
    for (const FusedPart& part : kExpertParts)
      if (part.module == module && kind == "weight")
        return PartOf{concat(list, ".", part.fused), *expert * part.count + part.index, part.count,
                      0};
    return std::nullopt;
  }
  for (const FusedPart& part : kLayerParts)
    if (part.module == module)
      return PartOf{concat(owner, ".", part.fused, ".", kind), part.index, 0, part.count};
  return std::nullopt;
}

struct Fusion {
  int64_t per_expert = 0;
  int64_t count = 0;
  std::map<int64_t, const StoredTensor*> parts;  // by order
};

bool is_complete(const Fusion& fusion) {
  const auto size = static_cast<int64_t>(fusion.parts.size());
  if (fusion.parts.begin()->first != 0 || fusion.parts.rbegin()->first != size - 1) return false;
  if (fusion.count > 0 && size != fusion.count) return false;
  if (fusion.per_expert > 0 && size % fusion.per_expert != 0) return false;
  const StoredTensor& first = *fusion.parts.begin()->second;
  return std::all_of(fusion.parts.begin(), fusion.parts.end(), [&](const auto& part) {
    const std::vector<int64_t>& shape = part.second->shape;
    return part.second->dtype == first.dtype && !shape.empty() &&
           shape.size() == first.shape.size() &&
           std::equal(shape.begin() + 1, shape.end(), first.shape.begin() + 1) &&
           (fusion.per_expert == 0 || shape == first.shape);
  });
}

std::vector<int64_t> fused_shape(const Fusion& fusion) {
  std::vector<int64_t> shape = fusion.parts.begin()->second->shape;
  const auto size = static_cast<int64_t>(fusion.parts.size());
  if (fusion.per_expert > 0) {
    shape[0] *= fusion.per_expert;
    shape.insert(shape.begin(), size / fusion.per_expert);
  } else {
    shape[0] = 0;
    for (const auto& [order, part] : fusion.parts) shape[0] += part->shape[0];
  }
  return shape;
}

}  // namespace

OutputTensors as_published(const std::vector<StoredTensor>& published) {
  OutputTensors output{.tensors = published, .places = {}};
  for (size_t i = 0; i < published.size(); ++i) output.places[published[i].name] = {i, 0};
  return output;
}

OutputTensors as_vllm_has_them(const std::vector<StoredTensor>& published) {
  std::map<std::string, Fusion> fusions;
  for (const StoredTensor& tensor : published)
    if (const std::optional<PartOf> part = part_of(tensor.name)) {
      Fusion& fusion = fusions[part->fused];
      fusion.per_expert = part->per_expert;
      fusion.count = part->count;
      fusion.parts[part->order] = &tensor;
    }
  OutputTensors output;
  for (const StoredTensor& tensor : published) {
    if (output.places.contains(tensor.name)) continue;  // came with its fusion's first part
    const std::optional<PartOf> part = part_of(tensor.name);
    const size_t index = output.tensors.size();
    if (!part || !is_complete(fusions[part->fused])) {
      output.tensors.push_back(tensor);
      output.places[tensor.name] = {index, 0};
      continue;
    }
    const Fusion& fusion = fusions[part->fused];
    output.tensors.push_back({part->fused, tensor.dtype, fused_shape(fusion)});
    int64_t offset = 0;
    for (const auto& [order, each] : fusion.parts) {
      output.places[each->name] = {index, offset};
      offset += numel_of(*each);
    }
  }
  return output;
}

}  // namespace fsdp
