// CRC32C, the checksum of every byte in checkpoints and token files, at the speed of memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace fsdp {

// The CRC32C (Castagnoli; RFC 3720, appendix B.4) of `bytes`. With `before`, the checksum of what
// came before them, the checksum of all of it: crc32c(b, crc32c(a)) is that of a and then b.
uint32_t crc32c(std::span<const std::byte> bytes, uint32_t before = 0);

// The checksum of two neighbouring pieces from theirs, without their bytes.
uint32_t crc32c_of_joined(uint32_t first, uint32_t second, int64_t second_bytes);

// crc32c() without the processor's own instructions, for machines that have none.
uint32_t crc32c_by_table(std::span<const std::byte> bytes, uint32_t before = 0);

// Whether crc32c() uses the processor's own instructions (SSE4.2, ARMv8 CRC).
bool crc32c_is_in_hardware();

}  // namespace fsdp
