// Which stored tensors go where in a model, and the errors if they do not fit.
#include "fsdp/checkpoint/load_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "support/stored_checkpoint.h"
#include "support/temp_dir.h"

namespace fsdp::load_plan_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using testing::TensorData;
using ::testing::ThrowsMessage;
using Bytes = std::vector<std::byte>;

const NameRules kNoRules;

// "up" and "gate" of half the rows each, kept apart.
NameRules fused_rules() {
  return NameRules({{.title = "gated MLP",
                     .pattern = "*.fused",
                     .dim = 0,
                     .sections = {{.name = "$1.gate"}, {.name = "$1.up"}}}});
}

// Everything below "model." in the checkpoint.
NameRules prefix_rules() {
  return NameRules(
      {{.title = "prefix", .pattern = "*.weight", .dim = 0, .sections = {{.name = "model.$1.w"}}}});
}

class LoadPlans : public ::testing::Test {
 protected:
  // One rank writes all of it, two boxes each where there are two rows.
  void write(std::vector<TensorData> model, std::vector<TensorData> moments = {},
             std::vector<GroupRecord::Member> members = {}) {
    model_ = std::move(model);
    moments_ = std::move(moments);
    testing::RankPieces pieces;
    for (const TensorData& data : model_) add_pieces(data, pieces.model);
    for (const TensorData& data : moments_) add_pieces(data, pieces.moments);
    Manifest manifest = testing::manifest_of(model_, moments_);
    manifest.optimizer.moments = {"exp_avg", "exp_avg_sq"};
    manifest.units.resize(1);
    manifest.units[0].groups.resize(1);
    manifest.units[0].groups[0].members = std::move(members);
    testing::write_checkpoint(directory_.path(), manifest, {&pieces, 1}, {.block_bytes = 100});
  }

  static void add_pieces(const TensorData& data, std::vector<Piece>& pieces) {
    for (const Box& box : boxes_of(data.tensor.shape))
      pieces.push_back(testing::piece_of(data, box));
  }

  static std::vector<Box> boxes_of(const std::vector<int64_t>& shape) {
    Box first = testing::whole_box(shape);
    if (shape.empty() || shape[0] < 2) return {first};
    Box second = first;
    first.sizes[0] = 1;
    second.offsets[0] = 1;
    second.sizes[0] -= 1;
    return {first, second};
  }

  TensorData data(const std::string& name, std::vector<int64_t> shape,
                  DType dtype = DType::kFloat32) {
    return testing::random_data(random_, name, dtype, std::move(shape));
  }

  // All elements, read in two parts.
  static Bytes read(const LoadPlan& plan, const TensorSource& source, int64_t numel) {
    const int64_t width = element_bytes(source.dtype());
    Bytes bytes(static_cast<size_t>(numel * width));
    std::vector<FileRun> runs;
    const int64_t middle = numel * 3 / 5;
    source.add_reads({0, middle}, bytes.data(), runs);
    source.add_reads({middle, numel}, bytes.data() + middle * width, runs);
    read_runs(plan.catalog().files(), std::move(runs));
    return bytes;
  }

  // The plan finds these bytes of each tensor, and nothing else is missing or too much.
  void expect_found(const NameRules& rules, const std::vector<WantedTensor>& wanted,
                    const std::vector<Bytes>& expected) {
    LoadPlan plan(directory_.path(), rules);
    const std::vector<TensorSource> sources = plan.find_model(wanted);
    plan.check({});
    EXPECT_THAT(plan.extra(), IsEmpty());
    for (size_t i = 0; i < wanted.size(); ++i)
      EXPECT_EQ(read(plan, sources[i], testing::whole_box(wanted[i].shape).numel()), expected[i])
          << wanted[i].name;
  }

  // The bytes of the stored tensors with these positions, one after the other.
  Bytes stored(const std::vector<size_t>& positions) const {
    Bytes bytes;
    for (const size_t i : positions)
      bytes.insert(bytes.end(), model_[i].bytes.begin(), model_[i].bytes.end());
    return bytes;
  }

