// Collects the shapes of a model, unit after unit.
#pragma once

#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/nn/config/model_config.h"
#include "fsdp/plan/model_shape.h"

namespace fsdp {

enum class Bias { kWithout, kWith };

// The dim of a matrix that the ranks of a tp group share, and in how many parts: the layers' own
// cuts (nn/layers/matrix_layers.h).
struct LinearCut {
  enum class Of : uint8_t { kNothing, kOutputs, kInputs } of = Of::kNothing;
  int64_t num_parts = 0;

  std::optional<TpCut> of_weight() const {
    if (of == Of::kNothing) return std::nullopt;
    return TpCut{.dim = of == Of::kOutputs ? 0 : 1, .num_parts = num_parts};
  }
  std::optional<TpCut> of_bias() const {
    if (of != Of::kOutputs) return std::nullopt;
    return TpCut{.dim = 0, .num_parts = num_parts};
  }
};

inline LinearCut by_outputs(int64_t num_parts) { return {LinearCut::Of::kOutputs, num_parts}; }
inline LinearCut by_inputs(int64_t num_parts) { return {LinearCut::Of::kInputs, num_parts}; }

inline Bias bias_if(bool with) { return with ? Bias::kWith : Bias::kWithout; }

// Collects the tensors of one unit under a common prefix.
class UnitBuilder {
 public:
  UnitBuilder(std::string unit_name, std::string prefix)
      : unit_{std::move(unit_name), {}}, prefix_(std::move(prefix)) {}

  void tensor(const std::string& name, std::vector<int64_t> shape,
              std::optional<DType> dtype = std::nullopt) {
    unit_.tensors.push_back({.name = prefix_ + name, .shape = std::move(shape), .dtype = dtype});
  }

  // The ranks of a tp group share its rows, in parts that are not cut. Of a tensor with sections a
  // part is some rows of each.
  void shared_rows(const std::string& name, std::vector<int64_t> shape, int64_t num_parts) {
    tensor(name, std::move(shape));
    unit_.tensors.back().cut = TpCut{.dim = 0, .num_parts = num_parts};
  }

  void experts(StackedExperts stack) {
    for (std::string& part : stack.parts) part = prefix_ + part;
    unit_.tensors.push_back(
        {.name = prefix_ + stack.name,
         .shape = stack.shape,
         .num_experts = stack.num_experts,
         .is_quantizable = is_quantizable(stack.shape[0], stack.shape[1]),
         .matrix_rows = {stack.shape[0] / static_cast<int64_t>(stack.parts.size())},
         .parts = std::move(stack.parts)});
  }

  // Of experts: weight [num_experts, in].
  void router(const std::string& name, int64_t num_experts, int64_t in) {
    tensor(name + ".weight", {num_experts, in});
  }

  // With a bias for each expert, which evens out the load.
  void biased_router(const std::string& name, int64_t num_experts, int64_t in) {
    router(name, num_experts, in);
    unit_.buffers.push_back({.name = concat(prefix_, name, ".e_score_correction_bias"),
                             .shape = {num_experts},
                             .dtype = DType::kFloat32});
  }

  // y = W x (+ b): weight [out, in].
  void linear(const std::string& name, int64_t out, int64_t in, Bias bias = Bias::kWithout,
              const LinearCut& cut = {}) {
    tensor(name + ".weight", {out, in});
    unit_.tensors.back().cut = cut.of_weight();
    unit_.tensors.back().is_quantizable = is_quantizable(out, in);
    if (out > 1) unit_.tensors.back().matrix_rows = {out};
    if (bias == Bias::kWithout) return;
    tensor(name + ".bias", {out});
    unit_.tensors.back().cut = cut.of_bias();
  }

  // A linear layer that several projections with these outputs are fused to.
  void fused_linear(const std::string& name, std::vector<int64_t> outs, int64_t in, Bias bias,
                    const LinearCut& cut) {
    const auto first = unit_.tensors.size();
    linear(name, std::accumulate(outs.begin(), outs.end(), int64_t{0}), in, bias, cut);
    unit_.tensors[first].matrix_rows = std::move(outs);
  }

  // Rows of the vocabulary, which ranks share if they can.
  void vocabulary(const std::string& name, int64_t vocab_size, int64_t hidden_size) {
    tensor(name, {vocab_size, hidden_size});
    unit_.tensors.back().cut = TpCut{.dim = 0, .num_parts = vocab_size, .whole_if_uneven = true};
  }

  void norm(const std::string& name, int64_t dim) { tensor(name + ".weight", {dim}); }

  UnitShape build() && { return std::move(unit_); }

 private:
  UnitShape unit_;
  std::string prefix_;
};

// Appends units in forward order, each used where it is added.
class ModelBuilder {
 public:
  explicit ModelBuilder(std::string name) { model_.name = std::move(name); }

  int64_t add(UnitBuilder&& unit) {
    const auto index = static_cast<int64_t>(model_.units.size());
    model_.units.push_back(std::move(unit).build());
    use_again(index);
    return index;
  }

  void use_again(int64_t index) {
    model_.uses.push_back(index);
    model_.ends.push_back(static_cast<int64_t>(model_.uses.size()) - 1);
  }

  // As part of the use that was added last.
  void use_within(int64_t index) {
    use_again(index);
    model_.ends[model_.ends.size() - 2] = model_.ends.back();
  }

  // Every tensor that tp ranks share says so.
  void takes_tp() { model_.takes_tp = true; }

  ModelShape build() && {
    model_.validate();
    return std::move(model_);
  }

 private:
  ModelShape model_;
};

}  // namespace fsdp
