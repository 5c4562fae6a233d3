// Packed token files: read back as written, every defect is one sentence, no half files.
#include "fsdp/data/token_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "fsdp/base/check.h"
#include "fsdp/base/crc32c.h"
#include "support/file_size_limit.h"
#include "support/temp_dir.h"
#include "support/token_files.h"

namespace fsdp::testing::token_file_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TokenHeader small_header() {
  return {.token_bytes = 2,
          .vocabulary = 300,
          .num_tokens = 5,
          .num_documents = 2,
          .end_of_document = 299,
          .tokenizer = "some/tokenizer v2",
          .data_crc32c = 0x12345678};
}

constexpr int64_t kSmallFileBytes = kTokenHeaderBytes + 10;

TEST(TokenHeader, IsReadAsItWasWritten) {
  TokenHeader header = small_header();
  EXPECT_EQ(parse_token_header(write_token_header(header), kSmallFileBytes, "x"), header);
  header.end_of_document.reset();
  header.tokenizer = std::string(64, 'n');
  header.token_bytes = 4;
  header.vocabulary = int64_t{1} << 31;
  EXPECT_EQ(parse_token_header(write_token_header(header), kTokenHeaderBytes + 20, "x"), header);
}

// Other programs read it: docs/data.md has this table.
TEST(TokenHeader, LiesWhereTheDocumentationSays) {
  const TokenHeaderBytes bytes = write_token_header(small_header());
  std::string expected("fsdptok\n", 8);
  expected += std::string("\1\0\0\0\2\0\0\0", 8);
  expected += std::string("\x2c\1\0\0\0\0\0\0", 8);
  expected += std::string("\5\0\0\0\0\0\0\0", 8);
  expected += std::string("\2\0\0\0\0\0\0\0", 8);
  expected += std::string("\x2b\1\0\0\0\0\0\0", 8);
  expected += "some/tokenizer v2" + std::string(64 - 17, '\0');
  expected += std::string("\x78\x56\x34\x12\0\0\0\0\0\0\0\0", 12);
  ASSERT_EQ(expected.size(), 124u);
  EXPECT_EQ(std::memcmp(bytes.data(), expected.data(), 124), 0);
  uint32_t checksum = 0;
  std::memcpy(&checksum, bytes.data() + 124, 4);
  EXPECT_EQ(checksum, crc32c(std::as_bytes(std::span(expected))));
}

// One defect, with a checksum that is right all the same.
template <typename Value>
TokenHeaderBytes with(size_t place, Value value) {
  TokenHeaderBytes bytes = write_token_header(small_header());
  std::memcpy(bytes.data() + place, &value, sizeof value);
  const uint32_t checksum = crc32c(std::span(bytes).first(124));
  std::memcpy(bytes.data() + 124, &checksum, 4);
  return bytes;
}

void expect_refusal(std::span<const std::byte> bytes, const std::string& says,
                    int64_t file_bytes = kSmallFileBytes) {
  EXPECT_THAT([&] { parse_token_header(bytes, file_bytes, "a.bin"); },
              ThrowsMessage<Error>(AllOf(HasSubstr("a.bin: "), HasSubstr(says))));
}

TEST(TokenHeader, EveryDefectIsOneSentenceWithAFix) {
  const TokenHeaderBytes good = write_token_header(small_header());
  expect_refusal(with(0, 'F'), "does not begin as a packed token file does; make one with fsdp");
  expect_refusal(std::span(good).first(5), "does not begin as a packed token file", 5);
  expect_refusal({}, "does not begin as a packed token file", 0);
  expect_refusal(std::span(good).first(100), "has 100 bytes where a header alone has 128", 100);
  expect_refusal(with(8, uint32_t{3}),
                 "version is 3 where this program reads 1 and 2; use a newer");
  expect_refusal(with(8, uint32_t{0}), "version is 0");
  expect_refusal(with(12, uint32_t{3}), "a token has 3 bytes where it must have 2 or 4");
  expect_refusal(with(16, int64_t{0}), "the vocabulary is 0 where tokens of 2 bytes allow 1 to");
  expect_refusal(with(16, int64_t{65537}), "the vocabulary is 65537");
  expect_refusal(with(16, int64_t{-1}), "the vocabulary is -1");
  expect_refusal(with(24, int64_t{-5}), "counts -5 tokens");
  expect_refusal(with(24, INT64_MAX), "more than a file can hold");
  expect_refusal(with(24, INT64_MAX / 2), "more than a file can hold");
  expect_refusal(with(24, int64_t{6}), "has 138 bytes where its header says 140: it was cut short");
  expect_refusal(with(24, int64_t{4}), "has more than it should; use another copy, or pack");
  expect_refusal(with(32, int64_t{6}), "counts 6 documents in 5 tokens");
  expect_refusal(with(32, int64_t{-1}), "counts -1 documents");
  expect_refusal(with(40, int64_t{300}), "ends documents is 300, outside the vocabulary of 300");
  expect_refusal(with(40, int64_t{-2}), "ends documents is -2");
  expect_refusal(with(48, '\0'), "the tokenizer's name");
  expect_refusal(with(50, '\n'), "the tokenizer's name");
  expect_refusal(with(100, 'x'), "the tokenizer's name");
  expect_refusal(with(116, uint32_t{1}), "must be zero; use a newer fsdp");
  expect_refusal(with(120, uint32_t{1}), "must be zero; use a newer fsdp");
}

