#include "fsdp/base/hmac_sha256.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

namespace fsdp {

namespace {

constexpr size_t kBlockBytes = 64;

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr std::array<uint32_t, 64> kRoundConstants = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

// a to h; at first the square roots of the first 8 primes, as above.
using State = std::array<uint32_t, 8>;
constexpr State kFirstState = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                               0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

uint32_t big_endian_word(const std::byte* bytes) {
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) word = (word << 8) | std::to_integer<uint32_t>(bytes[i]);
  return word;
}

void add_block(State& state, const std::byte* block) {
  std::array<uint32_t, 64> words{};
  for (size_t i = 0; i < 16; ++i) words[i] = big_endian_word(block + 4 * i);
  for (size_t i = 16; i < 64; ++i) {
    const uint32_t w15 = words[i - 15];
    const uint32_t w2 = words[i - 2];
    words[i] = words[i - 16] + (std::rotr(w15, 7) ^ std::rotr(w15, 18) ^ (w15 >> 3)) +
               words[i - 7] + (std::rotr(w2, 17) ^ std::rotr(w2, 19) ^ (w2 >> 10));
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (size_t i = 0; i < 64; ++i) {
    const uint32_t choice = (e & f) ^ (~e & g);
    const uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
    const uint32_t first = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + choice +
                           kRoundConstants[i] + words[i];
    const uint32_t second = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + majority;
    h = g, g = f, f = e, e = d + first;
    d = c, c = b, b = a, a = first + second;
  }
  const State added = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < state.size(); ++i) state[i] += added[i];
}

// The last bytes, a one bit, zeros, and the message's length in bits: one block or two.
std::vector<std::byte> padded_end(std::span<const std::byte> rest, uint64_t message_bytes) {
  std::vector<std::byte> end(rest.begin(), rest.end());
  end.push_back(std::byte{0x80});
  end.resize(end.size() + 8 <= kBlockBytes ? kBlockBytes : 2 * kBlockBytes);
  for (size_t i = 0; i < 8; ++i)
    end[end.size() - 1 - i] = static_cast<std::byte>((message_bytes * 8) >> (8 * i));
  return end;
}

}  // namespace

Digest sha256(std::span<const std::byte> message) {
  State state = kFirstState;
  const size_t whole = message.size() / kBlockBytes * kBlockBytes;
  for (size_t at = 0; at < whole; at += kBlockBytes) add_block(state, message.data() + at);
  const std::vector<std::byte> end = padded_end(message.subspan(whole), message.size());
  for (size_t at = 0; at < end.size(); at += kBlockBytes) add_block(state, end.data() + at);
  Digest digest;
  for (size_t i = 0; i < digest.size(); ++i)
    digest[i] = static_cast<std::byte>(state[i / 4] >> (24 - 8 * (i % 4)));
  return digest;
}

std::string hex_text(const Digest& digest, size_t num_bytes) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text;
  for (const std::byte each : std::span(digest).first(num_bytes)) {
    text += kDigits[std::to_integer<int>(each) >> 4];
    text += kDigits[std::to_integer<int>(each) & 15];
  }
  return text;
}

Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> message) {
  std::array<std::byte, kBlockBytes> block_key{};
  if (key.size() > kBlockBytes) {
    const Digest short_key = sha256(key);
    std::copy(short_key.begin(), short_key.end(), block_key.begin());
  } else {
    std::copy(key.begin(), key.end(), block_key.begin());
  }
  const auto keyed = [&](std::byte pad, std::span<const std::byte> text) {
    std::vector<std::byte> bytes;
    for (const std::byte byte : block_key) bytes.push_back(byte ^ pad);
    bytes.insert(bytes.end(), text.begin(), text.end());
    return sha256(bytes);
  };
  return keyed(std::byte{0x5c}, keyed(std::byte{0x36}, message));
}

bool is_same(const Digest& a, const Digest& b) {
  std::byte difference{0};
  for (size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == std::byte{0};
}

}  // namespace fsdp
