#include "fsdp/memory/pool/slot_pool.h"

#include <algorithm>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/log.h"
#include "fsdp/base/text.h"

namespace fsdp {

namespace {

// --- which unit lies in which slot --------------------------------------------------------------

// The slots of one role. A unit occupies one slot from its first acquired bucket to its last
// released one.
//
// Note [Strict assignment]
// A visit is one such occupation; visits are counted per unit from begin_step(). In the first step
// a visit takes the slot of the unit's previous visit when that is idle, else the lowest idle one,
// and the choice is recorded. Later steps read the record. An unchanged order repeats the same
// sequence of occupations, so the recorded slot is always idle. Recording per visit and not per
// unit matters when a unit is used twice (an embedding that a prediction head uses again): its
// neighbours differ, so one slot may not do for both visits.
class SlotAssignment {
 public:
  SlotAssignment(const BucketTable& table, BucketRole role, int32_t num_slots, OnMove on_move);

  // One more bucket of the unit is held; returns the unit's slot. Throws when no slot is idle.
  int32_t enter(BucketId id);
  // Whether enter() would succeed for a bucket of the unit.
  bool can_enter(int32_t unit) const;
  // One bucket less.
  void leave(int32_t unit);
  void begin_step();

  bool has_moved(int32_t unit) const { return tenants_[static_cast<size_t>(unit)].has_moved; }
  int32_t num_slots() const { return static_cast<int32_t>(holders_.size()); }

  // "weight slots: 0 holds unit 'layers.0', 1 is idle"
  std::string text() const;

 private:
  struct Tenant {
    int32_t slot = -1;       // while num_held > 0
    int32_t num_held = 0;    // buckets
    int32_t num_visits = 0;  // in this step
    bool has_moved = false;
    std::vector<int32_t> recorded;  // slot by visit
  };
  int32_t slot_for_visit(BucketId id, Tenant& tenant);
  // The lowest; -1 when there is none.
  int32_t lowest_idle() const;
  // The same, and an error when there is none.
  int32_t idle_slot(BucketId id) const;
  bool is_idle(int32_t slot) const { return holders_[static_cast<size_t>(slot)] < 0; }

