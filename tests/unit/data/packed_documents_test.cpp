// Whole documents in windows.
#include "fsdp/data/packed_documents.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "fsdp/base/error.h"
#include "fsdp/data/batches.h"
#include "support/temp_dir.h"
#include "support/token_files.h"

namespace fsdp::packed_documents_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr int64_t kEnd = 9;

class PackedDocumentsTest : public ::testing::Test {
 protected:
  // Documents of these lengths, ends included: document i has tokens 10 + i. Texts are learnt
  // whole; rows but for their first token.
  std::shared_ptr<const Corpus> corpus(const std::vector<int64_t>& lengths, int64_t num_rows = 0) {
    TokenHeader header = testing::counting_header();
    header.end_of_document = kEnd;
    header.num_learnt = 0;
    const std::string path = directory_ / "tokens.bin";
    TokenFileWriter writer(path, header);
    writer.count_documents(static_cast<int64_t>(lengths.size()));
    for (size_t i = 0; i < lengths.size(); ++i) {
      std::vector<int64_t> tokens(static_cast<size_t>(lengths[i]), 10 + static_cast<int64_t>(i));
      tokens.back() = kEnd;
      const auto number = static_cast<int64_t>(i);
      writer.write(std::span(tokens).first(1), number < num_rows ? Learnt::kNo : Learnt::kYes);
      writer.write(std::span(tokens).subspan(1), Learnt::kYes);
    }
    writer.commit();
    return testing::open_corpus({path});
  }

  testing::TempDir directory_;
};

TEST_F(PackedDocumentsTest, EveryDocumentIsWholeInOneWindow) {
  std::mt19937 draw(3);
  std::vector<int64_t> lengths(500);
  int64_t total = 0;
  for (int64_t& each : lengths) total += each = 1 + static_cast<int64_t>(draw() % 64);
  const TokenWindows windows = all_windows(corpus(lengths), 64, WindowContent::kDocuments);
  std::map<int64_t, int64_t> found;  // tokens of a document
  std::vector<int64_t> tokens(65);
  std::vector<uint8_t> learnt(65);
  for (int64_t i = 0; i < windows.num_windows(); ++i) {
    windows.read(i, tokens, learnt);
    EXPECT_EQ(learnt.back(), 0);
    std::map<int64_t, int64_t> here;
    for (size_t at = 0; at < tokens.size(); ++at)
      if (learnt[at] != 0 && tokens[at] != kEnd) ++here[tokens[at]];
    for (const auto& [document, count] : here) EXPECT_TRUE(found.emplace(document, count).second);
  }
  for (const auto& [document, count] : found)
    EXPECT_EQ(count, lengths[static_cast<size_t>(document - 10)] - 1);
  // Little room is left over.
  EXPECT_LT(windows.num_windows() * 64, total * 11 / 10);
}

TEST_F(PackedDocumentsTest, LongRowsAreCutAndPaddingIsOneDocument) {
  const auto rows = corpus({3, 7, 2}, 3);
  EXPECT_EQ(cut_rows_text(*rows, 4),
            "1 row is longer than --sequence 4 and cut; the longest has 7 tokens");
  EXPECT_EQ(cut_rows_text(*rows, 7), "");
  EXPECT_EQ(cut_rows_text(*corpus({3, 7, 2}), 4), "") << "texts are not cut short";
  const TokenWindows windows = all_windows(corpus({3, 7, 2}, 3), 4, WindowContent::kDocuments);
  EXPECT_EQ(windows.num_windows(), 3);
  const ValidationBatches batches(windows, {.batch = 3, .documents = WindowDocuments::kPacked});
  const TokenBatch batch = batches.read(0);
  int64_t num_cut = 0;
  for (int64_t row = 0; row < 3; ++row) {
    const auto* const first = batch.tokens.data() + row * 5;
    if (first[0] != 11) continue;
    ++num_cut;
    EXPECT_THAT(std::vector<int64_t>(first, first + 5), ElementsAre(11, 11, 11, 11, 0));
  }
  EXPECT_EQ(num_cut, 1);
  // 10 10 9 0, 11 11 11 11 and 12 9 0 0: the padding begins one document in each.
  EXPECT_EQ(batch.document_starts.size(), 5u);
  EXPECT_EQ(batch.num_targets, 2 + 3 + 1);
}

// Beside rows, too: a book among chats is learnt whole.
TEST_F(PackedDocumentsTest, EveryTokenOfALongTextIsPredictedOnce) {
  for (int64_t length = 2; length < 20; ++length) {
    const TokenWindows windows =
        all_windows(corpus({3, length, 2}, 1), 4, WindowContent::kDocuments);
    const ValidationBatches batches(
        windows, {.batch = windows.num_windows(), .documents = WindowDocuments::kPacked});
    const TokenBatch batch = batches.read(0);
    EXPECT_EQ(std::count(batch.targets.begin(), batch.targets.end(), 11), length - 2) << length;
    EXPECT_EQ(std::count(batch.targets.begin(), batch.targets.end(), kEnd), 3) << length;
    EXPECT_LE(windows.num_windows(), 2 + (length + 3) / 4) << length;
  }
}

TEST_F(PackedDocumentsTest, ValidationHasTheEndOfALongText) {
  const auto all = corpus({4, 100}, 1);
  const DataSplit split = split_corpus(
      all, {.sequence = 4, .validation_fraction = 0.1, .content = WindowContent::kDocuments});
  EXPECT_EQ(split.validation.num_windows(), 3) << "11 tokens";
  EXPECT_EQ(split.training.num_windows(), 1 + 22) << "a row, and 89 tokens";
}

TEST_F(PackedDocumentsTest, ValidationHasTheLastDocuments) {
  const auto all = corpus({4, 4, 4, 4, 4, 4, 4, 4, 4, 4});
  const DataSplit split = split_corpus(
      all, {.sequence = 4, .validation_fraction = 0.15, .content = WindowContent::kDocuments});
  EXPECT_EQ(split.training.num_windows(), 8);
  EXPECT_EQ(split.validation.num_windows(), 2);
  for (int64_t i = 0; i < 2; ++i) EXPECT_GE(split.validation.first_token(i), 32);
  EXPECT_THAT([&] { split_corpus(corpus({4}), {.content = WindowContent::kDocuments}); },
              ThrowsMessage<UsageError>(HasSubstr("1 document")));
}

TEST_F(PackedDocumentsTest, WithoutEndsNothingCanBePacked) {
  const std::string path = directory_ / "plain.bin";
  testing::write_counting_tokens(path, 100);
  EXPECT_THAT([&] { all_windows(testing::open_corpus({path}), 8, WindowContent::kDocuments); },
              ThrowsMessage<UsageError>(HasSubstr("no token ends them")));
}

}  // namespace
}  // namespace fsdp::packed_documents_test
