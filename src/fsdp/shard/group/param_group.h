// The parameters of one unit with equal dtype, recipe, trainability and kind: their buffers and
// where they lie.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/layout/box.h"
#include "fsdp/layout/flat_layout.h"
#include "fsdp/layout/group_types.h"
#include "fsdp/memory/bucket.h"
#include "fsdp/memory/slab_lease.h"
#include "fsdp/shard/group/flat_buffer.h"
#include "fsdp/shard/group/group_gradient.h"
#include "fsdp/shard/group/group_setting.h"
#include "fsdp/shard/group/main_weights.h"
#include "fsdp/shard/group/quantized_weights.h"
#include "fsdp/shard/group/redistribution.h"

namespace fsdp {

// One parameter, with every name it has in the module tree; the first one is its owner's.
struct GroupMember {
  std::vector<std::string> names;
  at::Tensor parameter;
  at::ScalarType built_as;                     // its dtype in the model that was handed over
  at::ScalarType computes_in;                  // its dtype here; equal for all members of a group
  OwnedSlice owned = {};                       // of the whole parameter; the group's grid shards it
  WeightRecipe recipe = WeightRecipe::kPlain;  // equal for all members of a group
  std::vector<int64_t> matrix_rows = {};       // of all members of a group, or of none
};

// Temporary memory for whole weights and for unreduced gradients, as buckets() asks for it.
struct GroupSlabs {
  std::optional<SlabLease> weight;    // none: the weights are whole in their own buffer
  std::optional<SlabLease> gradient;  // none: gradients go straight to the main gradients
};

// For the layout of a group of these. What ranks hold of other groups (held_load), and owners of
// matrices, are for the caller to add.
FlatLayoutRequest layout_request(const std::vector<GroupMember>& members, Trainable trainable,
                                 const GroupSetting& setting);

class ParamGroup {
 public:
  // Allocates; set_value() then brings the members' values. `request` is that of layout_request().
  ParamGroup(std::string unit, std::vector<GroupMember> members, Trainable trainable,
             const GroupSetting& setting, FlatLayoutRequest request);
  ~ParamGroup();  // parameters of the user may live on
  ParamGroup(const ParamGroup&) = delete;
  ParamGroup& operator=(const ParamGroup&) = delete;

  // --- the members, and how they lie ---
  const std::string& unit() const { return unit_; }
  const std::vector<GroupMember>& members() const { return members_; }
  const std::string& name_of(int64_t index) const {
    return members_[static_cast<size_t>(index)].names.front();
  }
  const std::vector<int64_t>& shape_of(int64_t index) const {
    return layout_.request().shapes[static_cast<size_t>(index)];
  }
  // The shape of what this rank owns a slice with shape_of(), and which slice.
  std::vector<int64_t> whole_shape_of(int64_t index) const {
    return whole_shape(owned_of(index), shape_of(index));
  }
  const OwnedSlice& owned_of(int64_t index) const {
    return members_[static_cast<size_t>(index)].owned;
  }
  const FlatLayout& layout() const { return layout_; }
  const GroupSetting& setting() const { return setting_; }
  const GroupTypes& types() const { return types_; }
  bool is_trainable() const { return types_.trainable; }
  // Whether the members are matrices with one owner each (FlatLayout::matrices_of).
  bool has_matrices() const { return !layout_.request().matrix_rows.empty(); }
  GroupBuckets buckets() const;
  // The elements of the flattened member that this rank's optimizer has.
  FlatRange held_of(int64_t index) const;
  // Those elements in the group's whole buffer; none where the rank has none.
  FlatRange held_flat(int64_t index) const;

  // --- values ---
  GroupSlabs& slabs() { return slabs_; }
  const GroupSlabs& slabs() const { return slabs_; }

  // Copies this rank's part of a member's whole value, the slices of other ranks included.
  void set_value(int64_t index, const at::Tensor& value);
  // Makes the member's parameter a view of its storage here.
  void attach(int64_t index);
  // While the weights are whole: makes the parameters' current numbers the value, also of those
  // that were given other memory.
  void take_over_values();
  // UsageError that names a member which was changed in place, or given other memory, by somebody
  // whose changes would be lost.
  void check_members() const;
  // After unbind(): views that live on read NaN where they cannot throw, and a warning names one.
  void give_views_nan();

  // --- weights; the unit says when (sharded_unit.h) ---
  // Whether whole weights exist only in a slab, between gather and unbind().
  bool needs_slab() const { return unshard_.communicates(); }

  // Starts to collect whole weights after `after` has written this rank's part: first other ranks'
  // newer values, then the parts of other ranks, into the slab (nullptr: none is needed).
  void start_gather(void* slab, const Tag& tag, const Work& after);
  // Waits for the gather, and binds the parameters to the whole weights.
  void wait_gather();
  void unbind();

  // Other ranks have newer values of this rank's part: the next gather brings them. False if this
  // rank holds nothing of theirs.
  bool expect_newer();

  // After the main weights were changed: casts them into the weights.
  void refresh();
  // Makes codes of the main weights, by all ranks together; nullptr where weights are numbers,
  // which updates write themselves.
  QuantizedWeights* quantized() { return quantized_ ? &*quantized_ : nullptr; }

  // --- gradients; trainable groups only ---
  // Changes the type in which gradients travel; between cycles only. kKeep: buckets() stays as it
  // was, because its memory exists already.
  enum class BucketSize : uint8_t { kKeep, kFollow };
  void set_wire(DType wire, BucketSize bucket);
  GroupGradient& gradient() { return *gradient_; }
  const GroupGradient& gradient() const { return *gradient_; }

  // --- what an optimizer and a checkpoint see ---
  const MainWeights& main_weights() const { return *main_weights_; }
  // After setting values, call Engine::take_over_main_weights, so that they are gathered again.
  MainWeights& main_weights() { return *main_weights_; }
  // For a frozen group with codes, which nothing changes any more.
  void drop_frozen_numbers();
  // This rank's part of a member's gradient in the optimizer's placement, one-dimensional;
  // undefined while there is none.
  at::Tensor gradient_of(int64_t index) const;

 private:
  void set_owned_value(int64_t index, const at::Tensor& value);
  void bind(const FlatBuffer& whole);
  QuantizedWeight quantized_member(int64_t index);

  const std::string unit_;
  const GroupSetting& setting_;
  std::vector<GroupMember> members_;
  GroupTypes types_;
  const FlatLayout layout_;
  const GroupPaths paths_;
  FlatBuffer weight_;                        // compute dtype or codes, parameter placement
  FlatBuffer whole_;                         // the same, whole, in a slab
  std::optional<MainWeights> main_weights_;  // optimizer's dtype and placement
  std::optional<GroupGradient> gradient_;
  std::deque<ParameterStorage> storages_;  // one per member
  Redistribution refresh_;                 // see GroupPaths
  Redistribution unshard_;
  std::optional<QuantizedWeights> quantized_;
  GroupSlabs slabs_;

  Work gather_;
  bool is_bound_ = false;
  bool is_stale_ = false;  // other ranks have newer values of this rank's part
};

}  // namespace fsdp
