// Base64: the published examples, every value back, and one text for each.
#include "fsdp/checkpoint/format/manifest_text.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <string>

namespace fsdp::base64_test {
namespace {

// RFC 4648, section 10.
TEST(Base64, WritesThePublishedExamples) {
  const std::pair<const char*, const char*> examples[] = {{"", ""},
                                                          {"f", "Zg=="},
                                                          {"fo", "Zm8="},
                                                          {"foo", "Zm9v"},
                                                          {"foob", "Zm9vYg=="},
                                                          {"fooba", "Zm9vYmE="},
                                                          {"foobar", "Zm9vYmFy"}};
  for (const auto& [bytes, text] : examples) {
    EXPECT_EQ(base64(bytes), text);
    EXPECT_EQ(from_base64(text), bytes);
  }
}

TEST(Base64, ReadsBackWhatItWrites) {
  std::mt19937_64 random(64);
  for (size_t length = 0; length < 300; ++length) {
    std::string bytes(length, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    EXPECT_EQ(from_base64(base64(bytes)), bytes);
  }
}

TEST(Base64, RefusesWhatItDoesNotWrite) {
  for (const std::string text : {"A", "AA", "AAA", "AAAAA", "====", "A===", "AA=A", "A=A=", "=AAA",
                                 "AA==AAAA", "AAA=AAAA", "AA\nA", "AA A", "AA-A", "AA_A",
                                 "\xC3\xA9"
                                 "AA",
                                 "AAAA\n"})
    EXPECT_EQ(from_base64(text), std::nullopt) << text;
  EXPECT_EQ(from_base64(std::string("AA\0A", 4)), std::nullopt);
  // Bits that belong to no byte.
  EXPECT_EQ(from_base64("Zh=="), std::nullopt);
  EXPECT_EQ(from_base64("Zm9="), std::nullopt);
}

// So a record that is read and written again is the same text.
TEST(Base64, HasOneTextForEachValue) {
  const std::string digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=";
  std::set<std::string> values;
  int num_texts = 0;
  for (const char a : digits)
    for (const char b : digits)
      for (const char c : digits) {
        const auto value = from_base64(std::string{a, b, c, '='});
        if (!value) continue;
        ++num_texts;
        EXPECT_EQ(base64(*value), (std::string{a, b, c, '='}));
        values.insert(*value);
      }
  EXPECT_EQ(num_texts, 256 * 256 + 256);  // two bytes, or one
  EXPECT_EQ(values.size(), static_cast<size_t>(num_texts));
}

}  // namespace
}  // namespace fsdp::base64_test
