// libFuzzer: any bytes of a file are either a token file that is read within its vocabulary and can
// be written again, or are refused with an Error that names the file.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <vector>

#include "fsdp/base/crc32c.h"
#include "fsdp/base/error.h"
#include "fsdp/data/token_file.h"

namespace {

constexpr size_t kHeaderBytes = fsdp::kTokenHeaderBytes;
constexpr size_t kCrcAt = kHeaderBytes - 4;

void require(bool condition, std::string_view problem) {
  if (condition) return;
  std::fprintf(stderr, "token_file_fuzz: %.*s\n", static_cast<int>(problem.size()), problem.data());
  std::abort();
}

// A checksum that is right lets the rest of the header be looked at.
void repair_checksum(std::vector<std::byte>& bytes) {
  if (bytes.size() < kHeaderBytes) return;
  const uint32_t checksum = fsdp::crc32c(std::span(bytes).first(kCrcAt));
  std::memcpy(bytes.data() + kCrcAt, &checksum, sizeof checksum);
}

void check(const fsdp::TokenHeader& header, std::span<const std::byte> bytes) {
  require(header.num_tokens >= 0 && header.num_documents >= 0, "negative counts");
  require(header.data_bytes() + fsdp::kTokenHeaderBytes == static_cast<int64_t>(bytes.size()),
          "the tokens are not the file");
  const fsdp::TokenHeaderBytes again = fsdp::write_token_header(header);
  require(std::memcmp(again.data(), bytes.data(), again.size()) == 0,
          "a header that is written again is another one");
  std::vector<int64_t> tokens(static_cast<size_t>(header.num_tokens));
  const int64_t largest =
      fsdp::widen_tokens(bytes.subspan(kHeaderBytes), header.token_bytes, 0, tokens);
  require(tokens.empty() || largest == *std::max_element(tokens.begin(), tokens.end()),
          "another largest token");
  require(tokens.empty() || *std::min_element(tokens.begin(), tokens.end()) >= 0,
          "a negative token");
}

}  // namespace

// The first byte says whether the header's checksum is made right; the rest is the file.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const auto all = std::as_bytes(std::span(data, size));
  std::vector<std::byte> bytes(all.begin() + 1, all.end());
  if (data[0] % 2 == 1) repair_checksum(bytes);
  try {
    const auto first = std::span(bytes).first(std::min(bytes.size(), kHeaderBytes));
    check(fsdp::parse_token_header(first, static_cast<int64_t>(bytes.size()), "input"), bytes);
  } catch (const fsdp::Error& error) {
    require(std::string_view(error.what()).starts_with("input: "), error.what());
  }
  return 0;
}
