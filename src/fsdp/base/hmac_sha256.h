// SHA-256 (FIPS 180-4) and HMAC over it (RFC 2104): who made these bytes knows the key.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string>

namespace fsdp {

using Digest = std::array<std::byte, 32>;

Digest sha256(std::span<const std::byte> message);

// Its first bytes, as two digits each.
std::string hex_text(const Digest& digest, size_t num_bytes);

Digest hmac_sha256(std::span<const std::byte> key, std::span<const std::byte> message);

// Takes the same time wherever they differ, so that the time tells an attacker nothing.
bool is_same(const Digest& a, const Digest& b);

}  // namespace fsdp
