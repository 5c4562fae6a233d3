#include "fsdp/memory/pool/slot_assignment.h"

#include "fsdp/base/check.h"
#include "fsdp/base/log.h"
#include "fsdp/base/text.h"

namespace fsdp {

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

}  // namespace fsdp
