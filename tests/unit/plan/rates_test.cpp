// Rates of machines as text, damaged, and those that the command carries.
#include "fsdp/plan/rates.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "fsdp/base/error.h"
#include "support/config_examples.h"

namespace fsdp::rates_test {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

MeasuredParts parts(int64_t rows, double block_forward) {
  return {.shape = "small",
          .products = "bf16",
          .rows = rows,
          .sequence = 16,
          .embedding = {1, 2},
          .block = {block_forward, 20.5},
          .head = {5, 0},
          .host_us = 7};
}

Rates rates() {
  return {.machine = "a machine",
          .host = "a host",
          .date = "2026-11-18",
          .torch = "2.13.0",
          .device = "cuda",
          .threads = 3,
          .cores = 4,
          .note = "no more than a test",
          .flops_per_s = {{"bf16", 6.5e14}},
          .bytes_per_s = 4e12,
          .links = {{"all_gather", 2, {.bytes_per_s = 1e9, .latency_us = 3}}},
          .parts = {parts(2, 10), parts(4, 19)}};
}

TEST(Rates, AreReadAsTheyWereWritten) {
  const Rates read = parse_rates(rates_text(rates()), "rates.json");
  EXPECT_EQ(rates_text(read), rates_text(rates()));
  EXPECT_EQ(read.flops("bf16"), 6.5e14);
  EXPECT_EQ(read.parts[1].block.forward, 19);
  EXPECT_THAT(testing::refusal([] { rates().flops("fp16"); }),
              HasSubstr("the rates of a machine have no products 'fp16'; "));
}

TEST(Rates, KeepTheLatestPartsOfABatch) {
  Rates measured = rates();
  measured.add(parts(2, 11));
  measured.add(parts(8, 40));
  ASSERT_EQ(measured.parts.size(), 3);
  EXPECT_EQ(measured.parts[0].rows, 4);
  EXPECT_EQ(measured.parts[1].block.forward, 11);
}

TEST(Rates, RefuseADamagedFileInOneSentence) {
  const auto changed = [](const std::string& from, const std::string& to) {
    std::string text = rates_text(rates());
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return text.replace(at, from.size(), to);
  };
  const std::vector<std::pair<std::string, std::string>> damaged = {
      {changed("\"fsdp rates\"", "\"other\""), "has no rates"},
      {changed("\"version\": 2", "\"version\": 1"), "version is 1, and this command reads 2"},
      {changed("\"backward\":20.5,", ""), "key 'backward' not found"},
      {changed("20.5", "\"long\""), "type must be number"},
      {changed("20.5", "-1"), "a rate is not above 0, or a time is below"},
      {changed("\"latency_us\":3.0", "\"latency_us\":-3"), "a time is below"},
      {rates_text(rates()).substr(0, 300), ""},
      {"[]", ""},
  };
  for (const auto& [text, words] : damaged) {
    const std::string error = testing::refusal([&] { parse_rates(text, "rates.json"); });
    EXPECT_THAT(error, StartsWith("rates.json"));
    EXPECT_THAT(error, HasSubstr(words));
    EXPECT_EQ(error.find('\n'), std::string::npos);
  }
}

TEST(Rates, ShipWithTheCommand) {
  EXPECT_THAT(shipped_rate_names(), ::testing::IsSupersetOf({"cpu-2-cores", "h100", "h200"}));
  for (const std::string& name : shipped_rate_names()) {
    const Rates shipped = load_rates(name);
    EXPECT_FALSE(shipped.machine.empty()) << name;
    EXPECT_FALSE(shipped.flops_per_s.empty()) << name;
    EXPECT_EQ(shipped.torch.empty(), shipped.parts.empty()) << name;  // measured or not
  }
  EXPECT_THAT(testing::refusal([] { load_rates("h900"); }),
              HasSubstr("--rates is 'h900', which is neither a file nor one of "));
}

}  // namespace
}  // namespace fsdp::rates_test