  template <typename Matcher>
  void expect_refusal(const NameRules& rules, const std::vector<WantedTensor>& wanted,
                      const Matcher& words, const LoadTolerance& tolerance = {}) {
    LoadPlan plan(directory_.path(), rules);
    plan.find_model(wanted);
    EXPECT_THAT([&] { plan.check(tolerance); },
                ThrowsMessage<Error>(AllOf(
                    HasSubstr(concat(directory_.path(), " does not fit this model: ")), words)));
  }

  testing::TempDir directory_{testing::TempDir::On::kMemory};
  std::mt19937_64 random_{80};
  std::vector<TensorData> model_;
  std::vector<TensorData> moments_;
};

WantedTensor wanted(std::string name, std::vector<int64_t> shape, DType dtype = DType::kFloat32) {
  return {.name = std::move(name), .aliases = {}, .shape = std::move(shape), .dtype = dtype};
}
WantedTensor tied(const std::string& name, const std::string& alias, std::vector<int64_t> shape) {
  return {.name = name, .aliases = {alias}, .shape = std::move(shape)};
}

TEST_F(LoadPlans, FindEveryTensor) {
  write({data("a", {3, 4}), data("b", {}), data("c", {0, 5}), data("d", {7}, DType::kInt64)});
  expect_found(
      kNoRules,
      {wanted("d", {7}, DType::kInt64), wanted("a", {3, 4}), wanted("c", {0, 5}), wanted("b", {})},
      {stored({3}), stored({0}), {}, stored({1})});
}

TEST_F(LoadPlans, DoNotOfferWhatNobodyCanSet) {
  write({data("a", {3})});
  expect_refusal(kNoRules, {wanted("b", {2})},
                 AllOf(HasSubstr("it lacks 'b'; it also has 'a'; give the weights of this model"),
                       Not(HasSubstr("allow_"))),
                 {.is_offered = false});
}

TEST_F(LoadPlans, LetGoOfWhatMayBeMissing) {
  write({data("a", {3})});
  LoadPlan plan(directory_.path(), kNoRules);
  const auto sources = plan.find_model(std::vector{wanted("a", {3}), wanted("b.bias", {2})});
  plan.check({.allow_missing = {"*.bias"}});
  EXPECT_FALSE(sources[0].is_missing());
  EXPECT_TRUE(sources[1].is_missing());
  EXPECT_EQ(plan.missing(), std::vector<std::string>{"b.bias"});
  expect_refusal(kNoRules, {wanted("b.bias", {2})}, HasSubstr("'b.bias'"),
                 {.allow_missing = {"*.weight"}, .allows_extra = true});
}

// The model's name, under any name that the rules store it.
TEST_F(LoadPlans, LetGoOfFusedTensorsByTheirName) {
  write({data("a", {3})});
  LoadPlan plan(directory_.path(), fused_rules());
  const auto sources = plan.find_model(std::vector{wanted("a", {3}), wanted("mlp.fused", {2})});
  plan.check({.allow_missing = {"mlp.fused"}});
  EXPECT_TRUE(sources[1].is_missing());
  EXPECT_EQ(plan.missing(), (std::vector<std::string>{"mlp.gate", "mlp.up"}));
}

TEST_F(LoadPlans, ListWhatTheModelDoesNotHave) {
  write({data("a", {3}), data("b", {2})});
  LoadPlan plan(directory_.path(), kNoRules);
  plan.find_model(std::vector{wanted("a", {3})});
  plan.check({.allow_missing = {}, .allows_extra = true});
  EXPECT_EQ(plan.extra(), std::vector<std::string>{"b"});
}

TEST_F(LoadPlans, RefuseAnotherShape) {
  write({data("a", {3, 4})});
  expect_refusal(kNoRules, {wanted("a", {4, 3})}, HasSubstr("'a [3, 4] instead of [4, 3]'"));
  expect_refusal(kNoRules, {wanted("a", {12})}, HasSubstr("'a [3, 4] instead of [12]'"));
}

