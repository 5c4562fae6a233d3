// The parameters of one unit with equal dtype and trainability: their buffers and where they lie.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/layout/flat_layout.h"
#include "fsdp/layout/group_types.h"
#include "fsdp/memory/group_buckets.h"
#include "fsdp/shard/flat_buffer.h"
#include "fsdp/shard/group_gradient.h"
#include "fsdp/shard/group_setting.h"
#include "fsdp/shard/main_weights.h"
#include "fsdp/shard/unsharded_storage.h"
#include "fsdp/shard/weight_gather.h"

namespace fsdp {

// One parameter, with every name it has in the module tree; the first one is its owner's.
struct GroupMember {
  std::vector<std::string> names;
  at::Tensor parameter;
};

class ParamGroup {
 public:
  // Lays the members out and allocates; set_value() then brings their values. `held_numel` is what
  // every rank holds of earlier groups (FlatLayoutRequest).
  ParamGroup(std::string unit, std::vector<GroupMember> members, Trainable trainable,
             const GroupSetting& setting, std::vector<int64_t> held_numel);

  const std::string& unit() const { return unit_; }
  const std::vector<GroupMember>& members() const { return members_; }
  const std::string& name_of(int64_t index) const {
    return members_[static_cast<size_t>(index)].names.front();
  }
  const std::vector<int64_t>& shape_of(int64_t index) const {
    return layout_.request().shapes[static_cast<size_t>(index)];
  }
  const FlatLayout& layout() const { return layout_; }
  const GroupSetting& setting() const { return setting_; }
  const GroupTypes& types() const { return types_; }
  bool is_trainable() const { return types_.trainable; }
  GroupBuckets buckets() const;

  // Takes over this rank's part of a member's value.
  void set_value(int64_t index, const at::Tensor& value);
  // Makes the member's parameter a view of its storage here.
  void attach(int64_t index);
  // While the weights are whole: what they are now becomes the value.
  void take_over_values();

  // --- weights ---
  // Whole weights exist only in a slab, between gather and reshard.
  bool needs_slab() const { return gather_.unshard_communicates(); }
  bool is_whole() const { return is_whole_; }
  // A gather is needed before the next use.
  bool needs_gather() const { return !is_whole() && !is_gathering_; }

  // The caller's stream waits for the update, and gathers come after what that has queued.
  void forget_update() { update_ = {}; }

  // Starts to collect whole weights, in the slab or in place; finish_gather() makes them usable.
  void start_gather(void* slab, const Tag& tag);
  void finish_gather();
  void reshard();

  // Somebody writes main weights and weights until `update` is done: the next gather waits for it,
  // and has the other ranks' part brought.
  void follow_update(Work update);

  // The main weights were changed: casts them into the weights, and has the next gather bring the
  // other ranks' part.
  void refresh();
  // The same where the weights have been changed with them.
  void have_gathered_again();

  // --- gradients; trainable groups only ---
  // Gradients travel in another type from now on; between cycles only. kKeep: buckets() stays as it
  // was, because the memory is there already.
  enum class BucketSize : uint8_t { kKeep, kFollow };
  void set_wire(DType wire, BucketSize bucket);
  GroupGradient& gradient() { return *gradient_; }
  const GroupGradient& gradient() const { return *gradient_; }

  // --- what an optimizer and a checkpoint see ---
  const MainWeights& main_weights() const { return *main_weights_; }
  // Whoever sets values has them gathered again (Engine::take_over_main_weights).
  MainWeights& main_weights() { return *main_weights_; }
  // This rank's part of a member in the optimizer's placement, one-dimensional; of main weights a
  // view or a copy (MainWeights::at).
  at::Tensor main_weight_of(int64_t index) const;
  at::Tensor gradient_of(int64_t index) const;
  // Which elements of the flattened member main_weight_of() holds.
  FlatRange held_of(int64_t index) const;

  const FlatBuffer& weight() const { return weight_; }

  // After an error: nothing is in flight, and the weights are as sharded as they rest.
  void abandon_gather() noexcept;

 private:
  FlatRange held_flat(int64_t index) const;
  void bind(void* whole);
  void unbind();

  const std::string unit_;
  const GroupSetting& setting_;
  std::vector<GroupMember> members_;
  GroupTypes types_;
  const FlatLayout layout_;
  const AxisCuts cuts_;
  FlatBuffer weight_;                        // compute dtype, parameter placement
  std::optional<MainWeights> main_weights_;  // optimizer's dtype and placement
  std::deque<UnshardedStorage> storages_;    // one per member
  WeightGather gather_;
  std::optional<GroupGradient> gradient_;

  void* slab_ = nullptr;
  Work gather_work_;
  Work update_;  // the next gather comes after it
  bool is_gathering_ = false;
  bool is_whole_ = false;
  bool is_stale_ = false;  // other ranks have newer values of what this one has
};

}  // namespace fsdp
