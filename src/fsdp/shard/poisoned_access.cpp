// libtorch before 2.13: an access error cannot be taken back, so in checked mode an unbound
// parameter reads NaN, and otherwise nothing is in its place.
#include <ATen/ATen.h>

#include "fsdp/comm/comm_options.h"
#include "fsdp/shard/unsharded_storage.h"

namespace fsdp {

void UnshardedStorage::forbid_access() {
  if (!CommOptions::from_environment().checked) return;
  if (!spare_is_ready_) {
    // Every byte 0xFF is NaN in each floating type.
    const at::Tensor poison = at::full({num_bytes_}, 0xFF, at::device(device_).dtype(at::kByte));
    spare_ = poison.storage();
    spare_is_ready_ = true;
  }
  storage_.unsafeGetStorageImpl()->set_data_ptr_noswap(
      c10::DataPtr(spare_.mutable_data(), device_));
}

void UnshardedStorage::allow_access() {}

}  // namespace fsdp
