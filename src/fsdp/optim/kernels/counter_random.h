// Random bits that depend on a position and a step instead of a generator, so that any thread,
// shard or device draws the same ones.
#pragma once

#include <cstdint>

#include "fsdp/base/compiler.h"
#include "fsdp/base/integer.h"

namespace fsdp {

// The use of the bits; each use has its own.
enum class RandomPurpose : uint32_t { kWeight = 1, kSecondMoment = 2 };

// One step's bits for one purpose and group, from position & ~0xFFFFFFFF on.
struct RandomKey {
  uint32_t first = 0;
  uint32_t second = 0;
};

FSDP_HOST_DEVICE inline RandomKey random_key(uint64_t seed, int64_t step, uint64_t group,
                                             RandomPurpose purpose, int64_t position) {
  uint64_t key = mixed_bits(seed + 0x9E3779B97F4A7C15ull);
  key = mixed_bits(key ^ static_cast<uint64_t>(step));
  key = mixed_bits(key ^ group);
  const auto high = static_cast<uint64_t>(position) >> 32;
  key = mixed_bits(key ^ (high << 8) ^ static_cast<uint64_t>(purpose));
  return {.first = static_cast<uint32_t>(key), .second = static_cast<uint32_t>(key >> 32)};
}

// 32 bits for a pair of elements: two rounds of multiply and shift, which vectorise, each after one
// half of the key.
FSDP_HOST_DEVICE inline uint32_t random_pair(RandomKey key, uint32_t pair) {
  uint32_t x = pair ^ key.first;
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = ((x ^ (x >> 15)) + key.second) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

// 16 bits for the element at a position, whose upper half is in the key: the even element of a pair
// has the lower bits.
FSDP_HOST_DEVICE inline uint32_t random_bits(RandomKey key, uint32_t position) {
  const uint32_t pair = random_pair(key, position >> 1);
  return (position & 1u) != 0 ? pair >> 16 : pair & 0xFFFFu;
}

}  // namespace fsdp
