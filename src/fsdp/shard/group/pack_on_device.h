// Packs many tensors into a flat buffer on a CUDA device in one launch: casts, and writes or
// adds. In builds without CUDA: an Error.
#pragma once

#include <cstdint>
#include <span>

#include "fsdp/base/dtype.h"

namespace fsdp {

// One tensor, contiguous: to = from, or to + from, rounded once. Device memory.
struct PackedTensor {
  const void* from = nullptr;
  DType from_dtype = DType::kFloat32;
  void* to = nullptr;  // in the type of the whole pack
  int64_t numel = 0;
  bool adds = false;
};

// Whether this build has the kernel, and whether it takes the type: fp32, bf16, fp16.
bool has_device_packs();
bool is_packed_on_device(DType dtype);

// Enqueues on `stream`, a cudaStream_t, with a copy of the list: a recorded launch packs the same
// addresses again. Tensors must not overlap; those without elements do nothing.
void pack_on_device(std::span<const PackedTensor> tensors, DType to_dtype, void* stream);

}  // namespace fsdp
