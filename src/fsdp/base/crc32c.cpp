#include "fsdp/base/crc32c.h"

#include <array>
#include <bit>
#include <cstring>

#include "fsdp/base/check.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace fsdp {
namespace {

// Note [Checksums as polynomials]
// A checksum is a polynomial over GF(2) modulo the one below, its highest power in the lowest bit.
// A zero byte after the data multiplies it by x^8. So the checksum of data that is cut in pieces is
// each piece's own, multiplied by x^(8 * bytes after it), added up. That joins checksums, and lets
// one core work at several pieces at a time.
constexpr uint32_t kPolynomial = 0x82F63B78;
constexpr uint32_t kOne = 0x80000000;  // x^0

constexpr uint32_t times_x(uint32_t a) { return (a >> 1) ^ ((a & 1) != 0 ? kPolynomial : 0); }

constexpr uint32_t product(uint32_t a, uint32_t b) {
  uint32_t sum = 0;
  for (uint32_t power = kOne; power != 0; power >>= 1) {
    if ((a & power) != 0) sum ^= b;
    b = times_x(b);
  }
  return sum;
}

// x^(8 * num_bytes): what `num_bytes` zero bytes multiply a checksum by.
constexpr uint32_t zero_bytes(uint64_t num_bytes) {
  uint32_t power = kOne;
  uint32_t square = kOne >> 8;  // x^8
  for (; num_bytes != 0; num_bytes >>= 1) {
    if ((num_bytes & 1) != 0) power = product(power, square);
    square = product(square, square);
  }
  return power;
}

// table[k][v]: the product of a factor and a polynomial whose k-th byte is v, all others zero. The
// product with any polynomial is the sum of four entries.
using Table = std::array<std::array<uint32_t, 256>, 4>;

constexpr Table table_of(uint32_t factor) {
  Table table{};
  for (uint32_t k = 0; k < 4; ++k) {
    for (uint32_t v = 1; v < 256; ++v) {
      const uint32_t lowest = v & (~v + 1);
      table[k][v] = v == lowest ? product(factor, lowest << (8 * k))
                                : table[k][lowest] ^ table[k][v ^ lowest];
    }
  }
  return table;
}

constexpr uint32_t multiply(const Table& table, uint32_t a) {
  return table[0][a & 0xFF] ^ table[1][(a >> 8) & 0xFF] ^ table[2][(a >> 16) & 0xFF] ^
         table[3][a >> 24];
}

// --- any machine ---------------------------------------------------------------------------------

constexpr Table kFourBytes = table_of(zero_bytes(4));
constexpr Table kEightBytes = table_of(zero_bytes(8));

uint32_t little_endian_word(const std::byte* at) {
  uint32_t word = 0;
  for (size_t i = 0; i < 4; ++i) word |= std::to_integer<uint32_t>(at[i]) << (8 * i);
  return word;
}

// `crc` is the register: the checksum with all bits inverted.
uint32_t update_by_table(uint32_t crc, const std::byte* at, size_t num_bytes) {
  for (; num_bytes >= 8; at += 8, num_bytes -= 8) {
    crc = multiply(kEightBytes, crc ^ little_endian_word(at)) ^
          multiply(kFourBytes, little_endian_word(at + 4));
  }
  for (; num_bytes > 0; ++at, --num_bytes) {
    crc = kFourBytes[3][(crc ^ std::to_integer<uint32_t>(*at)) & 0xFF] ^ (crc >> 8);
  }
  return crc;
}

// --- machines with instructions ------------------------------------------------------------------

// Compiled for machines that have them, whatever the rest is compiled for, and called only there.
#if defined(__x86_64__)
#define FSDP_CRC_INSTRUCTIONS [[gnu::target("sse4.2")]]
FSDP_CRC_INSTRUCTIONS inline uint32_t add_word(uint32_t crc, uint64_t word) {
  return static_cast<uint32_t>(_mm_crc32_u64(crc, word));
}
FSDP_CRC_INSTRUCTIONS inline uint32_t add_byte(uint32_t crc, std::byte byte) {
  return _mm_crc32_u8(crc, std::to_integer<uint8_t>(byte));
}
bool has_instructions() { return __builtin_cpu_supports("sse4.2") != 0; }
#elif defined(__aarch64__) && defined(__clang__)
#define FSDP_CRC_INSTRUCTIONS [[gnu::target("crc")]]
FSDP_CRC_INSTRUCTIONS inline uint32_t add_word(uint32_t crc, uint64_t word) {
  return __builtin_arm_crc32cd(crc, word);
}
FSDP_CRC_INSTRUCTIONS inline uint32_t add_byte(uint32_t crc, std::byte byte) {
  return __builtin_arm_crc32cb(crc, std::to_integer<uint8_t>(byte));
}
bool has_instructions() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
#elif defined(__aarch64__)
#define FSDP_CRC_INSTRUCTIONS [[gnu::target("+crc")]]
FSDP_CRC_INSTRUCTIONS inline uint32_t add_word(uint32_t crc, uint64_t word) {
  return __crc32cd(crc, word);
}
FSDP_CRC_INSTRUCTIONS inline uint32_t add_byte(uint32_t crc, std::byte byte) {
  return __crc32cb(crc, std::to_integer<uint8_t>(byte));
}
bool has_instructions() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
#endif

#if defined(FSDP_CRC_INSTRUCTIONS)

// An instruction takes 2 or 3 cycles, but one can begin in each: three chains of them keep the unit
// busy. Joining the three costs some 20 cycles, hence long pieces, and short ones for the rest.
constexpr size_t kLongBytes = 4096;
constexpr size_t kShortBytes = 256;
constexpr Table kLong = table_of(zero_bytes(kLongBytes));
constexpr Table kShort = table_of(zero_bytes(kShortBytes));

inline uint64_t word_at(const std::byte* at) {
  uint64_t word = 0;
  std::memcpy(&word, at, sizeof word);
  return word;
}

// Three neighbouring pieces; `skip` multiplies by the zero bytes of one.
template <size_t kBytes>
FSDP_CRC_INSTRUCTIONS inline uint32_t add_three(uint32_t crc, const std::byte* at,
                                                const Table& skip) {
  uint32_t second = 0;
  uint32_t third = 0;
  for (size_t i = 0; i < kBytes; i += 8) {
    crc = add_word(crc, word_at(at + i));
    second = add_word(second, word_at(at + kBytes + i));
    third = add_word(third, word_at(at + 2 * kBytes + i));
  }
  return multiply(skip, multiply(skip, crc) ^ second) ^ third;
}

FSDP_CRC_INSTRUCTIONS uint32_t update_by_instructions(uint32_t crc, const std::byte* at,
                                                      size_t num_bytes) {
  static_assert(std::endian::native == std::endian::little);
  // Words that straddle cache lines are slower.
  for (; num_bytes > 0 && std::bit_cast<uintptr_t>(at) % 8 != 0; ++at, --num_bytes) {
    crc = add_byte(crc, *at);
  }
  for (; num_bytes >= 3 * kLongBytes; at += 3 * kLongBytes, num_bytes -= 3 * kLongBytes) {
    crc = add_three<kLongBytes>(crc, at, kLong);
  }
  for (; num_bytes >= 3 * kShortBytes; at += 3 * kShortBytes, num_bytes -= 3 * kShortBytes) {
    crc = add_three<kShortBytes>(crc, at, kShort);
  }
  for (; num_bytes >= 8; at += 8, num_bytes -= 8) crc = add_word(crc, word_at(at));
  for (; num_bytes > 0; ++at, --num_bytes) crc = add_byte(crc, *at);
  return crc;
}

#else

constexpr auto* update_by_instructions = update_by_table;
bool has_instructions() { return false; }

#endif

}  // namespace

bool crc32c_is_in_hardware() {
  static const bool answer = has_instructions();
  return answer;
}

uint32_t crc32c(std::span<const std::byte> bytes, uint32_t before) {
  const auto update = crc32c_is_in_hardware() ? update_by_instructions : update_by_table;
  return ~update(~before, bytes.data(), bytes.size());
}

uint32_t crc32c_by_table(std::span<const std::byte> bytes, uint32_t before) {
  return ~update_by_table(~before, bytes.data(), bytes.size());
}

uint32_t crc32c_of_joined(uint32_t first, uint32_t second, int64_t second_bytes) {
  FSDP_ASSERT(second_bytes >= 0, second_bytes);
  return product(zero_bytes(static_cast<uint64_t>(second_bytes)), first) ^ second;
}

}  // namespace fsdp