TEST(TokenHeader, EveryBitThatFlipsIsFound) {
  const TokenHeaderBytes good = write_token_header(small_header());
  for (size_t byte = 0; byte < good.size(); ++byte)
    for (int bit = 0; bit < 8; ++bit) {
      TokenHeaderBytes bytes = good;
      bytes[byte] ^= std::byte{1} << bit;
      EXPECT_THROW(parse_token_header(bytes, kSmallFileBytes, "x"), Error) << byte << "." << bit;
    }
}

TEST(TokenHeader, WhatNobodyCouldReadIsNotWritten) {
  TokenHeader header = small_header();
  header.tokenizer = std::string(65, 'n');
  EXPECT_THROW(write_token_header(header), Error);
  header = small_header();
  header.vocabulary = 1 << 17;
  EXPECT_THROW(write_token_header(header), Error);
  EXPECT_EQ(token_bytes_for(65536), 2);
  EXPECT_EQ(token_bytes_for(65537), 4);
}

TEST(TokenHeader, FingerprintsSayWhichTokensTheseAre) {
  const uint64_t good = fingerprint_of(small_header());
  EXPECT_EQ(fingerprint_of(small_header()), good);
  TokenHeader other = small_header();
  other.data_crc32c ^= 1;
  EXPECT_NE(fingerprint_of(other), good);
  other = small_header();
  other.num_tokens = 6;
  EXPECT_NE(fingerprint_of(other), good);
  other = small_header();
  other.vocabulary = 301;
  EXPECT_NE(fingerprint_of(other), good);
  other = small_header();
  other.tokenizer = "another";
  EXPECT_NE(fingerprint_of(other), good);
  EXPECT_EQ(fingerprint_text(0xab), "0x00000000000000ab");
}

// Their first byte is for the fuzzer. One that begins with texts that are refused finds little.
TEST(TokenHeader, SeedsOfItsFuzzerAreAccepted) {
  for (const char* name : {"bytes.bin", "repaired.bin", "empty.bin"}) {
    const std::string seed = read_text_file(concat(FSDP_FUZZ_SEEDS, "/token_file/", name), 1 << 20);
    const auto bytes = std::as_bytes(std::span(seed)).subspan(1);
    EXPECT_NO_THROW(parse_token_header(bytes.first(128), static_cast<int64_t>(bytes.size()), name));
  }
}

class TokenFiles : public ::testing::Test {
 protected:
  void damage(const std::string& path, int64_t place, char byte) const {
    std::string bytes = read_text_file(path, 1 << 24);
    bytes[static_cast<size_t>(place)] = byte;
    write_text_file(path, bytes);
  }

  TempDir directory_{TempDir::On::kMemory};
  std::string path_ = directory_ / "tokens.bin";
};

TEST_F(TokenFiles, AreReadAsTheyWereWrittenFromAnyPlace) {
  for (const int64_t width : {2, 4}) {
    TokenHeader header{.token_bytes = width,
                       .vocabulary = width == 2 ? 65536 : int64_t{1} << 31,
                       .num_documents = 3,
                       .end_of_document = 7,
                       .tokenizer = "t"};
    const std::vector<int64_t> tokens = {0, 7, header.vocabulary - 1, 1, 255, 256, 7, 7};
    const TokenHeader written = write_tokens(path_, tokens, header);
    const TokenFile file(path_);
    EXPECT_EQ(file.header(), written);
    EXPECT_EQ(file.header().num_tokens, 8);
    EXPECT_EQ(file.header().num_documents, 3);
    EXPECT_EQ(file.bytes(), kTokenHeaderBytes + 8 * width);
    for (size_t first = 0; first <= tokens.size(); ++first)
      for (size_t count = 0; first + count <= tokens.size(); ++count) {
        std::vector<int64_t> read(count);
        file.read(static_cast<int64_t>(first), read);
        EXPECT_TRUE(std::equal(read.begin(), read.end(),
                               tokens.begin() + static_cast<std::ptrdiff_t>(first)));
      }
    EXPECT_NO_THROW(file.verify());
  }
}

