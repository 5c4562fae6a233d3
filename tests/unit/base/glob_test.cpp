// base/glob.h: which names a pattern is for.
#include "fsdp/base/glob.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace fsdp::glob_test {
namespace {

TEST(Glob, DescribesTheWholeName) {
  EXPECT_TRUE(matches_glob("embed.weight", "embed.weight"));
  EXPECT_FALSE(matches_glob("embed", "embed.weight"));
  EXPECT_FALSE(matches_glob("weight", "embed.weight"));
  EXPECT_TRUE(matches_glob("", ""));
  EXPECT_FALSE(matches_glob("", "a"));
}

TEST(Glob, StarIsAnyTextAndQuestionMarkOneCharacter) {
  EXPECT_TRUE(matches_glob("*", ""));
  EXPECT_TRUE(matches_glob("*.bias", "layers.0.attn.bias"));
  EXPECT_FALSE(matches_glob("*.bias", "bias"));
  EXPECT_FALSE(matches_glob("*.bias", "layers.0.bias.scale"));
  EXPECT_TRUE(matches_glob("layers.?.norm*", "layers.3.norm2.weight"));
  EXPECT_FALSE(matches_glob("layers.?.norm*", "layers.13.norm2.weight"));
  EXPECT_TRUE(matches_glob("*norm*weight", "a.norm.norm.weight.weight"));
  EXPECT_TRUE(matches_glob("a**b?", "axyzbc"));
  EXPECT_TRUE(matches_glob("*ab*ab", "abaab")) << "a star may have to take more than at first";
  EXPECT_FALSE(matches_glob("?", ""));
}

TEST(Glob, OtherCharactersStandForThemselves) {
  EXPECT_TRUE(matches_glob("[a].b", "[a].b"));
  EXPECT_FALSE(matches_glob("[a].b", "a.b"));
  EXPECT_FALSE(matches_glob("a.b", "axb"));
}

TEST(Glob, IsAtDistanceZeroExactlyFromWhatItDescribes) {
  std::mt19937 random(3);
  const auto word = [&](const char* letters, size_t num_letters) {
    std::string text(random() % 8, ' ');
    for (char& c : text) c = letters[random() % num_letters];
    return text;
  };
  int num_matches = 0;
  for (int i = 0; i < 50000; ++i) {
    const std::string pattern = word("ab*?", 4);
    const std::string text = word("ab", 2);
    const bool matches = matches_glob(pattern, text);
    EXPECT_EQ(matches, distance_to_glob(pattern, text) == 0) << pattern << " " << text;
    num_matches += matches ? 1 : 0;
  }
  EXPECT_GT(num_matches, 5000);
}

TEST(Glob, CountsWhatMustBeChanged) {
  EXPECT_EQ(distance_to_glob("*.bais", "layers.0.bias"), 2);
  EXPECT_EQ(distance_to_glob("*.weigth", "embed.weight"), 2);
  EXPECT_EQ(distance_to_glob("abc", ""), 3);
  EXPECT_EQ(distance_to_glob("", "abc"), 3);
}

TEST(Glob, FindsTheNearestName) {
  const std::vector<std::string> names = {"embed.weight", "layers.0.norm.weight", "head.bias"};
  EXPECT_EQ(nearest_to_glob("*.bais", names), "head.bias");
  EXPECT_EQ(nearest_to_glob("layers.*.nrom.weight", names), "layers.0.norm.weight");
  EXPECT_EQ(nearest_to_glob("something.else.entirely", names), "");
}

}  // namespace
}  // namespace fsdp::glob_test
