#include "fsdp/memory/slab_lease.h"

#include "fsdp/base/check.h"

namespace fsdp {

namespace {

constexpr int64_t kAlignment = 128;  // as the pools'

}  // namespace

void SlabLease::acquire(SlabFrom from) {
  FSDP_ASSERT(!is_held_);
  from_pool_ = from == SlabFrom::kPool && has_room();
  if (from_pool_) {
    address_ = pool_->acquire(id_);
  } else {
    if (pool_ != nullptr && from == SlabFrom::kPool) ++memory_->num_misses;
    if (own_.bytes() != num_bytes_) own_ = Slab(memory_->beside, num_bytes_, kAlignment);
    address_ = own_.at(0);
  }
  is_held_ = true;
}

void SlabLease::release() {
  FSDP_ASSERT(is_held_);
  // Memory in place of the pool's is for one deviation and is freed; a unit's own memory stays.
  if (from_pool_) {
    pool_->release(id_);
  } else if (!memory_->keeps_beside || pool_ != nullptr) {
    own_ = Slab();
  }
  is_held_ = false;
  address_ = nullptr;
}

void SlabLease::cancel() {
  if (!is_held_) return;
  own_ = Slab();
  is_held_ = false;
  address_ = nullptr;
}

}  // namespace fsdp
