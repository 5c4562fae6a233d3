// Loss masks of token files: kept by every reading, joining and cutting into batches.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "fsdp/base/check.h"
#include "fsdp/data/batches.h"
#include "fsdp/data/byte_tokenizer.h"
#include "fsdp/data/pack.h"
#include "fsdp/data/token_file.h"
#include "support/temp_dir.h"
#include "support/token_files.h"

namespace fsdp::testing::loss_mask_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// A prompt, which is not learnt, and its completion.
struct Row {
  std::vector<int64_t> prompt;
  std::vector<int64_t> completion;
};

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

TEST_F(LossMasks, AreReadAsTheyWereWrittenFromAnyPlace) {
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
    for (size_t first = 0; first <= tokens.size(); ++first)
      for (size_t count = 0; first + count <= tokens.size(); ++count) {
        std::vector<int64_t> some(count);
        std::vector<uint8_t> some_learnt(count);
        file.read(static_cast<int64_t>(first), some, some_learnt);
        EXPECT_TRUE(std::equal(some.begin(), some.end(), &tokens[first]));
        EXPECT_TRUE(std::equal(some_learnt.begin(), some_learnt.end(), &learnt[first]));
        file.read(static_cast<int64_t>(first), some);  // without asking for the mask
        EXPECT_TRUE(std::equal(some.begin(), some.end(), &tokens[first]));
      }
  }
}

// Other programs read it: docs/data.md has this table.
TEST_F(LossMasks, LieWhereTheDocumentationSays) {
  write_rows(path_, {{{3}, {4}}}, masked(byte_level_header()));
  const std::string bytes = read_text_file(path_, 1 << 20);
  EXPECT_EQ(bytes.substr(8, 4), std::string("\2\0\0\0", 4));
  EXPECT_EQ(bytes.substr(116, 8), std::string("\1\0\0\0\0\0\0\0", 8));
  EXPECT_EQ(bytes.substr(128), std::string("\3\x80\4\0", 4));
  // Without a mask nothing changes, also for a file whose tokens are all learnt.
  write_tokens(path_, {3, 4}, byte_level_header());
  const std::string plain = read_text_file(path_, 1 << 20);
  EXPECT_EQ(plain.substr(8, 4), std::string("\1\0\0\0", 4));
  EXPECT_EQ(plain.substr(116, 8), std::string(8, '\0'));
}

TEST_F(LossMasks, NeedABitThatTokensDoNot) {
  EXPECT_EQ(masked_token_bytes_for(32768), 2);
  EXPECT_EQ(masked_token_bytes_for(32769), 4);
  TokenHeader header = masked(byte_level_header());
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
  write_rows(path_, {{{1, 2}, {3}}}, masked(byte_level_header()));
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

TEST_F(LossMasks, OfOneFileAreAnotherFingerprint) {
  write_rows(path_, {{{1, 2}, {3}}});
  const uint64_t before = open_corpus({path_})->fingerprint();
  write_rows(path_, {{{1}, {2, 3}}});
  EXPECT_NE(open_corpus({path_})->fingerprint(), before);
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
}  // namespace fsdp::testing::loss_mask_test
