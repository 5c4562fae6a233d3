// Adapters of low rank: which layers have one, and what it does there (LoRA).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp {

// The names of adapters' tensors, as globs: "model.layers.0.mlp.up_proj.lora_A.weight".
inline constexpr std::string_view kAdapterTensors = "*.lora_?.weight";

// A linear layer W of a block with an adapter computes W x + scale * B (A x), with A of [rank, in]
// and B of [out, rank], and trains these two alone. The rest of the model is frozen.
struct LoraOptions {
  int64_t rank = 0;                            // 0: no adapters
  std::optional<double> alpha = std::nullopt;  // nullopt: 2 * rank
  // Globs on the names of layers ("model.layers.0.mlp.up_proj") or on their last words ("up_proj");
  // none: every linear layer of every block. Embedding, head, routers and the stacked matrices of
  // experts are no such layers.
  std::vector<std::string> on = {};

  bool is_on() const { return rank > 0; }
  double resolved_alpha() const { return alpha.value_or(2.0 * static_cast<double>(rank)); }
  double scale() const { return resolved_alpha() / static_cast<double>(rank); }

  // Whether the linear layer of this name has an adapter.
  bool adapts(std::string_view layer) const;

  // UsageError for globs that name none of these linear layers, with those that there are.
  void check_used(const std::vector<std::string>& layers) const;
};

}  // namespace fsdp
