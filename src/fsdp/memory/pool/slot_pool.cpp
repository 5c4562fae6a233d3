#include "fsdp/memory/pool/slot_pool.h"

#include <algorithm>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/text.h"
#include "fsdp/memory/pool/slot_assignment.h"

namespace fsdp {

namespace {

constexpr std::array<BucketRole, kNumBucketRoles> kRoles = {BucketRole::kWeight,
                                                            BucketRole::kGradient};

size_t index_of(BucketRole role) { return static_cast<size_t>(role); }

std::string slot_bytes_words(int64_t bytes) { return bytes_text(static_cast<double>(bytes)); }

// One slab for everything that is fixed, so that it can be registered in one piece:
//   [weight slot 0][weight slot 1]..[gradient slot 0][gradient slot 1]..[persistent]
class SlotPool final : public BucketPool {
 public:
  SlotPool(BucketTable declared, SlotLayout layout, const SlotOptions& options, LiveTrace step,
           SlabAllocator& slab_allocator)
      : BucketPool(std::move(declared), std::move(step), slab_allocator),
        layout_(std::move(layout)),
        alignment_(options.alignment),
        on_demand_(static_cast<size_t>(table().num_buckets())),
        previous_(static_cast<size_t>(table().num_buckets())) {
    for (const BucketRole role : kRoles) {
      const int32_t num_slots = options.num_slots[index_of(role)];
      slots_.emplace_back(table(), role, num_slots, options.on_move);
      slots_offset_[index_of(role)] = fixed_bytes_;
      const int64_t role_bytes = checked_mul(num_slots, layout_.slot_bytes[index_of(role)]);
      fixed_bytes_ = checked_add(fixed_bytes_, role_bytes);
      bytes_by_role_[index_of(role)] = role_bytes + layout_.persistent_bytes[index_of(role)];
      last_holder_.emplace_back(layout_.entries.size() * static_cast<size_t>(num_slots));
    }
    persistent_offset_ = fixed_bytes_;
    for (const int64_t bytes : layout_.persistent_bytes) {
      fixed_bytes_ = checked_add(fixed_bytes_, bytes);
    }
    on_demand_peak_ = on_demand_peak();
  }

  PoolKind kind() const override { return layout_.kind; }
  PoolBytes bytes() const override {
    return {.weight = bytes_by_role_[index_of(BucketRole::kWeight)],
            .gradient = bytes_by_role_[index_of(BucketRole::kGradient)],
            .on_demand_peak = on_demand_peak_};
  }
  bool address_is_fixed(BucketId id) const override {
    switch (home(table().index_of(id)).place) {
      case BucketHome::Place::kSlot:
        return !slots_[index_of(table().bucket(id).role)].has_moved(id.unit);
      case BucketHome::Place::kPersistent:
        return true;
      case BucketHome::Place::kOnDemand:
        return false;
    }
    return false;
  }
  std::span<const BucketId> previous_holders(BucketId id) const override {
    const BucketId& previous = previous_[static_cast<size_t>(table().index_of(id))];
    if (!is_held(id) || previous.unit < 0) return {};
    return {&previous, 1};
  }
  std::string report() const override;

 private:
  const BucketHome& home(int32_t index) const { return layout_.homes[static_cast<size_t>(index)]; }
  int64_t on_demand_peak() const {
    LiveTrace on_demand;
    on_demand.num_times = trace().num_times;
    for (const LiveInterval& interval : trace().intervals) {
      if (home(table().index_of(interval.bucket)).place == BucketHome::Place::kOnDemand) {
        on_demand.intervals.push_back(interval);
      }
    }
    return lower_bound_bytes(on_demand);
  }

  void reserve_memory() override { slab_ = Slab(allocator(), fixed_bytes_, alignment_); }

  void* take(BucketId id, int32_t index) override {
    const BucketHome& its_home = home(index);
    switch (its_home.place) {
      case BucketHome::Place::kSlot:
        return take_from_slot(id, index, its_home.entry);
      case BucketHome::Place::kPersistent:
        return slab_.at(persistent_offset_ + its_home.offset);
      case BucketHome::Place::kOnDemand: {
        Slab& slab = on_demand_[static_cast<size_t>(index)];
        slab = Slab(allocator(), table().bucket(id).bytes, alignment_);
        return slab.at(0);
      }
    }
    return nullptr;
  }

  bool can_take(BucketId id, int32_t index) const override {
    if (home(index).place != BucketHome::Place::kSlot) return true;
    return slots_[index_of(table().bucket(id).role)].can_enter(id.unit);
  }