TEST_F(LoadPlans, RefuseAnotherKindOfNumber) {
  write({data("a", {3}, DType::kInt64)});
  expect_refusal(kNoRules, {wanted("a", {3}, DType::kFloat32)},
                 HasSubstr("'a int64 instead of fp32'"));
  expect_refusal(kNoRules, {wanted("a", {3}, DType::kInt32)}, HasSubstr("int64 instead of int32"));
  write({data("a", {3}, DType::kBFloat16)});
  expect_refusal(kNoRules, {wanted("a", {3}, DType::kUInt8)}, HasSubstr("bf16 instead of uint8"));
}

TEST_F(LoadPlans, LeaveFloatingTypesToWhoeverConverts) {
  write({data("a", {3}, DType::kBFloat16)});
  expect_found(kNoRules, {wanted("a", {3}, DType::kFloat32)}, {stored({0})});
}

TEST_F(LoadPlans, SayEverythingAtOnce) {
  write({data("a", {3}), data("b", {2}), data("c", {2}, DType::kInt32)});
  expect_refusal(
      kNoRules, {wanted("a", {4}), wanted("c", {2}), wanted("d", {1})},
      AllOf(HasSubstr("it lacks 'd' (allow_missing"), HasSubstr("it also has 'b' (allow_extra"),
            HasSubstr("'a [3] instead of [4]'"), HasSubstr("'c int32")));
}

TEST_F(LoadPlans, NameAtMostTwenty) {
  std::vector<TensorData> extra;
  std::vector<WantedTensor> missing;
  for (int i = 10; i < 33; ++i) {
    extra.push_back(data(concat("extra", i), {1}));
    missing.push_back(wanted(concat("missing", i), {1}));
  }
  write(std::move(extra));
  expect_refusal(kNoRules, missing,
                 AllOf(HasSubstr("'missing29' and 3 more"), Not(HasSubstr("'missing30'")),
                       HasSubstr("'extra29' and 3 more"), Not(HasSubstr("'extra30'"))));
}

// --- shared parameters ---------------------------------------------------------------------------

TEST_F(LoadPlans, FindATiedTensorUnderItsOtherName) {
  const WantedTensor embedding = tied("embed.weight", "lm_head.weight", {4, 2});
  write({data("lm_head.weight", {4, 2})});
  expect_found(kNoRules, {embedding}, {stored({0})});
  write({data("model.lm_head.w", {4, 2})});
  expect_found(prefix_rules(), {embedding}, {stored({0})});
  // Other tools store both names.
  write({data("embed.weight", {4, 2}), data("lm_head.weight", {4, 2})});
  expect_found(kNoRules, {embedding}, {stored({0})});
}

TEST_F(LoadPlans, GiveBothOfAnUntiedModelWhatWasTied) {
  const std::vector<WantedTensor> untied = {wanted("embed.weight", {4, 2}),
                                            wanted("lm_head.weight", {4, 2})};
  const GroupRecord::Member member{"embed.weight", {"lm_head.weight"}, {4, 2}, {0, 8}};
  write({data("embed.weight", {4, 2})}, {}, {member});
  expect_found(kNoRules, untied, {stored({0}), stored({0})});
  write({data("model.embed.w", {4, 2})}, {}, {member});
  expect_found(prefix_rules(), untied, {stored({0}), stored({0})});
}

TEST_F(LoadPlans, FindTiedTensorsThatAreFused) {
  write({data("b.gate", {2, 2}), data("b.up", {2, 2})}, {},
        {{"b.fused", {"c.fused"}, {4, 2}, {0, 8}}});
  expect_found(fused_rules(), {tied("a.fused", "b.fused", {4, 2}), wanted("c.fused", {4, 2})},
               {stored({0, 1}), stored({0, 1})});
}

// --- rules on both sides -------------------------------------------------------------------------

