// optim/parameter_rules.h: every element of a shard in exactly one span, with its tensor's
// settings.
#include "fsdp/optim/parameter_rules.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>

#include "fsdp/base/text.h"
#include "fsdp/layout/state_bytes.h"
#include "support/layout_checker.h"

namespace fsdp::rule_spans_test {
namespace {

constexpr HyperParameters kDecayed{0.1, 1.0};
constexpr HyperParameters kSpared{0.0, 1.0};
constexpr PlacementPair kWhole{};

// Tensors begin at multiples of 64 elements.
FlatLayout layout_of(std::vector<std::vector<int64_t>> shapes) {
  return FlatLayout({.shapes = std::move(shapes), .element_bytes = 2});
}

TEST(RuleSpans, IgnoreTensorsWithoutElements) {
  const FlatLayout layout = layout_of({{0, 7}, {64}, {0}});
  const std::vector<HyperParameters> settings = {kSpared, kDecayed, kSpared};
  EXPECT_EQ(rule_spans(layout, settings, layout.shard_ranges(kWhole, {})),
            (std::vector<RuleSpan>{{{0, 64}, 0, kDecayed}}));
}

void check_spans(const FlatLayout& layout, std::span<const HyperParameters> settings,
                 std::span<const ShardRange> shard) {
  const std::vector<RuleSpan> spans = rule_spans(layout, settings, shard);
  std::vector<int64_t> owner(static_cast<size_t>(layout.padded_numel()), -1);
  std::vector<bool> is_begin(owner.size(), false);
  for (int64_t tensor = 0; tensor < layout.num_tensors(); ++tensor) {
    const FlatRange flat = layout.tensor_range(tensor);
    std::fill(owner.begin() + flat.begin, owner.begin() + flat.end, tensor);
    if (!flat.empty()) is_begin[static_cast<size_t>(flat.begin)] = true;
  }
  size_t at = 0;
  for (const ShardRange& range : shard) {
    int64_t position = range.flat.begin;
    for (; position < range.flat.end; ++at) {
      ASSERT_LT(at, spans.size()) << "nothing from " << position << " on";
      const RuleSpan& span = spans[at];
      ASSERT_EQ(span.flat.begin, position);
      ASSERT_GT(span.flat.end, position);
      ASSERT_LE(span.flat.end, range.flat.end);
      ASSERT_EQ(span.local_begin - range.local_begin, position - range.flat.begin);
      if (position > range.flat.begin) {
        ASSERT_NE(spans[at - 1].hyper, span.hyper) << "two that could be one at " << position;
        ASSERT_TRUE(is_begin[static_cast<size_t>(position)]) << "padding has a span of its own";
      }
      for (; position < span.flat.end; ++position) {
        const int64_t tensor = owner[static_cast<size_t>(position)];
        if (tensor >= 0 && settings[static_cast<size_t>(tensor)] != span.hyper)
          FAIL() << "tensor " << tensor << " at " << position;
      }
    }
  }
  ASSERT_EQ(at, spans.size()) << "spans beyond the shard";
}

TEST(RuleSpans, CoverEveryShardOfThreeThousandRandomLayouts) {
  std::mt19937 random(20261115);
  constexpr std::array<HyperParameters, 3> kSettings = {{{0.1, 1.0}, {0.0, 1.0}, {0.1, 2.0}}};
  size_t num_shards = 0;
  size_t num_cut = 0;
  int num_by_kind[4] = {};
  for (int i = 0; i < 3000; ++i) {
    std::vector<uint8_t> bytes(64);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    if (testing::RequestReader(bytes).is_extreme()) bytes[0] = 0;
    const FlatLayout layout(testing::RequestReader(bytes).read());
    ++num_by_kind[static_cast<int>(layout.request().granularity.kind)];
    std::vector<HyperParameters> settings;
    const size_t num_settings = 1 + random() % kSettings.size();
    for (int64_t tensor = 0; tensor < layout.num_tensors(); ++tensor)
      settings.push_back(kSettings[random() % num_settings]);
    const MeshCoordinate rank{
        .outer = static_cast<int64_t>(random()) % layout.request().outer_ranks,
        .inner = static_cast<int64_t>(random()) % layout.request().inner_ranks};
    for (const PlacementPair placed : kAllPlacementPairs) {
      const auto shard = layout.shard_ranges(placed, rank);
      ASSERT_NO_FATAL_FAILURE(check_spans(layout, settings, shard)) << to_text(placed);
      const StatePlaces places = state_places(shard, static_cast<double>(random() % 101) / 100);
      ASSERT_NO_FATAL_FAILURE(check_spans(layout, settings, places.device)) << to_text(placed);
      ASSERT_NO_FATAL_FAILURE(check_spans(layout, settings, places.host)) << to_text(placed);
      num_shards += shard.empty() ? 0 : 1;
      num_cut += rule_spans(layout, settings, shard).size() > shard.size() ? 1 : 0;
    }
  }
  for (const int count : num_by_kind) EXPECT_GT(count, 300) << "every granularity is drawn";
  EXPECT_GT(num_shards, 10000u);
  EXPECT_GT(num_cut, 3000u) << "shards with more than one setting";
}

}  // namespace
}  // namespace fsdp::rule_spans_test