  void* take_from_slot(BucketId id, int32_t index, int32_t entry_index) {
    const SlotEntry& entry = layout_.entries[static_cast<size_t>(entry_index)];
    const size_t role = index_of(entry.role);
    const int32_t slot = slots_[role].enter(id);
    BucketId& last = last_holder_[role][static_cast<size_t>(slot) * layout_.entries.size() +
                                        static_cast<size_t>(entry_index)];
    previous_[static_cast<size_t>(index)] = last == id ? BucketId{} : last;
    last = id;
    return slab_.at(slots_offset_[role] + slot * layout_.slot_bytes[role] + entry.offset);
  }

  void release_memory(BucketId id, int32_t index) override {
    switch (home(index).place) {
      case BucketHome::Place::kSlot:
        slots_[index_of(table().bucket(id).role)].leave(id.unit);
        return;
      case BucketHome::Place::kPersistent:
        return;
      case BucketHome::Place::kOnDemand:
        on_demand_[static_cast<size_t>(index)] = Slab();
        return;
    }
  }

  void reset_step() override {
    for (SlotAssignment& slots : slots_) slots.begin_step();
  }

  std::string state_text() const override {
    return concat(slots_[0].text(), "; ", slots_[1].text());
  }

  SlotLayout layout_;
  int64_t alignment_;
  std::vector<SlotAssignment> slots_;                    // by role
  std::array<int64_t, kNumBucketRoles> slots_offset_{};  // in the slab, by role
  std::array<int64_t, kNumBucketRoles> bytes_by_role_{};
  int64_t persistent_offset_ = 0;
  int64_t fixed_bytes_ = 0;
  int64_t on_demand_peak_ = 0;
  Slab slab_;
  std::vector<Slab> on_demand_;                     // by flat index; empty when not held
  std::vector<std::vector<BucketId>> last_holder_;  // by role, then slot x entry
  std::vector<BucketId> previous_;                  // by flat index, of held buckets
};

std::string SlotPool::report() const {
  const PoolBytes total = bytes();
  std::vector<std::string> lines = {concat(
      name_of(kind()), ": ", slot_bytes_words(total.fixed()), " fixed",
      total.on_demand_peak > 0
          ? concat(" and up to ", slot_bytes_words(total.on_demand_peak), " on demand")
          : std::string(),
      "; ", layout_.num_units_in_slots, " of ", table().num_units(), " units use the slots",
      addresses_are_fixed() ? "; all addresses are fixed" : "; not all addresses are fixed")};
  for (const BucketRole role : kRoles) {
    const SlotAssignment& slots = slots_[index_of(role)];
    lines.push_back(concat("  ", name_of(role), ": ", slots.num_slots(), " slots of ",
                           slot_bytes_words(layout_.slot_bytes[index_of(role)])));
    for (const SlotEntry& entry : layout_.entries) {
      if (entry.role != role) continue;
      lines.push_back(concat("    ", name_of(entry.dtype), " ", slot_bytes_words(entry.bytes),
                             ", set by ", table().text(entry.set_by)));
    }
  }
  return join(lines, "\n");
}

}  // namespace

std::array<int32_t, kNumBucketRoles> num_slots_for(const BucketTable& table, const LiveTrace& trace,
                                                   int32_t prefetch, int32_t gradient_slots) {
  const int32_t live_weights = most_live_units(trace, table, BucketRole::kWeight);
  const int32_t live_gradients = most_live_units(trace, table, BucketRole::kGradient);
  // Without nesting one unit computes and one is being reduced, unless one slot makes them wait.
  constexpr int32_t kUnnestedGradients = 2;
  return {std::max(prefetch + 1, live_weights), live_gradients > kUnnestedGradients
                                                    ? std::max(gradient_slots, live_gradients)
                                                    : gradient_slots};
}

int32_t add_entry(SlotLayout& layout, SlotEntry entry, int64_t alignment) {
  int64_t& slot_bytes = layout.slot_bytes[index_of(entry.role)];
  entry.bytes = round_up(entry.bytes, alignment);
  entry.offset = slot_bytes;
  slot_bytes = checked_add(slot_bytes, entry.bytes);
  layout.entries.push_back(entry);
  return static_cast<int32_t>(layout.entries.size()) - 1;
}

std::unique_ptr<BucketPool> make_slot_pool(BucketTable table, SlotLayout layout,
                                           const SlotOptions& options, LiveTrace trace,
                                           SlabAllocator& allocator) {
  return std::make_unique<SlotPool>(std::move(table), std::move(layout), options, std::move(trace),
                                    allocator);
}

}  // namespace fsdp
