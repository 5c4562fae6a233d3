// memory/: arena plans of real models with padded sizes, beside the lower bound and max_pool.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>

#include "fsdp/layout/flat_layout.h"
#include "fsdp/memory/bucket_pool.h"
#include "fsdp/memory/pool/planned_pool.h"
#include "fsdp/plan/load_model.h"

namespace fsdp::arena_models_test {
namespace {

struct Case {
  const char* name;
  double max_ratio;
};
constexpr Case kModels[] = {{"llama3-8b", 1.02},
                            {"llama3-70b", 1.02},
                            {"mixtral-8x7b", 1.02},
                            {"deepseek-v3", 1.02},
                            {"nemotron-h-8b", 1.08}};

// Whether the units at both ends (embedding, head) live in the pool, too. They are the largest of
// small models: with them the peak is at the ends and the rest has room, without them the whole
// stack is tight.
enum class Ends { kPooled, kElsewhere };

// Whether the experts of a block are a parameter group of their own, as they are when they live on
// another mesh.
enum class Experts { kWithTheRest, kApart };

struct Variant {
  int64_t ranks = 8;
  DType gradient = DType::kFloat32;
  Ends ends = Ends::kPooled;
  Experts experts = Experts::kWithTheRest;
};

void add_group(UnitBuckets& unit, const std::string& name, std::vector<std::vector<int64_t>> shapes,
               const Variant& variant) {
  if (shapes.empty()) return;
  const FlatLayout layout(
      {.shapes = std::move(shapes), .element_bytes = 2, .inner_ranks = variant.ranks});
  const int64_t numel = layout.padded_numel();
  unit.buckets.push_back({name + ".weight", numel * 2, DType::kBFloat16, BucketRole::kWeight});
  unit.buckets.push_back({name + ".gradient", numel * element_bytes(variant.gradient),
                          variant.gradient, BucketRole::kGradient});
}

UnitBuckets buckets_of(const UnitShape& shape, const Variant& variant) {
  UnitBuckets unit{shape.name, {}};
  std::vector<std::vector<int64_t>> dense;
  std::vector<std::vector<int64_t>> experts;
  for (const TensorShape& tensor : shape.tensors) {
    const bool apart =
        variant.experts == Experts::kApart && tensor.name.find(".experts.") != std::string::npos;
    (apart ? experts : dense).push_back(tensor.shape);
  }
  add_group(unit, "dense", std::move(dense), variant);
  add_group(unit, "experts", std::move(experts), variant);
  return unit;
}

struct PlannedModel {
  BucketTable table;
  StepOrder order;
};

PlannedModel model_of(const char* name, const Variant& variant) {
  const ModelShape model = model_by_name(name);
  // Blocks are "model.layers.7"; the embedding and the head are not.
  const auto is_end = [&](size_t unit) {
    return model.units[unit].name.find(".layers.") == std::string::npos;
  };
  std::vector<UnitBuckets> units;
  std::vector<int32_t> index_of(model.units.size(), -1);
  for (size_t i = 0; i < model.units.size(); ++i) {
    if (variant.ends == Ends::kElsewhere && is_end(i)) continue;
    index_of[i] = static_cast<int32_t>(units.size());
    units.push_back(buckets_of(model.units[i], variant));
  }
  std::vector<int32_t> forward;
  for (const int64_t use : model.uses) {
    if (index_of[static_cast<size_t>(use)] >= 0)
      forward.push_back(index_of[static_cast<size_t>(use)]);
  }
  return {BucketTable(std::move(units)), mirrored_order(std::move(forward))};
}

double gib(int64_t bytes) { return static_cast<double>(bytes) / (1 << 30); }

void check_model(const Case& model, const Variant& variant, int32_t prefetch) {
  const PlannedModel planned = model_of(model.name, variant);
  const ArenaPlan plan = plan_prefetch(planned.table, planned.order, prefetch);
  HostSlabAllocator allocator;  // nothing is allocated
  const std::vector<UnitBuckets> units(planned.table.units().begin(), planned.table.units().end());
  const int64_t max_pool_bytes =
      make_bucket_pool(units,
                       {.kind = PoolKind::kMaxPool, .prefetch = prefetch, .order = planned.order},
                       allocator)
          ->bytes()
          .total();
  std::printf("  %-14s %5lld  %s  k=%d  %9.3f  %9.3f  %7.4f  %7.3f  %7d  %s\n", model.name,
              static_cast<long long>(variant.ranks), name_of(variant.gradient).data(), prefetch,
              gib(plan.bound_bytes), gib(plan.arena_bytes), plan.ratio(),
              static_cast<double>(max_pool_bytes) / static_cast<double>(plan.bound_bytes),
              plan.num_delayed, plan.method.c_str());
  EXPECT_LE(plan.ratio(), model.max_ratio) << model.name << " prefetch " << prefetch;
  EXPECT_LE(plan.arena_bytes, max_pool_bytes) << model.name << " prefetch " << prefetch;
}

void check_models(Variant variant) {
  std::printf("  %-14s %5s  %s  %s  %9s  %9s  %7s  %7s  %7s\n", "model", "ranks", "grad", "k  ",
              "bound GiB", "arena GiB", "ratio", "maxpool", "delayed");
  for (const Case& model : kModels) {
    for (const DType gradient : {DType::kFloat32, DType::kBFloat16}) {
      variant.gradient = gradient;
      for (const int32_t prefetch : {1, 2, 3}) check_model(model, variant, prefetch);
    }
  }
}

TEST(ArenaOfModels, IsCloseToTheBound) {
  check_models({.ranks = 8});
  check_models({.ranks = 64, .experts = Experts::kApart});
  check_models({.ranks = 8, .ends = Ends::kElsewhere, .experts = Experts::kApart});
}

}  // namespace
}  // namespace fsdp::arena_models_test
