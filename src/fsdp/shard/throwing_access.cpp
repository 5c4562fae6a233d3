// libtorch 2.13 and later: touching an unbound parameter throws, and that can be taken back.
#include "fsdp/shard/unsharded_storage.h"

namespace fsdp {

// The message is set once, and stays with the storage. Swapping with the spare moves only whether
// it is thrown (and the data pointer, which is set anew anyway): setting and clearing the message
// each time would copy the sentence twice per unit and step.
void UnshardedStorage::forbid_access() {
  c10::StorageImpl* storage = storage_.unsafeGetStorageImpl();
  if (spare_is_ready_) return storage->swap_data_ptr(*spare_.unsafeGetStorageImpl());
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(sentence_);
  spare_is_ready_ = true;
}

void UnshardedStorage::allow_access() {
  storage_.unsafeGetStorageImpl()->swap_data_ptr(*spare_.unsafeGetStorageImpl());
}

}  // namespace fsdp
