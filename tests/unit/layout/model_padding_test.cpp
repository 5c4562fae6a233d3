// Padding and planning time of whole models, each unit one layout of bf16 elements.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <random>

#include "fsdp/layout/flat_layout.h"
#include "fsdp/plan/load_model.h"

namespace fsdp::model_padding_test {
namespace {

constexpr PlacementPair kBoth = {Placement::kShard, Placement::kShard};
constexpr const char* kModels[] = {"llama3-8b", "llama3-70b", "mixtral-8x7b", "deepseek-v3",
                                   "nemotron-h-8b"};
constexpr int64_t kRanks[] = {8, 64, 512, 4096};

std::vector<FlatLayoutRequest> requests_of(const ModelShape& model, int64_t num_ranks,
                                           Granularity granularity) {
  std::vector<FlatLayoutRequest> requests;
  for (const UnitShape& unit : model.units) {
    FlatLayoutRequest request{
        .shapes = {}, .element_bytes = 2, .inner_ranks = num_ranks, .granularity = granularity};
    for (const TensorShape& tensor : unit.tensors) request.shapes.push_back(tensor.shape);
    requests.push_back(std::move(request));
  }
  return requests;
}

struct ModelPadding {
  int64_t tensor_numel = 0;
  int64_t padded_numel = 0;
  int64_t lower_bound_numel = 0;
  size_t max_segments = 0;

  double fraction() const {
    return static_cast<double>(padded_numel) / static_cast<double>(tensor_numel) - 1;
  }
  double bound_fraction() const {
    return static_cast<double>(lower_bound_numel) / static_cast<double>(tensor_numel) - 1;
  }
  double over_bound() const {
    return static_cast<double>(padded_numel) / static_cast<double>(lower_bound_numel);
  }
};

ModelPadding measure(const ModelShape& model, int64_t num_ranks, Granularity granularity) {
  ModelPadding sum;
  for (const FlatLayoutRequest& request : requests_of(model, num_ranks, granularity)) {
    const FlatLayout layout(request);
    sum.tensor_numel += layout.tensor_numel();
    sum.padded_numel += layout.padded_numel();
    sum.lower_bound_numel += layout.lower_bound_numel();
    sum.max_segments = std::max(sum.max_segments, layout.segments().size());
  }
  return sum;
}

TEST(ModelPadding, ElementGranularityPadsLessThanOnePercent) {
  std::printf("  %-14s %6s %10s %10s\n", "model", "ranks", "element", "block(128)");
  for (const char* name : kModels) {
    const ModelShape model = model_by_name(name);
    for (const int64_t num_ranks : kRanks) {
      const ModelPadding element = measure(model, num_ranks, Granularity::element());
      const ModelPadding block = measure(model, num_ranks, Granularity::block(128));
      std::printf("  %-14s %6d %8.4f %% %8.4f %%\n", name, static_cast<int>(num_ranks),
                  100 * element.fraction(), 100 * block.fraction());
      EXPECT_EQ(element.tensor_numel, model.parameters());
      EXPECT_EQ(element.padded_numel, element.lower_bound_numel);
      EXPECT_LT(element.fraction(), 0.01) << name << " on " << num_ranks;
      EXPECT_LT(block.fraction(), 0.01) << name << " on " << num_ranks;
    }
  }
}

TEST(ModelPadding, RowGranularityStaysWithinFivePercentOfTheBound) {
  std::printf("  %-14s %6s %10s %10s %8s %9s\n", "model", "ranks", "row", "bound", "ratio",
              "segments");
  for (const char* name : kModels) {
    const ModelShape model = model_by_name(name);
    for (const int64_t num_ranks : kRanks) {
      const ModelPadding row = measure(model, num_ranks, Granularity::row());
      std::printf("  %-14s %6d %8.4f %% %8.4f %% %8.4f %9zu\n", name, static_cast<int>(num_ranks),
                  100 * row.fraction(), 100 * row.bound_fraction(), row.over_bound(),
                  row.max_segments);
      EXPECT_LE(row.over_bound(), 1.05) << name << " on " << num_ranks;
      EXPECT_GE(row.over_bound(), 1.0) << name << " on " << num_ranks;
    }
  }
}

TEST(ModelPadding, RowGranularityStaysNearTheBoundForRandomBlocks) {
  // Widths that nobody chose for their common divisors, 8 to 1536 ranks. The bound does not know
  // that tensors are contiguous; where a matrix has fewer rows than there are ranks it is out of
  // reach.
  std::mt19937 random(5);
  const auto multiple_of_64 = [&](int64_t least, int64_t count) {
    return 64 * (least + static_cast<int64_t>(random()) % count);
  };
  std::vector<double> over_bound;
  for (int i = 0; i < 2000; ++i) {
    const int64_t hidden = multiple_of_64(4, 124);
    const int64_t ffn = multiple_of_64(8, 440);
    const int64_t kv = multiple_of_64(1, 16);
    const int64_t low_rank = multiple_of_64(2, 30);
    int64_t num_ranks = int64_t{8} << random() % 8;
    if (random() % 3 == 0) num_ranks = num_ranks * 3 / 2;
    const FlatLayout layout({.shapes = {{hidden, hidden},
                                        {kv, hidden},
                                        {kv, hidden},
                                        {hidden, hidden},
                                        {ffn, hidden},
                                        {ffn, hidden},
                                        {hidden, ffn},
                                        {low_rank, hidden},
                                        {hidden, low_rank},
                                        {hidden, 1, 4},
                                        {1, hidden},
                                        {hidden}},
                             .element_bytes = 2,
                             .inner_ranks = num_ranks,
                             .granularity = Granularity::row()});
    over_bound.push_back(static_cast<double>(layout.padded_numel()) /
                         static_cast<double>(layout.lower_bound_numel()));
  }
  std::sort(over_bound.begin(), over_bound.end());
  std::printf("  row / bound: median %.4f, nine of ten below %.4f\n", over_bound[1000],
              over_bound[1800]);
  EXPECT_LT(over_bound[1000], 1.005);
  EXPECT_LT(over_bound[1800], 1.05);
}

TEST(ModelPadding, SplittingTheRanksInTwoAxesCostsNothing) {
  const ModelShape model = model_by_name("llama3-8b");
  FlatLayoutRequest request = requests_of(model, 64, Granularity::element())[1];
  const FlatLayout flat(request);
  request.inner_ranks = 8;
  request.outer_ranks = 8;
  const FlatLayout hybrid(request);
  EXPECT_EQ(hybrid.padded_numel(), flat.padded_numel());
  EXPECT_EQ(hybrid.max_shard_numel(kBoth), flat.max_shard_numel(kBoth));
}

TEST(ModelPadding, PlansDeepSeekV3On4096Ranks) {
  const ModelShape model = model_by_name("deepseek-v3");
  for (const Granularity granularity : {Granularity::element(), Granularity::row()}) {
    std::vector<FlatLayoutRequest> requests = requests_of(model, 4096, granularity);
    size_t num_slices = 0;
    for (FlatLayoutRequest& request : requests) {
      const FlatLayout layout(std::move(request));
      num_slices += layout.tensor_slices(kBoth, {.outer = 0, .inner = 1234}).size();
    }
    EXPECT_GT(num_slices, requests.size() / 2);
  }
}

}  // namespace
}  // namespace fsdp::model_padding_test