  const BucketTable& table_;
  BucketRole role_;
  OnMove on_move_;
  std::vector<int32_t> holders_;  // unit by slot; -1: idle
  std::vector<Tenant> tenants_;   // by unit
  bool warned_ = false;
};

SlotAssignment::SlotAssignment(const BucketTable& table, BucketRole role, int32_t num_slots,
                               OnMove on_move)
    : table_(table),
      role_(role),
      on_move_(on_move),
      holders_(static_cast<size_t>(num_slots), -1),
      tenants_(static_cast<size_t>(table.num_units())) {}

int32_t SlotAssignment::enter(BucketId id) {
  Tenant& tenant = tenants_[static_cast<size_t>(id.unit)];
  if (tenant.num_held == 0) {
    tenant.slot = slot_for_visit(id, tenant);
    holders_[static_cast<size_t>(tenant.slot)] = id.unit;
    ++tenant.num_visits;
  }
  ++tenant.num_held;
  return tenant.slot;
}

bool SlotAssignment::can_enter(int32_t unit) const {
  const Tenant& tenant = tenants_[static_cast<size_t>(unit)];
  if (tenant.num_held > 0) return true;
  const auto visit = static_cast<size_t>(tenant.num_visits);
  const bool recorded = visit < tenant.recorded.size();
  if (recorded && is_idle(tenant.recorded[visit])) return true;
  return (!recorded || on_move_ == OnMove::kFollow) && lowest_idle() >= 0;
}

void SlotAssignment::leave(int32_t unit) {
  Tenant& tenant = tenants_[static_cast<size_t>(unit)];
  if (--tenant.num_held == 0) holders_[static_cast<size_t>(tenant.slot)] = -1;
}

void SlotAssignment::begin_step() {
  for (Tenant& tenant : tenants_) tenant.num_visits = 0;
}

int32_t SlotAssignment::slot_for_visit(BucketId id, Tenant& tenant) {
  const auto visit = static_cast<size_t>(tenant.num_visits);
  if (visit >= tenant.recorded.size()) {
    const bool stays = !tenant.recorded.empty() && is_idle(tenant.recorded.back());
    tenant.recorded.push_back(stays ? tenant.recorded.back() : idle_slot(id));
    return tenant.recorded.back();
  }
  if (is_idle(tenant.recorded[visit])) return tenant.recorded[visit];

  const int32_t slot = idle_slot(id);
  FSDP_CHECK(
      on_move_ == OnMove::kFollow, table_.text(id), " belongs to ", name_of(role_), " slot ",
      tenant.recorded[visit],
      ", which is taken, and its address must not change; keep the order of the first step (",
      text(), ")");
  if (!warned_) {
    log(LogLevel::kWarning, table_.text(id), " moves from ", name_of(role_), " slot ",
        tenant.recorded[visit], " to ", slot,
        ": units come in another order than before; captured graphs and registered buffers are no "
        "longer valid");
    warned_ = true;
  }
  tenant.has_moved = true;
  tenant.recorded[visit] = slot;
  return slot;
}

int32_t SlotAssignment::lowest_idle() const {
  for (int32_t slot = 0; slot < num_slots(); ++slot) {
    if (is_idle(slot)) return slot;
  }
  return -1;
}

int32_t SlotAssignment::idle_slot(BucketId id) const {
  if (const int32_t slot = lowest_idle(); slot >= 0) return slot;
  throw Error(concat(table_.text(id), " finds no idle ", name_of(role_), " slot: ", num_slots(),
                     " units are live already; release one first, or use more slots (", text(),
                     ")"));
}

std::string SlotAssignment::text() const {
  std::vector<std::string> slots;
  for (int32_t slot = 0; slot < num_slots(); ++slot) {
    const int32_t unit = holders_[static_cast<size_t>(slot)];
    slots.push_back(unit < 0 ? concat(slot, " is idle")
                             : concat(slot, " holds unit '", table_.unit_name(unit), "'"));
  }
  return concat(name_of(role_), " slots: ", join(slots, ", "));
}

// --- the pool -----------------------------------------------------------------------------------

constexpr std::array<BucketRole, kNumBucketRoles> kRoles = {BucketRole::kWeight,
                                                            BucketRole::kGradient};

size_t index_of(BucketRole role) { return static_cast<size_t>(role); }

// One slab for everything that is fixed, so that it can be registered in one piece:
//   [weight slot 0][weight slot 1]..[gradient slot 0][gradient slot 1]..[persistent]
class SlotPool final : public BucketPool {
 public:
  SlotPool(BucketTable declared, SlotLayout layout, const SlotOptions& options, LiveTrace step,
           SlabAllocator& slab_allocator)
      : BucketPool(std::move(declared), std::move(step), slab_allocator),
        layout_(std::move(layout)),
        alignment_(options.alignment),
        on_demand_(static_cast<size_t>(table().num_buckets())) {
    for (const BucketRole role : kRoles) {
      const int32_t num_slots = options.num_slots[index_of(role)];
      slots_.emplace_back(table(), role, num_slots, options.on_move);
      slots_offset_[index_of(role)] = fixed_bytes_;
      const int64_t role_bytes = checked_mul(num_slots, layout_.slot_bytes[index_of(role)]);
      fixed_bytes_ = checked_add(fixed_bytes_, role_bytes);
      bytes_by_role_[index_of(role)] = role_bytes + layout_.persistent_bytes[index_of(role)];
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
        return take_from_slot(id, its_home.entry);
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

  void* take_from_slot(BucketId id, int32_t entry_index) {
    const SlotEntry& entry = layout_.entries[static_cast<size_t>(entry_index)];
    const size_t role = index_of(entry.role);
    const int32_t slot = slots_[role].enter(id);
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

  SlotLayout layout_;
  int64_t alignment_;
  std::vector<SlotAssignment> slots_;                    // by role
  std::array<int64_t, kNumBucketRoles> slots_offset_{};  // in the slab, by role
  std::array<int64_t, kNumBucketRoles> bytes_by_role_{};
  int64_t persistent_offset_ = 0;
  int64_t fixed_bytes_ = 0;
  int64_t on_demand_peak_ = 0;
  Slab slab_;
  std::vector<Slab> on_demand_;  // by flat index; empty when not held
};

std::string SlotPool::report() const {
  const PoolBytes total = bytes();
  std::vector<std::string> lines = {concat(
      name_of(kind()), ": ", bytes_text(total.fixed()), " fixed",
      total.on_demand_peak > 0
          ? concat(" and up to ", bytes_text(total.on_demand_peak), " on demand")
          : std::string(),
      "; ", layout_.num_units_in_slots, " of ", table().num_units(), " units use the slots",
      addresses_are_fixed() ? "; all addresses are fixed" : "; not all addresses are fixed")};
  if (layout_.num_units_in_slots == 0) return lines.front();
  for (const BucketRole role : kRoles) {
    const SlotAssignment& slots = slots_[index_of(role)];
    lines.push_back(concat("  ", name_of(role), ": ", slots.num_slots(), " slots of ",
                           bytes_text(layout_.slot_bytes[index_of(role)])));
    for (const SlotEntry& entry : layout_.entries) {
      if (entry.role != role) continue;
      lines.push_back(concat("    ", name_of(entry.dtype), " ", bytes_text(entry.bytes),
                             ", set by ", table().text(entry.set_by)));
    }
  }
  return join(lines, "\n");
}

// --- layouts of a slot --------------------------------------------------------------------------

// The unit's buckets of one role and dtype, largest first; equal ones in order of declaration.
std::vector<int32_t> ranked_buckets(const BucketTable& table, int32_t unit, BucketRole role,
                                    DType dtype) {
  const std::vector<Bucket>& buckets = table.units()[static_cast<size_t>(unit)].buckets;
  std::vector<int32_t> ranked;
  for (int32_t i = 0; i < static_cast<int32_t>(buckets.size()); ++i) {
    const Bucket& bucket = buckets[static_cast<size_t>(i)];
    if (bucket.role == role && bucket.dtype == dtype) ranked.push_back(i);
  }
  std::stable_sort(ranked.begin(), ranked.end(), [&](int32_t a, int32_t b) {
    return buckets[static_cast<size_t>(a)].bytes > buckets[static_cast<size_t>(b)].bytes;
  });
  return ranked;
}

void add_entries(const BucketTable& table, BucketRole role, DType dtype, int64_t alignment,
                 SlotLayout& layout) {
  std::vector<SlotEntry> entries;
  for (int32_t unit = 0; unit < table.num_units(); ++unit) {
    const std::vector<int32_t> ranked = ranked_buckets(table, unit, role, dtype);
    for (size_t rank = 0; rank < ranked.size(); ++rank) {
      const BucketId id{unit, ranked[rank]};
      const int64_t bytes = table.bucket(id).bytes;
      if (rank == entries.size()) {
        entries.push_back({.role = role, .dtype = dtype, .bytes = bytes, .set_by = id});
      } else if (entries[rank].bytes < bytes) {
        entries[rank].bytes = bytes;
        entries[rank].set_by = id;
      }
    }
  }
  const auto first = static_cast<int32_t>(layout.entries.size());
  for (const SlotEntry& entry : entries) add_entry(layout, entry, alignment);
  for (int32_t unit = 0; unit < table.num_units(); ++unit) {
    const std::vector<int32_t> ranked = ranked_buckets(table, unit, role, dtype);
    for (int32_t rank = 0; rank < static_cast<int32_t>(ranked.size()); ++rank) {
      const int32_t index = table.index_of({unit, ranked[static_cast<size_t>(rank)]});
      layout.homes[static_cast<size_t>(index)] = {.place = BucketHome::Place::kSlot,
                                                  .entry = first + rank};
    }
  }
}

bool alike(const UnitBuckets& a, const UnitBuckets& b) {
  return std::equal(a.buckets.begin(), a.buckets.end(), b.buckets.begin(), b.buckets.end(),
                    [](const Bucket& x, const Bucket& y) {
                      return x.role == y.role && x.dtype == y.dtype && x.bytes == y.bytes;
                    });
}

// The first unit of the largest set, and the size of that set.
std::pair<int32_t, int32_t> most_common_unit(const BucketTable& table) {
  std::vector<std::pair<int32_t, int32_t>> sets;  // first unit, units in it
  for (int32_t unit = 0; unit < table.num_units(); ++unit) {
    const auto same = std::find_if(sets.begin(), sets.end(), [&](const auto& set) {
      return alike(table.units()[static_cast<size_t>(set.first)],
                   table.units()[static_cast<size_t>(unit)]);
    });
    if (same == sets.end()) {
      sets.emplace_back(unit, 1);
    } else {
      ++same->second;
    }
  }
  if (sets.empty()) return {-1, 0};
  return *std::max_element(sets.begin(), sets.end(),
                           [](const auto& a, const auto& b) { return a.second < b.second; });
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

SlotLayout on_demand_layout(const BucketTable& table) {
  SlotLayout layout;
  layout.kind = PoolKind::kOnDemand;
  layout.homes.resize(static_cast<size_t>(table.num_buckets()));
  return layout;
}

SlotLayout max_pool_layout(const BucketTable& table, const SlotOptions& options) {
  SlotLayout layout;
  layout.kind = PoolKind::kMaxPool;
  layout.homes.resize(static_cast<size_t>(table.num_buckets()));
  layout.num_units_in_slots = table.num_units();
  for (const BucketRole role : {BucketRole::kWeight, BucketRole::kGradient}) {
    for (const DType dtype : all_dtypes()) {
      add_entries(table, role, dtype, options.alignment, layout);
    }
  }
  return layout;
}

SlotLayout double_buffer_layout(const BucketTable& table, OtherUnits other_units,
                                const SlotOptions& options) {
  SlotLayout layout;
  layout.kind = PoolKind::kDoubleBuffer;
  layout.homes.resize(static_cast<size_t>(table.num_buckets()));
  const auto [common, num_alike] = most_common_unit(table);
  if (common < 0) return layout;
  layout.num_units_in_slots = num_alike;
  const UnitBuckets& common_unit = table.units()[static_cast<size_t>(common)];
  for (int32_t i = 0; i < static_cast<int32_t>(common_unit.buckets.size()); ++i) {
    const Bucket& bucket = common_unit.buckets[static_cast<size_t>(i)];
    add_entry(
        layout,
        {.role = bucket.role, .dtype = bucket.dtype, .bytes = bucket.bytes, .set_by = {common, i}},
        options.alignment);
  }
  int64_t persistent_offset = 0;
  for (int32_t index = 0; index < table.num_buckets(); ++index) {
    const BucketId id = table.id_of(index);
    BucketHome& home = layout.homes[static_cast<size_t>(index)];
    if (alike(common_unit, table.units()[static_cast<size_t>(id.unit)])) {
      home = {.place = BucketHome::Place::kSlot, .entry = id.bucket};
    } else if (other_units == OtherUnits::kPersistent) {
      const Bucket& bucket = table.bucket(id);
      const int64_t bytes = round_up(bucket.bytes, options.alignment);
      home = {.place = BucketHome::Place::kPersistent, .offset = persistent_offset};
      persistent_offset = checked_add(persistent_offset, bytes);
      layout.persistent_bytes[static_cast<size_t>(bucket.role)] += bytes;
    }
  }
  return layout;
}

}  // namespace fsdp
