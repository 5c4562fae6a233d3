// Separate documents of windows: where they begin, and that none predicts the next one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "fsdp/base/error.h"
#include "fsdp/data/batch_loader.h"
#include "fsdp/data/batches.h"
#include "support/temp_dir.h"
#include "support/token_files.h"

namespace fsdp::testing::documents_in_windows_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

constexpr int64_t kEnd = 99;

class DocumentsInWindows : public ::testing::Test {
 protected:
  TokenWindows windows(const std::vector<int64_t>& tokens, int64_t sequence,
                       std::optional<int64_t> end_of_document = kEnd) const {
    TokenHeader header = counting_header();
    header.end_of_document = end_of_document;
    write_tokens(directory_ / "tokens.bin", tokens, header);
    return all_windows(open_corpus({directory_ / "tokens.bin"}), sequence);
  }

  TempDir directory_{TempDir::On::kMemory};
};

// A window that begins inside a document begins one for the model; one that ends with the end of a
// document begins none, since that token is no input.
TEST_F(DocumentsInWindows, BeginWithRowsAndAfterEachEnd) {
  const TokenWindows two = windows({1, 2, kEnd, 3, kEnd, 4, 5, kEnd, 6}, 4);
  const ValidationOptions options{.batch = 2, .documents = WindowDocuments::kSeparate};
  const TokenBatch batch = ValidationBatches(two, options).read(0);
  ASSERT_THAT(batch.tokens, ElementsAre(1, 2, kEnd, 3, kEnd, kEnd, 4, 5, kEnd, 6));
  EXPECT_THAT(batch.targets, ElementsAre(2, kEnd, kNotLearnt, kEnd,  //
                                         kNotLearnt, 5, kEnd, kNotLearnt));
  EXPECT_THAT(batch.document_starts, ElementsAre(0, 3, 4, 5));
  EXPECT_EQ(batch.num_targets, 5);
}

TEST_F(DocumentsInWindows, AreJoinedUnlessAskedFor) {
  const TokenWindows two = windows({1, 2, kEnd, 3, kEnd, 4, 5, kEnd, 6}, 4);
  const TokenBatch batch = ValidationBatches(two, {.batch = 2}).read(0);
  EXPECT_THAT(batch.targets, ElementsAre(2, kEnd, 3, kEnd, 4, 5, kEnd, 6));
  EXPECT_THAT(batch.document_starts, IsEmpty());
  EXPECT_EQ(batch.num_targets, 8);
}

TEST_F(DocumentsInWindows, ChangeNoTokenAndNoOrder) {
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < 300; ++i) tokens.push_back(i % 7 == 3 ? kEnd : i);
  const TokenWindows many = windows(tokens, 5);
  const BatchOptions joined{.batch = 6, .microbatches = 2, .seed = 4};
  BatchOptions separate = joined;
  separate.documents = WindowDocuments::kSeparate;
  BatchLoader loader({many, separate}, first_position(many, 4));
  EXPECT_TRUE(loader.has_unlike_targets());
  for (int64_t step = 0; step < 12; ++step)
    for (int64_t m = 0; m < 2; ++m) {
      const TokenBatch batch = loader.next();
      EXPECT_EQ(batch.tokens, TrainingBatches(many, joined).read(step * 6, m).tokens);
      EXPECT_EQ(batch.num_targets,
                15 - std::count(batch.targets.begin(), batch.targets.end(), kNotLearnt));
      EXPECT_GE(batch.document_starts.size(), 3u);
    }
}

TEST_F(DocumentsInWindows, NeedATokenThatEndsThem) {
  const TokenWindows none = windows({1, 2, 3, 4, 5, 6, 7, 8, 9}, 4, std::nullopt);
  const BatchOptions options{.documents = WindowDocuments::kSeparate};
  EXPECT_THAT([&] { TrainingBatches(none, options); },
              ThrowsMessage<UsageError>(HasSubstr("no token ends them in the data")));
  EXPECT_THAT([&] { ValidationBatches(none, {.documents = WindowDocuments::kSeparate}); },
              ThrowsMessage<UsageError>(HasSubstr("join them (--documents joined)")));
}

}  // namespace
}  // namespace fsdp::testing::documents_in_windows_test
