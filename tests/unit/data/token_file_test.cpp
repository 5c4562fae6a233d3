// Packed token files: read back as written, every defect is one sentence, no half files.
#include "fsdp/data/token_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <set>

#include "fsdp/base/check.h"
#include "fsdp/base/crc32c.h"
#include "fsdp/data/batches.h"
#include "fsdp/data/pack.h"
#include "fsdp/data/tokenizer.h"
#include "support/file_size_limit.h"
#include "support/temp_dir.h"
#include "support/token_files.h"

namespace fsdp::testing::token_file_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
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
  expect_refusal(with(12, uint32_t{3}), "a token has 3 bytes where it must have 2 or 4");
  expect_refusal(with(16, int64_t{0}), "the vocabulary is 0 where tokens of 2 bytes allow 1 to");
  expect_refusal(with(16, int64_t{65537}), "the vocabulary is 65537");
  expect_refusal(with(24, int64_t{-5}), "counts -5 tokens");
  expect_refusal(with(24, INT64_MAX), "more than a file can hold");
  expect_refusal(with(24, int64_t{6}), "has 138 bytes where its header says 140: it was cut short");
  expect_refusal(with(24, int64_t{4}), "has more than it should; use another copy, or pack");
  expect_refusal(with(32, int64_t{6}), "counts 6 documents in 5 tokens");
  expect_refusal(with(40, int64_t{300}), "ends documents is 300, outside the vocabulary of 300");
  expect_refusal(with(48, '\0'), "the tokenizer's name");
  expect_refusal(with(100, 'x'), "the tokenizer's name");
  expect_refusal(with(116, uint32_t{1}), "must be zero; use a newer fsdp");
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
  std::set<uint64_t> fingerprints;
  for (const auto& change : std::vector<std::function<void(TokenHeader&)>>{
           [](TokenHeader&) {}, [](TokenHeader& h) { h.data_crc32c ^= 1; },
           [](TokenHeader& h) { h.num_tokens = 6; }, [](TokenHeader& h) { h.vocabulary = 301; },
           [](TokenHeader& h) { h.tokenizer = "another"; }}) {
    TokenHeader header = small_header();
    change(header);
    fingerprints.insert(fingerprint_of(header));
    EXPECT_EQ(fingerprint_of(header), fingerprint_of(TokenHeader(header)));
  }
  EXPECT_EQ(fingerprints.size(), 5u);
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

