// Reads a stored tensor in the order of its elements, a chunk at a time, however it was cut.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "fsdp/checkpoint/tensor_catalog.h"
#include "fsdp/layout/segment.h"

namespace fsdp {

// Bytes in memory at a time for whoever goes through whole tensors. 16 blocks of 1 MiB: the two at
// the ends, which may be read twice, are few.
inline constexpr int64_t kStreamBytes = int64_t{16} << 20;

// Called with the bytes that were done since the last call.
using OnBytes = std::function<void(int64_t bytes)>;

int64_t numel_of(const StoredTensor& tensor);
int64_t bytes_of(const StoredTensor& tensor);

// Elements [range) of the flattened tensor to `into`, verified.
void read_elements(std::span<const CheckedFile> files, const CatalogTensor& tensor, FlatRange range,
                   std::byte* into);

// Calls body(range) with neighbouring ranges of at most kStreamBytes of elements of `width` bytes;
// not at all for a tensor without elements.
void for_each_chunk(int64_t numel, int64_t width, const std::function<void(FlatRange)>& body);

}  // namespace fsdp