TEST_F(TokenFiles, MayHaveNoTokens) {
  write_tokens(path_, {});
  const TokenFile file(path_);
  EXPECT_EQ(file.header().num_tokens, 0);
  EXPECT_NO_THROW(file.verify());
}

TEST_F(TokenFiles, OfAnotherLengthAreRefused) {
  write_counting_tokens(path_, 10);
  const std::string good = read_text_file(path_, 1 << 20);
  const auto opening = [&] { TokenFile file(path_); };
  for (size_t bytes = 0; bytes < good.size(); ++bytes) {
    write_text_file(path_, good.substr(0, bytes));
    EXPECT_THAT(opening, ThrowsMessage<Error>(HasSubstr(path_ + ": "))) << bytes;
  }
  write_text_file(path_, good + "x");
  EXPECT_THAT(opening, ThrowsMessage<Error>(HasSubstr("has more than it should")));
  EXPECT_THAT([&] { TokenFile file(directory_.path()); },
              ThrowsMessage<Error>(HasSubstr("not a file but a directory")));
  EXPECT_THAT([&] { TokenFile file(directory_ / "missing.bin"); },
              ThrowsMessage<Error>(HasSubstr("No such file")));
}

TEST_F(TokenFiles, WithDamagedTokensAreFoundByVerifying) {
  constexpr int64_t kTokens = 1'000'000;  // several pieces
  write_counting_tokens(path_, kTokens);
  int64_t told = 0;
  TokenFile(path_).verify([&](int64_t bytes) { told = bytes; });
  EXPECT_EQ(told, 4 * kTokens);
  damage(path_, kTokenHeaderBytes + 4 * (kTokens - 1), 9);  // in the vocabulary
  const TokenFile file(path_);
  EXPECT_THAT([&] { file.verify(); },
              ThrowsMessage<Error>(AllOf(HasSubstr(path_), HasSubstr("checksum differs"))));
}

TEST_F(TokenFiles, NeverGiveATokenOutsideTheVocabulary) {
  TokenHeader header = counting_header();
  header.vocabulary = 100;
  write_tokens(path_, {1, 2, 3, 4}, header);
  damage(path_, kTokenHeaderBytes + 4 * 2, 100);
  const TokenFile file(path_);
  std::vector<int64_t> tokens(2);
  EXPECT_NO_THROW(file.read(0, tokens));
  EXPECT_THAT(
      [&] { file.read(1, tokens); },
      ThrowsMessage<Error>(HasSubstr("token number 2 is 100, outside the vocabulary of 100 "
                                     "that the header names: one of them is wrong; use another")));
  EXPECT_THROW(file.verify(), Error);
  TokenFileWriter writer(directory_ / "new.bin", header);
  EXPECT_THAT(
      [&] {
        writer.write(std::vector<int64_t>{1, 100});
      },
      ThrowsMessage<Error>(HasSubstr("token number 1 is 100")));
  EXPECT_THROW(writer.write(std::vector<int64_t>{-1}), Error);
}

TEST_F(TokenFiles, AppearWhenTheyAreFinishedAndNotBefore) {
  write_tokens(path_, {1, 2, 3});
  {
    TokenFileWriter writer(path_, counting_header());
    writer.write(std::vector<int64_t>{9});
    EXPECT_EQ(TokenFile(path_).header().num_tokens, 3);
  }
  EXPECT_EQ(names_in(directory_.path()), std::vector<std::string>{"tokens.bin"});
  const TokenFile before(path_);  // stays readable when the name gets another file
  write_tokens(path_, {4});
  EXPECT_EQ(TokenFile(path_).header().num_tokens, 1);
  std::vector<int64_t> tokens(3);
  before.read(0, tokens);
  EXPECT_EQ(tokens, (std::vector<int64_t>{1, 2, 3}));
}

TEST_F(TokenFiles, LeaveNothingOnAFullDisk) {
  const auto packing = [&] {
    const FileSizeLimit limit(4096);
    write_counting_tokens(path_, 10'000);
  };
  EXPECT_THAT(packing, ThrowsMessage<Error>(HasSubstr("cannot write more than its first")));
  EXPECT_TRUE(names_in(directory_.path()).empty());
  EXPECT_THAT([&] { write_tokens(directory_ / "no/such/place.bin", {1}); },
              ThrowsMessage<Error>(HasSubstr("cannot create the file")));
}

}  // namespace
}  // namespace fsdp::testing::token_file_test
