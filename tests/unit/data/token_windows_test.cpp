// Sources with weights: their proportions in every run of windows, the same for every cut of the
// batch, each source by its own epochs.
#include "fsdp/data/token_windows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <random>
#include <set>

#include "fsdp/base/error.h"
#include "fsdp/data/batch_loader.h"
#include "support/temp_dir.h"
#include "support/token_files.h"

namespace fsdp::testing::token_windows_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

std::vector<int64_t> shares(const std::vector<double>& weights) { return source_shares(weights); }

TEST(SourceShares, AreWeightsInTenThousandths) {
  EXPECT_THAT(shares({0.7, 0.3}), ElementsAre(7000, 3000));
  EXPECT_THAT(shares({7, 3}), ElementsAre(7000, 3000));
  EXPECT_THAT(shares({0.1, 0.2, 0.7}), ElementsAre(1000, 2000, 7000));
  EXPECT_THAT(shares({1, 1, 1}), ElementsAre(3334, 3333, 3333));
  EXPECT_THAT(shares({5}), ElementsAre(10000));
  EXPECT_THAT(
      [] {
        shares({1, 0});
      },
      ThrowsMessage<UsageError>(HasSubstr("weight of the data is 0; it must be a number")));
  EXPECT_THROW(shares({1, -1}), UsageError);
  EXPECT_THROW(shares({1, std::numeric_limits<double>::infinity()}), UsageError);
  EXPECT_THAT(
      [] {
        shares({1, 0.00001});
      },
      ThrowsMessage<UsageError>(HasSubstr("less than one window in 10000; raise it")));
}

TEST(SourceMix, HasTheProportionsInEveryRunOfPlaces) {
  std::mt19937 random(17);
  for (int trial = 0; trial < 20; ++trial) {
    std::vector<double> weights(1 + random() % 8);
    for (double& weight : weights) weight = 1.0 + static_cast<double>(random() % 1000);
    const std::vector<int64_t> of = shares(weights);
    const SourceMix mix(of);
    std::vector<int64_t> taken(of.size(), 0);
    for (int64_t place = 0; place < 2 * kSourceShares + 7; ++place) {
      const SourceMix::Place drawn = mix.at(place);
      ASSERT_EQ(drawn.index, taken[static_cast<size_t>(drawn.source)]++) << place;
      for (size_t i = 0; i < of.size(); ++i) {
        if (place % 997 == 0) {
          ASSERT_EQ(mix.count(static_cast<int64_t>(i), place + 1), taken[i]);
        }
        // Times kSourceShares: from any beginning a run is off by less than one before it and one
        // at its end.
        ASSERT_LT(std::abs(taken[i] * kSourceShares - (place + 1) * of[i]), kSourceShares)
            << "trial " << trial << ", place " << place;
      }
    }
  }
}

// These numbers do not change between versions: runs are resumed by them.
TEST(SourceMix, IsTheSameEverywhere) {
  const SourceMix mix({7000, 3000});
  std::vector<int64_t> sources;
  for (int64_t place = 0; place < 12; ++place) sources.push_back(mix.at(place).source);
  EXPECT_THAT(sources, ElementsAre(0, 0, 1, 0, 0, 1, 0, 0, 0, 1, 0, 0));
}