TEST_F(LoadPlans, FuseAndDivideWhatIsStoredOtherwise) {
  write({data("mlp.gate", {3, 2}), data("mlp.up", {3, 2})});
  expect_found(fused_rules(), {wanted("mlp.fused", {6, 2})}, {stored({0, 1})});
  write({data("mlp.fused", {6, 2})});
  expect_found(fused_rules(), {wanted("mlp.fused", {6, 2})}, {stored({0})});
  const auto middle = model_[0].bytes.begin() + 24;
  expect_found(fused_rules(), {wanted("mlp.up", {3, 2}), wanted("mlp.gate", {3, 2})},
               {Bytes(middle, model_[0].bytes.end()), Bytes(model_[0].bytes.begin(), middle)});
}

TEST_F(LoadPlans, DoNotFuseAHalf) {
  write({data("mlp.gate", {3, 2})});
  expect_refusal(fused_rules(), {wanted("mlp.fused", {6, 2})}, HasSubstr("it lacks 'mlp.up'"));
}

TEST_F(LoadPlans, DoNotFuseDifferentTypes) {
  write({data("mlp.gate", {3, 2}), data("mlp.up", {3, 2}, DType::kFloat16)});
  expect_refusal(fused_rules(), {wanted("mlp.fused", {6, 2})},
                 HasSubstr("'mlp.up fp16 instead of fp32'"));
}

// --- moments -------------------------------------------------------------------------------------

TEST_F(LoadPlans, FindMomentsByTheirParameter) {
  write({data("mlp.fused", {4})}, {data("mlp.gate.exp_avg", {2}), data("mlp.up.exp_avg", {2}),
                                   data("mlp.fused.exp_avg_sq", {4})});
  const NameRules rules = fused_rules();
  LoadPlan plan(directory_.path(), rules);
  plan.find_model(std::vector{wanted("mlp.fused", {4})});
  const auto first = plan.find_moments(std::vector{wanted("mlp.fused", {4})}, "exp_avg");
  const auto second = plan.find_moments(std::vector{wanted("mlp.fused", {4})}, "exp_avg_sq");
  plan.check({});
  Bytes both = moments_[0].bytes;
  both.insert(both.end(), moments_[1].bytes.begin(), moments_[1].bytes.end());
  EXPECT_EQ(read(plan, first[0], 4), both);
  EXPECT_EQ(read(plan, second[0], 4), moments_[2].bytes);
}

TEST_F(LoadPlans, DoNotMindMomentsThatNobodyWants) {
  write({data("a", {4})}, {data("a.exp_avg", {4})});
  expect_found(kNoRules, {wanted("a", {4})}, {stored({0})});
}

TEST_F(LoadPlans, LeaveOutHistoriesOfAmaxesThatOlderCheckpointsHave) {
  write({data("a", {4})}, {data("a.exp_avg", {4}), data("a.amax_history", {17, 1, 4})});
  LoadPlan plan(directory_.path(), kNoRules);
  plan.find_model(std::vector{wanted("a", {4})});
  plan.find_moments(std::vector{wanted("a", {4})}, "exp_avg");
  EXPECT_NO_THROW(plan.check({}));
}

TEST_F(LoadPlans, MindAMomentTooManyOrTooFew) {
  write({data("a", {4}), data("b", {4})}, {data("a.exp_avg", {4})});
  LoadPlan plan(directory_.path(), kNoRules);
  const std::vector<WantedTensor> both = {wanted("a", {4}), wanted("b", {4})};
  plan.find_model(both);
  plan.find_moments(both, "exp_avg");
  EXPECT_THAT([&] { plan.check({}); }, ThrowsMessage<Error>(HasSubstr("it lacks 'b.exp_avg'")));
}

TEST_F(LoadPlans, SayThatThereIsNoOptimizerState) {
  write({data("a", {4})});
  LoadPlan plan(directory_.path(), kNoRules);
  plan.find_model(std::vector{wanted("a", {4})});
  plan.find_moments(std::vector{wanted("a", {4})}, "exp_avg");
  EXPECT_THAT([&] { plan.check({}); },
              ThrowsMessage<Error>(
                  AllOf(HasSubstr("it lacks 'a.exp_avg'"), HasSubstr("holds no optimizer state"))));
}

}  // namespace
}  // namespace fsdp::load_plan_test
