// Which windows ranks, microbatches and steps take: the same for every cut, each once per epoch.
#include "fsdp/data/batches.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>
#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/data/batch_loader.h"
#include "support/temp_dir.h"
#include "support/token_files.h"

namespace fsdp::testing::batches_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

// Token i of the corpus is i, so that a row shows which window it is.
class Batches : public ::testing::Test {
 protected:
  std::shared_ptr<const Corpus> counting(int64_t num_tokens) const {
    write_counting_tokens(directory_ / "tokens.bin", num_tokens);
    return open_corpus({directory_ / "tokens.bin"});
  }

  TempDir directory_{TempDir::On::kMemory};
};

// First tokens of all rows, which must go on one by one.
std::vector<int64_t> first_tokens(const TokenBatch& batch) {
  std::vector<int64_t> firsts;
  EXPECT_EQ(static_cast<int64_t>(batch.tokens.size()), batch.rows * batch.columns);
  for (int64_t row = 0; row < batch.rows; ++row) {
    const int64_t first = batch.tokens[static_cast<size_t>(row * batch.columns)];
    firsts.push_back(first);
    for (int64_t column = 0; column < batch.columns; ++column)
      EXPECT_EQ(batch.tokens[static_cast<size_t>(row * batch.columns + column)], first + column);
  }
  return firsts;
}

// The rows that all ranks take in one microbatch of a step, sorted.
std::vector<int64_t> union_of(const TokenWindows& windows, BatchOptions options, int64_t place,
                              int64_t microbatch) {
  std::vector<int64_t> all;
  for (options.rank = 0; options.rank < options.ranks; ++options.rank) {
    const TokenBatch batch = TrainingBatches(windows, options).read(place, microbatch);
    EXPECT_EQ(batch.rows, options.batch / (options.ranks * options.microbatches));
    const std::vector<int64_t> firsts = first_tokens(batch);
    all.insert(all.end(), firsts.begin(), firsts.end());
  }
  std::sort(all.begin(), all.end());
  return all;
}

// A microbatch has the same windows on any number of ranks, and a step on any number of
// microbatches.
TEST_F(Batches, EveryNumberOfRanksAndMicrobatchesSeesTheSameWindowsInEveryStep) {
  const TokenWindows windows = all_windows(counting(1001), 10);  // 100 windows
  for (int64_t step = 0; step < 30; ++step) {                    // more than two epochs
    std::set<std::vector<int64_t>> steps;
    for (const int64_t microbatches : {1, 2}) {
      std::vector<int64_t> all;
      for (int64_t m = 0; m < microbatches; ++m) {
        std::set<std::vector<int64_t>> parts;
        for (const int64_t ranks : {1, 2, 4})
          parts.insert(union_of(
              windows, {.batch = 8, .microbatches = microbatches, .ranks = ranks, .seed = 5},
              step * 8, m));
        ASSERT_EQ(parts.size(), 1u) << "step " << step;
        all.insert(all.end(), parts.begin()->begin(), parts.begin()->end());
      }
      std::sort(all.begin(), all.end());
      EXPECT_EQ(all.size(), 8u);
      steps.insert(all);
    }
    EXPECT_EQ(steps.size(), 1u) << "step " << step;
  }
}

TEST_F(Batches, AnEpochHasEveryWindowOnceAndTheNextOneInAnotherOrder) {
  const TokenWindows windows = all_windows(counting(372), 7);  // 53 windows; a prime
  const TrainingBatches batches(windows, {.batch = 6, .seed = 3});
  std::vector<std::vector<int64_t>> epochs;
  std::vector<int64_t> order;
  // 53 is no multiple of 6: epochs end inside batches.
  for (int64_t place = 0; place < 3 * 6 * 53; place += 6)
    for (const int64_t first : first_tokens(batches.read(place, 0))) order.push_back(first / 7);
  for (size_t begin = 0; begin < order.size(); begin += 53) {
    const std::vector<int64_t> epoch(order.begin() + static_cast<std::ptrdiff_t>(begin),
                                     order.begin() + static_cast<std::ptrdiff_t>(begin + 53));
    EXPECT_EQ(std::set<int64_t>(epoch.begin(), epoch.end()).size(), 53u);
    epochs.push_back(epoch);
  }
  EXPECT_EQ(std::set<std::vector<int64_t>>(epochs.begin(), epochs.end()).size(), epochs.size());
}

TEST_F(Batches, ABatchMayBeLargerThanTheData) {
  const TokenWindows windows = all_windows(counting(31), 10);
  std::map<int64_t, int> count;
  for (const int64_t first : first_tokens(TrainingBatches(windows, {.batch = 12}).read(0, 0)))
    ++count[first];
  EXPECT_EQ(count, (std::map<int64_t, int>{{0, 4}, {10, 4}, {20, 4}}));
}

