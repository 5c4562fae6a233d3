// base/: words, numbers, dtypes and environment variables.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "fsdp/base/check.h"
#include "fsdp/base/dtype.h"
#include "fsdp/base/env.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/text.h"

namespace fsdp::base_test {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(Text, CountsBytesInPowersOfTwo) {
  EXPECT_EQ(bytes_text(0), "0 B");
  EXPECT_EQ(bytes_text(512), "512 B");
  EXPECT_EQ(bytes_text(9999), "9999 B");
  EXPECT_EQ(bytes_text(218.1e6), "208.0 MiB");
  EXPECT_EQ(bytes_text(8030261248.0 * 4 / 8), "3829 MiB");
  EXPECT_EQ(bytes_text(19.6e9), "18.3 GiB");
}

TEST(Text, CountsThingsInGroupsOfThousands) {
  EXPECT_EQ(grouped_text(0), "0");
  EXPECT_EQ(grouped_text(-1000), "-1,000");
  EXPECT_EQ(grouped_text(8030261248), "8,030,261,248");
  EXPECT_EQ(counted_text(1, "tensor"), "1 tensor");
  EXPECT_EQ(counted_text(2048, "tensor"), "2,048 tensors");
}

TEST(Text, ShowsTextOfOthersShortAndWithoutControlCharacters) {
  EXPECT_EQ(shown(""), "");
  EXPECT_EQ(shown("model.norm.weight"), "model.norm.weight");
  EXPECT_EQ(shown(std::string(120, 'a')), std::string(120, 'a'));
  EXPECT_EQ(shown(std::string(5000, 'a')), std::string(120, 'a') + "...");
  EXPECT_EQ(shown(std::string_view("\x1b[2J\n\0\x7f!", 8)), "\\x1b[2J\\x0a\\x00\\x7f!");
  // U+009B does what ESC [ does; bytes that are no UTF-8 may.
  EXPECT_EQ(shown("\xc2\x9b!\x9b!"), "\\xc2\\x9b!\\x9b!");
  // Neither an escape nor a letter of several bytes is cut.
  EXPECT_EQ(shown(std::string(118, 'a') + "\n"), std::string(118, 'a') + "...");
  EXPECT_EQ(shown(std::string(119, 'a') + "\xc3\xa4"), std::string(119, 'a') + "...");
  EXPECT_EQ(shown(std::string(118, 'a') + "\xc3\xa4"), std::string(118, 'a') + "\xc3\xa4");
}

TEST(Text, IsCleanedOfWhatIsNoTextOrControlsATerminal) {
  EXPECT_EQ(clean_utf8("a\tb\n\xc3\xa9\xf0\x9f\x99\x82"), "a\tb\n\xc3\xa9\xf0\x9f\x99\x82");
  const std::string mark = "\xef\xbf\xbd";
  EXPECT_EQ(clean_utf8("\x1b[2J"), mark + "[2J");
  EXPECT_EQ(clean_utf8("\xc3"), mark);                        // cut short
  EXPECT_EQ(clean_utf8("\xc0\xaf"), mark + mark);             // '/' in two bytes
  EXPECT_EQ(clean_utf8("\xed\xa0\x80"), mark + mark + mark);  // half of a pair
  EXPECT_EQ(clean_utf8("\xc2\x9b"), mark);                    // a control character of two bytes
  EXPECT_EQ(clean_utf8("\xf4\x90\x80\x80").size(), 4 * mark.size());
}

TEST(Text, SuggestsTheNearestNameOnlyWhenItIsNear) {
  const std::vector<std::string> names = {"llama3-8b", "llama3-70b", "mixtral-8x7b"};
  EXPECT_EQ(nearest("llama3-8", names), "llama3-8b");
  EXPECT_EQ(nearest("lama3-70b", names), "llama3-70b");
  EXPECT_EQ(nearest("gpt", names), "");
  EXPECT_EQ(nearest("fp8", std::vector<std::string>{"fp64", "fp16", "fp8_e4m3"}), "fp8_e4m3");
}

TEST(Glob, StandsForWholeNames) {
  const struct {
    const char* pattern;
    const char* name;
    bool matches;
  } cases[] = {{"embed.weight", "embed.weight", true},
               {"embed", "embed.weight", false},
               {"weight", "embed.weight", false},
               {"", "", true},
               {"", "a", false},
               {"*", "", true},
               {"*.bias", "layers.0.attn.bias", true},
               {"*.bias", "bias", false},
               {"*.bias", "layers.0.bias.scale", false},
               {"layers.?.norm*", "layers.3.norm2.weight", true},
               {"layers.?.norm*", "layers.13.norm2.weight", false},
               {"*norm*weight", "a.norm.norm.weight.weight", true},
               {"a**b?", "axyzbc", true},
               {"*ab*ab", "abaab", true},  // a star may have to take more than at first
               {"?", "", false},
               {"[a].b", "[a].b", true},  // other characters stand for themselves
               {"[a].b", "a.b", false},
               {"a.b", "axb", false}};
  for (const auto& [pattern, name, matches] : cases)
    EXPECT_EQ(matches_glob(pattern, name), matches) << pattern << " " << name;
  const std::vector<std::string> names = {"embed.weight", "layers.0.norm.weight", "head.bias"};
  EXPECT_EQ(nearest_to_glob("*.bais", names), "head.bias");
  EXPECT_EQ(nearest_to_glob("layers.*.nrom.weight", names), "layers.0.norm.weight");
  EXPECT_EQ(nearest_to_glob("something.else.entirely", names), "");
}

TEST(Integer, RefusesToOverflow) {
  EXPECT_EQ(round_up(0, 64), 0);
  EXPECT_EQ(round_up(65, 64), 128);
  EXPECT_EQ(checked_lcm(4096, 11008), 176128);
  EXPECT_THROW(checked_mul(int64_t{1} << 40, int64_t{1} << 40), Error);
  EXPECT_THROW(round_up(INT64_MAX - 1, 64), Error);
}

TEST(DType, NamesRoundTrip) {
  for (const DType dtype : all_dtypes()) EXPECT_EQ(parse_dtype(name_of(dtype)), dtype);
  EXPECT_EQ(parse_dtype("float32"), std::nullopt);
  EXPECT_EQ(element_bytes(DType::kBFloat16), 2);
  EXPECT_TRUE(is_floating(DType::kFloat8E5M2));
  EXPECT_FALSE(is_floating(DType::kUInt8));
}

TEST(Environment, NamesTheVariableAndItsValue) {
  ::setenv("FSDP_TEST_VARIABLE", "ten", 1);
  EXPECT_THAT([] { env_seconds("FSDP_TEST_VARIABLE", 1); },
              ThrowsMessage<Error>(HasSubstr(
                  "FSDP_TEST_VARIABLE is 'ten': it must be a number of seconds above 0")));
  EXPECT_THAT([] { env_bytes_per_second("FSDP_TEST_VARIABLE", 1); },
              ThrowsMessage<Error>(HasSubstr("with KB, MB or GB, such as 1.25GB")));
  ::setenv("FSDP_TEST_VARIABLE", "10Gbit", 1);
  EXPECT_THROW(env_bytes_per_second("FSDP_TEST_VARIABLE", 1), Error);
  ::setenv("FSDP_TEST_VARIABLE", "1.25GB", 1);
  EXPECT_EQ(env_bytes_per_second("FSDP_TEST_VARIABLE", 1), 1.25e9);
  ::setenv("FSDP_TEST_VARIABLE", "10", 1);
  EXPECT_EQ(env_bytes_per_second("FSDP_TEST_VARIABLE", 1), 10.0);
  EXPECT_EQ(env_seconds("FSDP_TEST_VARIABLE", 1), 10.0);
  ::setenv("FSDP_TEST_VARIABLE", "", 1);
  EXPECT_EQ(env_seconds("FSDP_TEST_VARIABLE", 1), 1.0);
  ::unsetenv("FSDP_TEST_VARIABLE");
}

TEST(Error, AssertionsNameTheirPlace) {
  EXPECT_THAT([] { FSDP_ASSERT(1 == 2, "slot ", 3); },
              ThrowsMessage<InternalError>(HasSubstr("1 == 2: slot 3")));
  EXPECT_THROW(FSDP_ASSERT(false), InternalError);
}

}  // namespace
}  // namespace fsdp::base_test
