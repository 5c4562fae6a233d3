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
#include "fsdp/shard/unsharded_storage.h"
#include "fsdp/shard/weight_gather.h"

namespace fsdp {

// One parameter, with every name it has in the module tree; the first one is its owner's.
struct GroupMember {
  std::vector<std::string> names;
  at::Tensor parameter;
};

// A contiguous run of the optimizer's part: the same elements of main weight and gradient.
struct OptimizerPiece {
  FlatRange flat;       // in the group's whole buffer
  at::Tensor weight;    // main weights (the weights themselves when there are none apart)
  at::Tensor gradient;  // undefined while the gradients own no memory, and for frozen groups
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
  const FlatLayout& layout() const { return layout_; }
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

  // Starts to collect whole weights, in the slab or in place; finish_gather() makes them usable.
  void start_gather(void* slab, const Tag& tag);
  void finish_gather();
  void reshard();

  // The main weights were changed: casts them into the weights, and has the next gather bring the
  // other ranks' part.
  void refresh();

  // --- gradients; trainable groups only ---
  // Gradients travel in another type from now on; between cycles only. kKeep: buckets() stays as it
  // was, because the memory is there already.
  enum class BucketSize : uint8_t { kKeep, kFollow };
  void set_wire(DType wire, BucketSize bucket);
  GroupGradient& gradient() { return *gradient_; }
  const GroupGradient& gradient() const { return *gradient_; }

  // --- what an optimizer and a checkpoint see ---
  std::vector<OptimizerPiece> optimizer_pieces() const;
  // This rank's part of a member in the optimizer's placement, one-dimensional.
  at::Tensor main_weight_of(int64_t index) const;
  at::Tensor gradient_of(int64_t index) const;
  // Which elements of the flattened member main_weight_of() holds.
  FlatRange held_of(int64_t index) const;

  const FlatBuffer& weight() const { return weight_; }
  const FlatBuffer& main_weight() const { return main_weight_ ? *main_weight_ : weight_; }

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
  FlatBuffer weight_;                      // compute dtype, parameter placement
  std::optional<FlatBuffer> main_weight_;  // optimizer's dtype and placement, where that differs
  std::deque<UnshardedStorage> storages_;  // one per member
  WeightGather gather_;
  // What refresh() casts: the optimizer's part of the weights, and where its new values are.
  struct Refreshed {
    at::Tensor weight;
    at::Tensor main_weight;
  };
  std::vector<Refreshed> refreshed_;
  std::optional<GroupGradient> gradient_;

  void* slab_ = nullptr;
  Work gather_work_;
  bool is_gathering_ = false;
  bool is_whole_ = false;
  bool is_stale_ = false;  // other ranks have newer values of what this one has
};

}  // namespace fsdp
