// Which windows ranks, microbatches and steps take: the same for every cut, each once per epoch.
#include "fsdp/data/batches.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "fsdp/base/error.h"
#include "support/temp_dir.h"
#include "support/token_files.h"

namespace fsdp::testing::batches_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
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

// What all ranks take in one microbatch of a step, sorted.
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

TEST_F(Batches, EveryNumberOfRanksAndMicrobatchesSeesTheSameWindowsInEveryStep) {
  const TokenWindows windows = all_windows(counting(1001), 10);  // 100 windows
  for (int64_t step = 0; step < 30; ++step) {                    // more than two epochs
    std::set<std::vector<int64_t>> seen;
    for (const int64_t ranks : {1, 2, 4})
      for (const int64_t microbatches : {1, 2}) {
        std::vector<int64_t> all;
        for (int64_t m = 0; m < microbatches; ++m) {
          const auto part = union_of(
              windows, {.batch = 8, .microbatches = microbatches, .ranks = ranks, .seed = 5},
              step * 8, m);
          all.insert(all.end(), part.begin(), part.end());
        }
        std::sort(all.begin(), all.end());
        EXPECT_EQ(all.size(), 8u);
        seen.insert(all);
      }
    EXPECT_EQ(seen.size(), 1u) << "step " << step;
  }
}

TEST_F(Batches, AMicrobatchHasTheSameWindowsOnAnyNumberOfRanks) {
  const TokenWindows windows = all_windows(counting(1001), 10);
  for (int64_t m = 0; m < 2; ++m) {
    const auto alone = union_of(windows, {.batch = 8, .microbatches = 2, .seed = 5}, 16, m);
    for (const int64_t ranks : {2, 4})
      EXPECT_EQ(
          union_of(windows, {.batch = 8, .microbatches = 2, .ranks = ranks, .seed = 5}, 16, m),
          alone);
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

TEST_F(Batches, AnotherSeedIsAnotherOrder) {
  const TokenWindows windows = all_windows(counting(1001), 10);
  const auto rows_with = [&](uint64_t seed) {
    return first_tokens(TrainingBatches(windows, {.batch = 100, .seed = seed}).read(0, 0));
  };
  EXPECT_EQ(rows_with(1), rows_with(1));
  EXPECT_NE(rows_with(1), rows_with(2));
  std::vector<int64_t> in_order(100);
  for (size_t i = 0; i < 100; ++i) in_order[i] = static_cast<int64_t>(10 * i);
  EXPECT_NE(rows_with(0), in_order);
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

TEST(BatchOptions, ABatchThatCannotBeDividedIsAnsweredWithTheNearest) {
  const auto message = [](const BatchOptions& options, const std::string& text) {
    EXPECT_THAT([&] { check_batch(options); }, ThrowsMessage<UsageError>(HasSubstr(text)));
  };
  message({.batch = 10, .microbatches = 2, .ranks = 2},
          "batch is 10; it must be a multiple of 4 (2 ranks x 2 microbatches), e.g. 8 or 12");
  message({.batch = 3, .ranks = 4}, "multiple of 4 (4 ranks x 1 microbatch), e.g. 4");
  message({.batch = 0}, "batch is 0; it must be at least 1");
  message({.microbatches = -1}, "microbatches is -1");
  message({.ranks = 0}, "ranks is 0");
  EXPECT_NO_THROW(check_batch({.batch = 12, .microbatches = 3, .ranks = 2}));
}

TEST_F(Batches, ValidationBatchesThatCannotBeDividedAreAnsweredWithTheNearest) {
  const TokenWindows windows = all_windows(counting(31), 10);
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

}  // namespace
}  // namespace fsdp::testing::batches_test
