// Reads stored tensors in the type they are to be written in.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "fsdp/checkpoint/tensor_stream.h"

namespace fsdp {

// Refers to `files`, which must outlive it. For one thread at a time.
class ConvertedReads {
 public:
  // `dtype` is for floating-point tensors: fp32, bf16, fp16 or fp64. nullopt: as they are stored.
  // `on_bytes` is told of every byte that was handed out.
  ConvertedReads(std::span<const CheckedFile> files, std::optional<DType> dtype,
                 OnBytes on_bytes = {});

  DType dtype_of(const StoredTensor& tensor) const;
  int64_t bytes_of(const StoredTensor& tensor) const;

  // Elements [range) of the flattened tensor to `into`, in dtype_of(tensor). Error for finite
  // numbers that this type cannot hold.
  void read(const CatalogTensor& tensor, FlatRange range, std::byte* into);

 private:
  std::span<const CheckedFile> files_;
  std::optional<DType> dtype_;
  OnBytes on_bytes_;
  std::vector<std::byte> stored_;  // before their conversion
};

}  // namespace fsdp