// Every token but the first is predicted once, by training or by validation, none by both; and none
// is even read by both.
TEST_F(Batches, TrainingAndValidationShareNoToken) {
  for (const int64_t num_tokens : {22, 23, 100, 101, 109, 110, 111, 1000, 12345})
    for (const double fraction : {0.0, 0.001, 0.01, 0.1, 0.5}) {
      const DataSplit split =
          split_corpus(counting(num_tokens), {.sequence = 10, .validation_fraction = fraction});
      std::map<int64_t, int> readers;
      const auto read_all = [&](const TokenWindows& windows, int reader) {
        std::vector<int64_t> tokens(11);
        for (int64_t window = 0; window < windows.num_windows(); ++window) {
          windows.read(window, tokens);
          EXPECT_EQ(tokens.front(), windows.first_token(window));
          for (const int64_t token : tokens) readers[token] |= reader;
        }
      };
      read_all(split.training, 1);
      read_all(split.validation, 2);
      for (const auto& [token, by] : readers) EXPECT_NE(by, 3) << token << " of " << num_tokens;
      EXPECT_GE(split.training.num_windows(), 1);
      const auto all_windows_count = (num_tokens - 1) / 10;
      EXPECT_EQ(split.validation.num_windows(),
                fraction == 0
                    ? 0
                    : std::max<int64_t>(1, static_cast<int64_t>(
                                               fraction * static_cast<double>(all_windows_count))));
      // At most the tokens of one window are lost to the cut.
      EXPECT_GE(split.training.num_windows() + split.validation.num_windows(),
                all_windows_count - 1);
    }
}

TEST_F(Batches, ValidationIsInOrderAndTheSameForAnyNumberOfRanks) {
  const TokenWindows windows = all_windows(counting(271), 10);  // 27 windows, 3 batches of 8
  for (const int64_t ranks : {1, 2, 4, 8}) {
    std::vector<int64_t> all;
    for (int64_t index = 0; index < 3; ++index)
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const ValidationBatches batches(windows, {.batch = 8, .ranks = ranks, .rank = rank});
        EXPECT_EQ(batches.num_batches(), 3);
        for (const int64_t first : first_tokens(batches.read(index))) all.push_back(first / 10);
      }
    std::vector<int64_t> expected(24);
    std::iota(expected.begin(), expected.end(), 0);
    EXPECT_EQ(all, expected) << ranks;
  }
  EXPECT_EQ(ValidationBatches(windows, {.batch = 8, .max_batches = 2}).num_batches(), 2);
}

TEST_F(Batches, ValidationOfFewWindowsRepeatsThem) {
  const TokenWindows windows = all_windows(counting(31), 10);
  const ValidationBatches batches(windows, {.batch = 4});
  ASSERT_EQ(batches.num_batches(), 1);
  EXPECT_EQ(first_tokens(batches.read(0)), (std::vector<int64_t>{0, 10, 20, 0}));
  const DataSplit none = split_corpus(counting(31), {.sequence = 10, .validation_fraction = 0});
  EXPECT_EQ(ValidationBatches(none.validation, {}).num_batches(), 0);
}

TEST_F(Batches, ThatCannotBeDividedAreAnsweredWithTheNearest) {
  const TokenWindows windows = all_windows(counting(31), 10);
  const auto message = [&](const BatchOptions& options, const std::string& text) {
    EXPECT_THAT([&] { TrainingBatches(windows, options); },
                ThrowsMessage<UsageError>(HasSubstr(text)));
  };
  message({.batch = 10, .microbatches = 2, .ranks = 2},
          "batch is 10; it must be a multiple of 4 (2 ranks x 2 microbatches), e.g. 8 or 12");
  message({.batch = 3, .ranks = 4}, "multiple of 4 (4 ranks x 1 microbatch), e.g. 4");
  message({.batch = 0}, "batch is 0; it must be at least 1");
  message({.microbatches = -1}, "microbatches is -1");
  message({.ranks = 0}, "ranks is 0");
  EXPECT_THAT([&] { ValidationBatches(windows, {.batch = 3, .ranks = 2}); },
              ThrowsMessage<UsageError>(HasSubstr("validation batch is 3; it must be a multiple of "
                                                  "the 2 ranks, e.g. 2 or 4")));
}

TEST_F(Batches, DataThatIsTooShortIsRefused) {
  const auto refusal = [&](int64_t num_tokens, const SplitOptions& options) {
    std::string text;
    try {
      split_corpus(counting(num_tokens), options);
    } catch (const UsageError& error) {
      text = error.what();
    }
    return text;
  };
  EXPECT_EQ(refusal(21, {.sequence = 10}),
            "the data has 21 tokens where 2 windows of sequence 10 need 22; give more data or a "
            "shorter sequence");
  EXPECT_EQ(refusal(22, {.sequence = 10}), "");
  EXPECT_THAT(refusal(10, {.sequence = 10, .validation_fraction = 0}), HasSubstr("1 window"));
  EXPECT_EQ(refusal(11, {.sequence = 10, .validation_fraction = 0}), "");
  EXPECT_THAT(refusal(0, {.sequence = 10}), HasSubstr("the data has 0 tokens"));
  EXPECT_THAT(refusal(100, {.sequence = 0}), HasSubstr("sequence is 0; it must be from 1"));
  EXPECT_THAT(refusal(100, {.sequence = 10, .validation_fraction = 1}),
              HasSubstr("validation_fraction is 1; it must be at least 0 and below 1"));
  EXPECT_THAT(refusal(100, {.sequence = 10, .validation_fraction = -0.1}), HasSubstr("-0.1"));
  EXPECT_THAT([&] { all_windows(counting(10), 10); },
              ThrowsMessage<UsageError>(HasSubstr("1 window of sequence 10 need 11")));
}