TEST_F(TokenFiles, OfAnotherLengthAreRefused) {
  write_tokens(path_, {});
  EXPECT_NO_THROW(TokenFile(path_).verify());  // no tokens are a length, too
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

TEST_F(TokenFiles, NeverTakeATokenOutsideTheVocabulary) {
  TokenHeader header = counting_header();
  header.vocabulary = 100;
  TokenFileWriter writer(path_, header);
  for (const int64_t token : {int64_t{100}, int64_t{-1}})
    EXPECT_THAT(
        [&] {
          writer.write(std::vector<int64_t>{1, token});
        },
        ThrowsMessage<Error>(HasSubstr(concat("token number 1 is ", token, ", outside"))));
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

// --- loss mask -----------------------------------------------------------------------------------

// Loss masks of token files: kept by every reading, joining and cutting into batches.

// A prompt, which is not learnt, and its completion.
struct Row {
  std::vector<int64_t> prompt;
  std::vector<int64_t> completion;
};

TokenHeader byte_header() { return open_tokenizer(kByteTokenizerName)->kind(); }

TokenHeader masked(TokenHeader header) {
  header.num_learnt = 0;
  return header;
}

TokenHeader write_rows(const std::string& path, const std::vector<Row>& rows,
                       const TokenHeader& header = masked(counting_header())) {
  TokenFileWriter writer(path, header);
  for (const Row& row : rows) {
    writer.write(row.prompt, Learnt::kNo);
    writer.write(row.completion);
    writer.count_documents(1);
  }
  return writer.commit();
}

std::vector<uint8_t> mask_of(const Corpus& corpus) {
  std::vector<int64_t> tokens(static_cast<size_t>(corpus.num_tokens()));
  std::vector<uint8_t> learnt(tokens.size());
  corpus.read(0, tokens, learnt);
  return learnt;
}

class LossMasks : public ::testing::Test {
 protected:
  TempDir directory_{TempDir::On::kMemory};
  std::string path_ = directory_ / "rows.bin";
};

TEST_F(LossMasks, AreReadAsTheyWereWritten) {
  for (const int64_t width : {2, 4}) {
    const int64_t vocabulary = width == 2 ? 32768 : int64_t{1} << 31;
    const TokenHeader written =
        write_rows(path_, {{{0, vocabulary - 1}, {1}}, {{5}, {vocabulary - 1, 0}}},
                   masked({.token_bytes = width,
                           .vocabulary = vocabulary,
                           .end_of_document = {},
                           .tokenizer = "t"}));
    EXPECT_EQ(written.num_learnt, 3);
    const TokenFile file(path_);
    EXPECT_EQ(file.header(), written);
    EXPECT_NO_THROW(file.verify());
    const std::vector<int64_t> tokens = {0, vocabulary - 1, 1, 5, vocabulary - 1, 0};
    const std::vector<uint8_t> learnt = {0, 0, 1, 0, 1, 1};
    std::vector<int64_t> some(4);
    std::vector<uint8_t> some_learnt(4);
    file.read(1, some, some_learnt);
    EXPECT_TRUE(std::equal(some.begin(), some.end(), &tokens[1]));
    EXPECT_TRUE(std::equal(some_learnt.begin(), some_learnt.end(), &learnt[1]));
    file.read(1, some);  // without asking for the mask
    EXPECT_TRUE(std::equal(some.begin(), some.end(), &tokens[1]));
  }
}

// Other programs read it: docs/data.md has this table.
TEST_F(LossMasks, LieWhereTheDocumentationSays) {
  write_rows(path_, {{{3}, {4}}}, masked(byte_header()));
  const std::string bytes = read_text_file(path_, 1 << 20);
  EXPECT_EQ(bytes.substr(8, 4), std::string("\2\0\0\0", 4));
  EXPECT_EQ(bytes.substr(116, 8), std::string("\1\0\0\0\0\0\0\0", 8));
  EXPECT_EQ(bytes.substr(128), std::string("\3\x80\4\0", 4));
  // Without a mask nothing changes, also for a file whose tokens are all learnt.
  write_tokens(path_, {3, 4}, byte_header());
  const std::string plain = read_text_file(path_, 1 << 20);
  EXPECT_EQ(plain.substr(8, 4), std::string("\1\0\0\0", 4));
  EXPECT_EQ(plain.substr(116, 8), std::string(8, '\0'));
}

TEST_F(LossMasks, NeedABitThatTokensDoNot) {
  EXPECT_EQ(masked_token_bytes_for(32768), 2);
  EXPECT_EQ(masked_token_bytes_for(32769), 4);
  TokenHeader header = masked(byte_header());
  header.vocabulary = 32769;
  EXPECT_THAT([&] { TokenFileWriter(path_, header); },
              ThrowsMessage<Error>(HasSubstr(
                  "the vocabulary is 32769 where tokens of 2 bytes with a loss mask allow 1 to "
                  "32768")));
  header.vocabulary = 300;
  TokenFileWriter writer(path_, header);
  EXPECT_THAT(
      [&] { writer.write(std::vector<int64_t>{300}, Learnt::kNo); },
      ThrowsMessage<Error>(HasSubstr("token number 0 is 300, outside the vocabulary of 300")));
}

TEST_F(LossMasks, AreFoundDamagedByVerifying) {
  write_rows(path_, {{{1, 2}, {3}}});
  const std::string good = read_text_file(path_, 1 << 20);
  std::string bytes = good;
  bytes[kTokenHeaderBytes + 3] = 0;  // the first token becomes one that is learnt
  write_text_file(path_, bytes);
  EXPECT_THAT([&] { TokenFile(path_).verify(); },
              ThrowsMessage<Error>(HasSubstr("its tokens are damaged (the checksum differs)")));
  // A program that counted wrong.
  TokenHeader header = TokenFile(path_).header();
  header.num_learnt = 2;
  const TokenHeaderBytes wrong = write_token_header(header);
  bytes = good;
  std::memcpy(bytes.data(), wrong.data(), wrong.size());
  write_text_file(path_, bytes);
  EXPECT_THAT(
      [&] { TokenFile(path_).verify(); },
      ThrowsMessage<Error>(HasSubstr("1 of its tokens are learnt where its header says 2")));
  header.num_learnt = 4;
  EXPECT_THAT([&] { write_token_header(header); },
              ThrowsMessage<Error>(HasSubstr("counts 4 tokens that are learnt of 3")));
}

TEST_F(LossMasks, JoinWithFilesOfBothKinds) {
  write_rows(path_, {{{1, 2}, {3}}}, masked(byte_header()));
  const std::string text = directory_ / "text.txt";
  write_text_file(text, "ab");
  for (const auto& order : {std::vector{text, path_}, std::vector{path_, text, path_}}) {
    const auto corpus = open_corpus(order);
    const PackSummary packed =
        pack_tokens(order, directory_ / "all.bin", {.existing = PackOptions::Existing::kReplace});
    const auto joined = open_corpus({directory_ / "all.bin"});
    EXPECT_EQ(joined->fingerprint(), corpus->fingerprint());
    EXPECT_EQ(joined->num_learnt(), corpus->num_learnt());
    EXPECT_EQ(packed.header.num_learnt, corpus->num_learnt());
    EXPECT_EQ(tokens_of(*joined), tokens_of(*corpus));
    EXPECT_EQ(mask_of(*joined), mask_of(*corpus));
    EXPECT_NO_THROW(joined->verify());
  }
  EXPECT_THAT(mask_of(*open_corpus({text, path_})), ElementsAre(1, 1, 1, 0, 0, 1));
  EXPECT_EQ(open_corpus({text})->num_learnt(), 3);
  EXPECT_FALSE(open_corpus({text})->has_mask());
  EXPECT_THAT(open_corpus({text, path_})->summary(), HasSubstr("6 tokens, 4 of them learnt, of"));
}

// Window 0 has the tokens 0 to 3, window 1 the tokens 3 to 6; a target counts if its token is
// learnt, whatever its input.
TEST_F(LossMasks, SayWhichTargetsOfABatchCount) {
  write_rows(path_, {{{0, 1}, {2, 3}}, {{4}, {5}}, {{6}, {}}});
  const TokenWindows windows = all_windows(open_corpus({path_}), 3);
  const TokenBatch batch = ValidationBatches(windows, {.batch = 2}).read(0);
  EXPECT_THAT(batch.tokens, ElementsAre(0, 1, 2, 3, 3, 4, 5, 6));
  EXPECT_THAT(batch.targets, ElementsAre(kNotLearnt, 2, 3, kNotLearnt, 5, kNotLearnt));
  EXPECT_EQ(batch.num_targets, 3);
  const TokenBatch trained = TrainingBatches(windows, {.batch = 2}).read(0, 0);
  EXPECT_EQ(trained.num_targets, 3);
  EXPECT_EQ(std::count(trained.targets.begin(), trained.targets.end(), kNotLearnt), 3);
}

}  // namespace
}  // namespace fsdp::testing::token_file_test
