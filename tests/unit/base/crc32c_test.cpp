// CRC32C: the published answers, and every way to get one gives the same.
#include "fsdp/base/crc32c.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string_view>
#include <vector>

namespace fsdp::crc32c_test {
namespace {

using Bytes = std::vector<std::byte>;

Bytes random_bytes(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  Bytes bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

void expect_checksum(std::span<const std::byte> bytes, uint32_t checksum) {
  EXPECT_EQ(crc32c(bytes), checksum);
  EXPECT_EQ(crc32c_by_table(bytes), checksum);
}

// RFC 3720 (iSCSI), appendix B.4, and the usual check value.
TEST(Crc32c, AgreesWithPublishedAnswers) {
  Bytes counting(32);
  for (size_t i = 0; i < counting.size(); ++i) counting[i] = static_cast<std::byte>(i);
  expect_checksum({}, 0);
  expect_checksum(Bytes(32, std::byte{0}), 0x8A9136AA);
  expect_checksum(Bytes(32, std::byte{0xFF}), 0x62A8AB43);
  expect_checksum(counting, 0x46DD794E);
  std::reverse(counting.begin(), counting.end());
  expect_checksum(counting, 0x113FDB5C);
  expect_checksum(std::as_bytes(std::span(std::string_view("123456789"))), 0xE3069283);
}

TEST(Crc32c, InstructionsAndTableAgreeAtEveryLengthAndAlignment) {
  if (!crc32c_is_in_hardware()) GTEST_SKIP() << "this processor has no CRC32C instruction";
  const Bytes bytes = random_bytes(70'000, 1);
  const auto expect_equal = [&](size_t begin, size_t length) {
    const auto piece = std::span(bytes).subspan(begin, length);
    ASSERT_EQ(crc32c(piece), crc32c_by_table(piece)) << length << " bytes from " << begin;
  };
  for (size_t length = 0; length < 100; ++length)
    for (size_t begin = 0; begin < 9; ++begin) expect_equal(begin, length);
  // Around one and several rounds of three short and of three long pieces.
  for (const size_t round : {3 * 256, 6 * 256, 3 * 4096, 3 * 4096 + 3 * 256, 6 * 4096})
    for (size_t extra = 0; extra < 20; ++extra) expect_equal(extra % 9, round + extra - 10);
  std::mt19937 random(2);
  for (int i = 0; i < 300; ++i) {
    const size_t begin = random() % 5000;
    expect_equal(begin, random() % (bytes.size() - begin));
  }
}

TEST(Crc32c, ContinuesOneThatWasBegunAndJoinsThoseOfNeighbouringPieces) {
  const Bytes bytes = random_bytes(30'000, 3);
  const std::span all(bytes);
  const uint32_t whole = crc32c(all);
  for (const size_t cut : {0, 1, 7, 8, 769, 12'288, 12'345, 29'999, 30'000}) {
    const auto first = all.first(cut);
    const auto second = all.subspan(cut);
    EXPECT_EQ(crc32c(second, crc32c(first)), whole) << cut;
    EXPECT_EQ(crc32c_by_table(second, crc32c(first)), whole) << cut;
    EXPECT_EQ(crc32c_of_joined(crc32c(first), crc32c(second), static_cast<int64_t>(second.size())),
              whole)
        << cut;
  }
}

// Too long to be computed here byte by byte, so by joining doubled pieces; the last step, 1 + 2^40
// bytes against 2^40 + 1, has two ways.
TEST(Crc32c, JoinsPiecesOfTerabytes) {
  const Bytes one_zero(1, std::byte{0});
  const uint32_t one = crc32c(one_zero);
  uint32_t doubled = one;
  int64_t doubled_bytes = 1;
  for (; doubled_bytes < int64_t{1} << 40; doubled_bytes *= 2)
    doubled = crc32c_of_joined(doubled, doubled, doubled_bytes);
  EXPECT_EQ(crc32c_of_joined(one, doubled, doubled_bytes), crc32c_of_joined(doubled, one, 1));
  EXPECT_EQ(crc32c_of_joined(doubled, one, 1), crc32c(one_zero, doubled));
}

}  // namespace
}  // namespace fsdp::crc32c_test