TEST_F(Batches, ThatNoMemoryHoldsSayHowMuchTheyNeed) {
  const TokenWindows windows = all_windows(counting(101), 9);
  // More than any machine addresses, and more than a vector counts.
  for (const int64_t batch : {int64_t{1} << 50, int64_t{1} << 60})
    EXPECT_THAT(
        [&] { TrainingBatches(windows, {.batch = batch}).read(0, 0); },
        ThrowsMessage<Error>(AllOf(HasSubstr("cannot allocate "), HasSubstr("iB for 1,1"),
                                   HasSubstr(" sequences of 10 tokens; use a smaller batch"))));
}

// --- permutation ---------------------------------------------------------------------------------

// The shuffled order: every number once, and no order better than another.

std::vector<int64_t> order_of(const Permutation& permutation) {
  std::vector<int64_t> order;
  for (int64_t i = 0; i < permutation.size(); ++i) order.push_back(permutation(i));
  return order;
}

void expect_bijection(int64_t size, uint64_t seed, uint64_t round) {
  std::vector<bool> seen(static_cast<size_t>(size));
  for (const int64_t value : order_of(Permutation(size, seed, round))) {
    ASSERT_GE(value, 0);
    ASSERT_LT(value, size);
    ASSERT_FALSE(seen[static_cast<size_t>(value)]) << value << " twice, size " << size;
    seen[static_cast<size_t>(value)] = true;
  }
}

TEST(Permutation, HasEveryNumberOnceForEverySize) {
  for (int64_t size = 1; size <= 300; ++size) expect_bijection(size, 1, 0);
  for (const int64_t size : {1021, 1024, 1025, 65535, 65536, 65537})
    for (uint64_t round = 0; round < 3; ++round) expect_bijection(size, 7, round);
}

TEST(Permutation, WorksForSizesBeyondMemory) {
  for (const int64_t size : {(int64_t{1} << 40) + 1, int64_t{1} << 62, INT64_MAX}) {
    const Permutation permutation(size, 1, 2);
    std::set<int64_t> values;
    for (int64_t i = 0; i < 1000; ++i) {
      values.insert(permutation(size - 1 - i));
      values.insert(permutation(i));
    }
    EXPECT_EQ(values.size(), 2000u);
    EXPECT_LT(*values.rbegin(), size);
    EXPECT_GE(*values.begin(), 0);
    EXPECT_GT(*values.rbegin(), size / 2);  // they are spread
  }
}

TEST(Permutation, SeedsAndRoundsAreOtherOrders) {
  std::set<std::vector<int64_t>> orders;
  for (uint64_t seed = 0; seed < 10; ++seed)
    for (uint64_t round = 0; round < 10; ++round)
      orders.insert(order_of(Permutation(50, seed, round)));
  EXPECT_EQ(orders.size(), 100u);
}

// Runs that were saved by an earlier version are resumed by it: these numbers never change.
TEST(Permutation, IsTheSameInEveryVersion) {
  EXPECT_EQ(order_of(Permutation(10, 0, 0)), (std::vector<int64_t>{3, 6, 9, 1, 2, 4, 5, 0, 7, 8}));
  EXPECT_EQ(Permutation(int64_t{1} << 40, 42, 3)(123456789), 589056550078);
}

// Each number goes to each place equally often. For random permutations of 5 the sum below is 5/4
// of a chi-square of 16 degrees of freedom: above 51 once in 1700 tries. Seeds are fixed.
TEST(Permutation, PutsEveryNumberEverywhere) {
  constexpr int64_t kSize = 5;
  constexpr int kTries = 20000;
  std::vector<int> count(kSize * kSize);
  for (int seed = 0; seed < kTries; ++seed) {
    const Permutation permutation(kSize, static_cast<uint64_t>(seed), 0);
    for (int64_t i = 0; i < kSize; ++i) ++count[static_cast<size_t>(i * kSize + permutation(i))];
  }
  const double expected = static_cast<double>(kTries) / kSize;
  double sum = 0;
  for (const int each : count) sum += std::pow(each - expected, 2) / expected;
  EXPECT_LT(sum, 51);
}

// --- documents in windows ------------------------------------------------------------------------

// Separate documents of windows: where they begin, and that none predicts the next one.

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
}  // namespace fsdp::testing::batches_test