// Tokens of the first source are 0 to 999, of the second 100,000 and more.
class WeightedSources : public ::testing::Test {
 protected:
  WeightedSources() {
    write_counting_tokens(directory_ / "a.bin", 1001);
    write_counting_tokens(directory_ / "b.bin", 205, 100'000);
  }

  TokenWindows training(double fraction = 0.0) const {
    return split_corpus(open_corpus({directory_ / "a.bin", directory_ / "b.bin"}),
                        {.sequence = 10, .validation_fraction = fraction, .by_path = true})
        .training;
  }

  TempDir directory_{TempDir::On::kMemory};
};

std::vector<int64_t> first_tokens(const TokenBatch& batch) {
  std::vector<int64_t> firsts;
  for (int64_t row = 0; row < batch.rows; ++row)
    firsts.push_back(batch.tokens[static_cast<size_t>(row * batch.columns)]);
  return firsts;
}

TEST_F(WeightedSources, AreGoneThroughByEpochsOfTheirOwn) {
  const TokenWindows windows = training();
  EXPECT_THAT(windows.range_begins(), ElementsAre(0, 100, 120));
  const TrainingBatches batches(windows, {.batch = 10, .seed = 3, .source_weights = {0.6, 0.4}});
  std::vector<std::vector<int64_t>> drawn(2);
  for (int64_t place = 0; place < 1000; place += 10) {
    int64_t of_first = 0;
    for (const int64_t first : first_tokens(batches.read(place, 0))) {
      drawn[first < 100'000 ? 0 : 1].push_back(first);
      of_first += first < 100'000 ? 1 : 0;
    }
    EXPECT_EQ(of_first, 6) << "step " << place / 10;
  }
  ASSERT_EQ(drawn[0].size(), 600u);
  for (const size_t source : {0u, 1u}) {
    const std::ptrdiff_t size = source == 0 ? 100 : 20;
    std::set<std::vector<int64_t>> orders;
    for (auto begin = drawn[source].begin(); begin < drawn[source].end(); begin += size) {
      EXPECT_EQ(std::set<int64_t>(begin, begin + size).size(), static_cast<size_t>(size));
      orders.insert(std::vector<int64_t>(begin, begin + size));
    }
    EXPECT_EQ(orders.size(), drawn[source].size() / static_cast<size_t>(size));
  }
  EXPECT_THAT(batches.epochs(1000), ElementsAre(6.0, 20.0));
}

TEST_F(WeightedSources, StayInsideTheirPathsAndShareNoTokenWithValidation) {
  const auto corpus = open_corpus({directory_ / "a.bin", directory_ / "b.bin"});
  EXPECT_THAT(corpus->path_ends(), ElementsAre(1001, 1206));
  const DataSplit split =
      split_corpus(corpus, {.sequence = 10, .validation_fraction = 0.1, .by_path = true});
  EXPECT_THAT(split.training.range_begins(), ElementsAre(0, 89, 107));
  EXPECT_THAT(split.validation.range_begins(), ElementsAre(0, 10, 12));
  std::map<int64_t, int> readers;
  std::vector<int64_t> tokens(11);
  for (const auto& [windows, reader] : {std::pair(split.training, 1), {split.validation, 2}})
    for (int64_t window = 0; window < windows.num_windows(); ++window) {
      windows.read(window, tokens);
      EXPECT_EQ(tokens.back() - tokens.front(), 10) << "a window goes over the end of a path";
      for (const int64_t token : tokens) readers[token] |= reader;
    }
  for (const auto& [token, by] : readers) EXPECT_NE(by, 3) << token;
  // A source that is too short is refused, however long the others are.
  write_counting_tokens(directory_ / "short.bin", 10);
  EXPECT_THAT(
      [&] {
        split_corpus(open_corpus({directory_ / "a.bin", directory_ / "short.bin"}),
                     {.sequence = 10, .by_path = true});
      },
      ThrowsMessage<UsageError>(HasSubstr("the data has 10 tokens where 2 windows")));
}

TEST_F(WeightedSources, GoOnWhereTheyWereAndOnlyThere) {
  const TokenWindows windows = training();
  const std::vector<double> weights = {0.25, 0.75};
  const BatchOptions options{.batch = 6, .seed = 5, .source_weights = weights};
  BatchLoader whole({windows, options}, first_position(windows, 5, weights));
  for (int64_t step = 0; step < 7; ++step) whole.next();
  const std::string saved = to_json(whole.position());
  EXPECT_THAT(saved, HasSubstr("\"version\":2"));
  EXPECT_THAT(saved, HasSubstr("\"sources\":[{\"num_windows\":100,\"share\":2500},"
                               "{\"num_windows\":20,\"share\":7500}]"));
  const DataPosition position = parse_data_position(saved, "checkpoint");
  EXPECT_EQ(position, whole.position());
  BatchLoader resumed({windows, options}, position);
  for (int64_t step = 0; step < 7; ++step) EXPECT_EQ(resumed.next().tokens, whole.next().tokens);
  EXPECT_THAT(
      [&] {
        check_same_order(position, windows, 5, std::vector<double>{0.5, 0.5});
      },
      ThrowsMessage<UsageError>(HasSubstr(
          "the mix of the data was 2500 of 100 windows, 7500 of 20 windows when the run was saved "
          "and is 5000 of 100 windows, 5000 of 20 windows now")));
  EXPECT_THAT([&] { check_same_order(position, windows, 5); },
              ThrowsMessage<UsageError>(HasSubstr("and is without weights now")));
}

}  // namespace
}  // namespace fsdp::testing::token_windows_test
