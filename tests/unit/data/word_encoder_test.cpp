// Texts are cut into words at places that leave tokens as they are.
// tests/processes/tokenizers_test.py compares these tokens with those of whole texts.
#include "fsdp/data/word_encoder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>

namespace fsdp::word_encoder_test {
namespace {

using ::testing::ElementsAre;

TEST(WordCutter, CutsBeforeSpacesAndWhereLettersAndDigitsEnd) {
  const WordCutter cutter({}, true);
  EXPECT_THAT(cutter.cut("a rank's 16 (bf16) shards.\nNext/"),
              ElementsAre("a", " rank's", " 16", " (bf", "16", ")", " shards", ".\n", "Next", "/"));
  EXPECT_THAT(cutter.cut("x =   1;\n    y"), ElementsAre("x", " =", "  ", " 1", ";\n   ", " y"));
  EXPECT_THAT(cutter.cut("\xD0\xB0\xD0\xB1 \xE6\x97\xA5 b"),
              ElementsAre("\xD0\xB0\xD0\xB1", " \xE6\x97\xA5", " b"));
  EXPECT_THAT(cutter.cut(""), ElementsAre());
}

TEST(WordCutter, DoesNotCutWhereWhiteSpaceGoesOnOrMayDo) {
  const WordCutter cutter({}, true);
  // An ideographic space is white space, and so what follows it may belong to it.
  EXPECT_THAT(cutter.cut("\xE3\x80\x80 b"), ElementsAre("\xE3\x80\x80 b"));
  EXPECT_THAT(cutter.cut("a\n/b"), ElementsAre("a", "\n/b"));
  EXPECT_THAT(cutter.cut("a  "), ElementsAre("a", "  "));
  EXPECT_THAT(WordCutter({}, false).cut("a\n\nb"), ElementsAre("a", "\n\nb"));
}

TEST(WordCutter, TheLongestWholeTokenIsAPart) {
  const WordCutter cutter({"<s>", "<|a|>", "<|a|>b"}, true);
  EXPECT_THAT(cutter.cut("x  <|a|>b<|a|> <s"), ElementsAre("x", "  ", "<|a|>b", "<|a|>", " <s"));
}

TEST(WordCutter, ThePartsAreTheText) {
  std::mt19937 draw(7);
  const std::string bytes = "ab1 \n\t.'/<|>\xD0\xB0\xE3\x80";
  const WordCutter cutter({"<|a|>", "<"}, true);
  for (int i = 0; i < 1000; ++i) {
    std::string text;
    for (size_t length = draw() % 40; text.size() < length;) text += bytes[draw() % bytes.size()];
    std::string joined;
    for (const std::string_view part : cutter.cut(text)) joined += part;
    EXPECT_EQ(joined, text);
  }
}

}  // namespace
}  // namespace fsdp::word_encoder_test
