#include "fsdp/memory/bucket_pool.h"

#include <algorithm>

#include "fsdp/base/check.h"
#include "fsdp/base/log.h"
#include "fsdp/base/text.h"

namespace fsdp {

void BucketPool::reserve() {
  if (reserved_) return;
  reserve_memory();
  reserved_ = true;
  // Every rank has the same pool, so only one of them logs its report.
  if (thread_rank() <= 0) log(LogLevel::kInfo, report());
}

void BucketPool::begin_step() {
  FSDP_CHECK(num_held_ == 0, "a step begins while ", num_held_,
             " buckets are still held; release them at the end of the step (", state_text(), ")");
  reset_step();
}

void* BucketPool::acquire(BucketId id) {
  const int32_t index = table_.index_of(id);
  State& state = states_[static_cast<size_t>(index)];
  FSDP_CHECK(!state.held, table_.text(id), " is acquired twice; release it first (", state_text(),
             ")");
  if (!reserved_) [[unlikely]]
    reserve();
  state.address = take(id, index);
  state.held = true;
  ++num_held_;
  return state.address;
}

void* BucketPool::acquire(BucketId id, int64_t expected_bytes, DType expected_dtype) {
  const Bucket& bucket = table_.bucket(id);
  FSDP_CHECK(bucket.bytes == expected_bytes && bucket.dtype == expected_dtype, table_.text(id),
             " was declared with ", bucket.bytes, " bytes of ", name_of(bucket.dtype),
             " and is acquired with ", expected_bytes, " bytes of ", name_of(expected_dtype),
             "; a changed model or precision needs a new pool (", state_text(), ")");
  return acquire(id);
}

void BucketPool::release(BucketId id) {
  const int32_t index = table_.index_of(id);
  State& state = states_[static_cast<size_t>(index)];
  FSDP_CHECK(state.held, table_.text(id),
             " is released but not held; acquire it first, and release it once (", state_text(),
             ")");
  release_memory(id, index);
  state = {};
  --num_held_;
}

bool BucketPool::can_acquire(BucketId id) const {
  const int32_t index = table_.index_of(id);
  return !states_[static_cast<size_t>(index)].held && can_take(id, index);
}

void BucketPool::cancel_step() noexcept {
  for (int32_t i = 0; num_held_ > 0 && i < table_.num_buckets(); ++i) {
    if (states_[static_cast<size_t>(i)].held) release(table_.id_of(i));
  }
}

void* BucketPool::address(BucketId id) const {
  const State& state = at(id);
  FSDP_CHECK(state.held, table_.text(id), " is not held, so it has no address (", state_text(),
             ")");
  return state.address;
}

bool BucketPool::addresses_are_fixed() const {
  for (int32_t i = 0; i < table_.num_buckets(); ++i) {
    if (!address_is_fixed(table_.id_of(i))) return false;
  }
  return true;
}

std::string BucketPool::held_text() const {
  std::vector<std::string> held;
  for (int32_t i = 0; i < table_.num_buckets(); ++i) {
    if (states_[static_cast<size_t>(i)].held) held.push_back(table_.text(table_.id_of(i)));
  }
  return held.empty() ? "nothing is held" : concat("held: ", join(held, ", "));
}

}  // namespace fsdp
