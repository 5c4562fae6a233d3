// A copy of the state in host memory, which is kept for the next one.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>

#include "fsdp/checkpoint/checkpoint_state.h"

namespace fsdp {

class Snapshot {
 public:
  // Page-locked where the state is on another device: then copies run at the speed of the bus.
  explicit Snapshot(c10::Device device) : device_(device) {}

  // Copies what the pieces read now, and has them read the copy from here on. Pieces of an earlier
  // call must not be used any more.
  void take(StatePieces& pieces);

  int64_t bytes() const { return memory_.defined() ? memory_.numel() : 0; }

 private:
  const c10::Device device_;
  at::Tensor memory_;
};

}  // namespace fsdp
