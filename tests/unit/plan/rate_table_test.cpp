// Tables of measured rates: between and beyond their points, as text, and damaged.
#include "fsdp/plan/rate_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "fsdp/base/error.h"
#include "support/config_examples.h"

namespace fsdp::rate_table_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// Microseconds are tokens * width / 100.
RateGrid grid() {
  return {.work = "product bf16 forward",
          .axes = {"tokens", "width"},
          .points = {{10, 100, 1000}, {20, 80}},
          .us = {2, 8, 20, 80, 200, 800}};
}

RateTable table() {
  return {.machine = "a machine",
          .host = "a host",
          .date = "2026-11-18",
          .torch = "2.13.0",
          .device = "cuda",
          .threads = 3,
          .cores = 4,
          .note = "no more than a test",
          .grids = {grid(), {.work = "launch", .axes = {}, .points = {}, .us = {2.5}}}};
}

TEST(RateTable, IsExactAtItsPoints) {
  EXPECT_DOUBLE_EQ(grid().us_at(std::array<int64_t, 2>{10, 80}), 8);
  EXPECT_DOUBLE_EQ(grid().us_at(std::array<int64_t, 2>{1000, 20}), 200);
  EXPECT_DOUBLE_EQ(table().us("launch", {}), 2.5);
}

TEST(RateTable, FollowsAPowerOfEachSizeBetweenPoints) {
  // A product of powers, to the rounding of logarithms.
  EXPECT_NEAR(grid().us_at(std::array<int64_t, 2>{50, 40}), 20, 1e-12);
  EXPECT_NEAR(grid().us_at(std::array<int64_t, 2>{300, 80}), 240, 1e-11);
}

TEST(RateTable, GrowsInProportionBeyondTheLastPointAndStaysBelowTheFirst) {
  EXPECT_DOUBLE_EQ(grid().us_at(std::array<int64_t, 2>{3000, 80}), 2400);
  EXPECT_DOUBLE_EQ(grid().us_at(std::array<int64_t, 2>{2000, 160}), 3200);
  EXPECT_DOUBLE_EQ(grid().us_at(std::array<int64_t, 2>{1, 80}), 8);
  const RateGrid one{.work = "w", .axes = {"n"}, .points = {{4}}, .us = {3}};
  EXPECT_DOUBLE_EQ(one.us_at(std::array<int64_t, 1>{8}), 6);
}

TEST(RateTable, ReadsWhatItWrites) {
  const RateTable read = parse_rates(rates_text(table()), "rates.json");
  EXPECT_EQ(rates_text(read), rates_text(table()));
  EXPECT_EQ(read.cores, 4);
  EXPECT_THAT(read.find("product bf16 forward")->us, ElementsAre(2, 8, 20, 80, 200, 800));
  EXPECT_EQ(read.find("product bf16 backward"), nullptr);
}

TEST(RateTable, NamesWorkThatWasNotMeasured) {
  EXPECT_THAT(testing::refusal([] { table().us("product fp16 forward", {}); }),
              HasSubstr("the rates of a machine (2026-11-18) have no 'product fp16 forward'; "));
}

// The text with one part replaced.
std::string changed(const std::string& from, const std::string& to) {
  std::string text = rates_text(table());
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(RateTable, RefusesADamagedFileInOneSentence) {
  const std::vector<std::pair<std::string, std::string>> damaged = {
      {changed("\"fsdp rates\"", "\"other\""), "is no table of rates"},
      {changed("\"version\": 1", "\"version\": 2"), "version is 2, and this command reads 1"},
      {changed("[2,8,20,80,200,800]", "[2,8,20,80,200]"), "it needs 6 numbers"},
      {changed("[2,8,20,80,200,800]", "[2,8,20,80,200,-1]"), "it needs numbers above 0"},
      {changed("[2,8,20,80,200,800]", "[2,8,20,80,200,null]"), "it needs numbers above 0"},
      {changed("[10,100,1000]", "[10,1000,100]"), "it needs rising whole numbers above 0"},
      {changed("[10,100,1000]", "[]"), "an axis has none"},
      {changed("\"tokens\",\"width\"", "\"tokens\""), "each needs its points"},
      {changed("\"machine\"", "\"machin\""), "machin"},
      {rates_text(table()).substr(0, 300), ""},
      {"[]", ""},
  };
  for (const auto& [text, words] : damaged) {
    const std::string error = testing::refusal([&] { parse_rates(text, "rates.json"); });
    EXPECT_THAT(error, StartsWith("rates.json"));
    EXPECT_THAT(error, HasSubstr(words));
    EXPECT_EQ(error.find('\n'), std::string::npos);
  }
}

TEST(RateTable, ShipsTablesThatCanBeRead) {
  EXPECT_THAT(shipped_rate_names(), ::testing::Contains("cpu-2-cores"));
  for (const std::string& name : shipped_rate_names()) {
    const RateTable shipped = load_rates(name);
    EXPECT_FALSE(shipped.machine.empty()) << name;
    EXPECT_NE(shipped.find("norm forward"), nullptr) << name;
  }
  EXPECT_THAT(testing::refusal([] { load_rates("h900"); }),
              HasSubstr("--rates is 'h900', which is neither a file nor one of "));
}

}  // namespace
}  // namespace fsdp::rate_table_test
