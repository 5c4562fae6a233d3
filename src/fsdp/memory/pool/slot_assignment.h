// Which unit lies in which slot: decided in the first step, repeated in every later one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/memory/bucket.h"
#include "fsdp/memory/bucket_pool.h"

namespace fsdp {

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

}  // namespace fsdp
