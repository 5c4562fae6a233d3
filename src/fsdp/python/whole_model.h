// A sharded model's parameters, by part and whole, and results over all ranks, whichever grid has
// them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/python/resources.h"
#include "fsdp/shard/group/param_group.h"

namespace fsdp {

// This rank's part of one parameter, in the optimizer's placement, looked at when it is asked for:
// main weights that are split or offloaded are copied by that, so names and gradients alone must
// not.
class ParameterPart {
 public:
  ParameterPart(std::shared_ptr<ShardedModel> model, const ParamGroup& group, int64_t member)
      : model_(std::move(model)), group_(&group), member_(member) {}

  const std::string& name() const { return group_->name_of(member_); }
  // Further names of a shared parameter.
  std::vector<std::string> aliases() const {
    const std::vector<std::string>& names = group_->members()[static_cast<size_t>(member_)].names;
    return {names.begin() + 1, names.end()};
  }
  const std::string& unit() const { return group_->unit(); }
  const std::vector<int64_t>& shape() const { return group_->shape_of(member_); }
  bool is_trainable() const { return group_->is_trainable(); }
  // Elements [begin, begin + numel) of it, flattened.
  int64_t begin() const { return group_->held_of(member_).begin; }
  int64_t numel() const { return group_->held_of(member_).numel(); }
  at::Tensor main_weight() const;
  std::optional<at::Tensor> gradient() const;  // none if frozen, or while it has no memory

 private:
  std::shared_ptr<ShardedModel> model_;
  const ParamGroup* group_;
  int64_t member_;
};

std::vector<ParameterPart> parts_of(const std::shared_ptr<ShardedModel>& model);

// Sets this rank's parts of main weights, by name, however they are stored, and brings them to the
// computing weights. All ranks call it.
void set_main_weights(ShardedModel& model, const std::map<std::string, at::Tensor>& values);

// All of a parameter, given what this rank has of it while its unit is whole: `own` itself, or the
// slices of all ranks of its ep or tp group, joined. All ranks call it.
at::Tensor join_slices(ShardedModel& model, const std::string& parameter, const at::Tensor& own);

// --- gradients; all ranks call these ---

// UsageError unless those of this cycle are there and complete.
void check_complete(ShardedModel& model, const char* reader);
// For an optimizer of others: ends the cycle; one for each of parts_of(), in the type of its main
// weight, as a view if that is the gradient's own. None for what is to be left alone: frozen, or
// without a gradient on any rank.
std::vector<std::optional<at::Tensor>> gradients_for_update(ShardedModel& model);
// Ends the cycle, clips the gradients of all ranks together, and returns the norm before, in fp32.
at::Tensor clip_gradients(ShardedModel& model, double max_norm);
// Ends the cycle and multiplies.
void scale_gradients(ShardedModel& model, const at::Tensor& factor);

}  // namespace fsdp
