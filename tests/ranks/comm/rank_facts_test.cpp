// Ranks with different facts find out when they meet.
#include "fsdp/comm/rank_facts.h"

#include <gtest/gtest.h>

#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "support/run_ranks.h"

namespace fsdp::rank_facts_test {
namespace {

using testing::run_ranks;

RankFacts facts_of(const std::string& rate, const std::string& steps) {
  return {{"--lr", rate}, {"--note", ""}, {"--steps", steps}};
}

// The words of every rank, which must be the same.
std::set<std::string> words_of(int ranks, const std::function<RankFacts(int)>& facts) {
  std::mutex mutex;
  std::set<std::string> words;
  run_ranks(ranks, [&](World& world) {
    const std::string mine = difference_of(world.communicator(), facts(world.rank()));
    const std::lock_guard lock(mutex);
    words.insert(mine);
  });
  return words;
}

TEST(RankFacts, SayNothingWhereAllAgree) {
  for (const int ranks : {1, 2, 5})
    EXPECT_EQ(words_of(ranks, [](int) { return facts_of("0.1", "20"); }),
              std::set<std::string>{""});
}

TEST(RankFacts, ShowTheFirstOneThatDiffersToEveryRank) {
  EXPECT_EQ(words_of(4, [](int rank) { return facts_of("0.1", rank == 2 ? "3000" : "20"); }),
            std::set<std::string>{"rank 2 has --steps '3000' and rank 0 has '20'"});
  // Values that are equal only when put together count as different.
  EXPECT_EQ(
      words_of(2, [](int rank) { return rank == 0 ? facts_of("1", "23") : facts_of("12", "3"); }),
      std::set<std::string>{"rank 1 has --lr '12' and rank 0 has '1'"});
}

TEST(RankFacts, CannotDifferInASimulatedWorld) {
  World world = World::simulated(3, 8, std::make_shared<Recording>());
  EXPECT_EQ(difference_of(world.communicator(), facts_of("0.1", "20")), "");
}

TEST(TextsOfRanks, AreOnEveryRankInRankOrder) {
  for (const int ranks : {1, 2, 5})
    run_ranks(ranks, [ranks](World& world) {
      // Texts have different lengths, and the first one is empty.
      const auto text_of = [](int rank) {
        return std::string(static_cast<size_t>(7 * rank), static_cast<char>('a' + rank));
      };
      std::vector<std::string> expected;
      for (int rank = 0; rank < ranks; ++rank) expected.push_back(text_of(rank));
      EXPECT_EQ(texts_of_ranks(world.communicator(), text_of(world.rank())), expected);
    });
}

}  // namespace
}  // namespace fsdp::rank_facts_test
