// A span's update by many threads has the same bits, into however many parts they cut it.
#include "fsdp/optim/shard_passes.h"

#include <gtest/gtest.h>

#include "fsdp/optim/kernels/update_math.h"
#include "support/update_case.h"

namespace fsdp::span_update_test {
namespace {

using testing::text_of;
using testing::UpdateMemory;
using testing::UpdateTypes;

TEST(SpanUpdate, HasTheSameBitsWithAnyNumberOfThreads) {
  const DType bf16 = DType::kBFloat16;
  const UpdateTypes cases[] = {
      {},
      {.gradient = bf16, .weight = bf16, .main = MainWeight::kSplit},
      {.weight = bf16, .first = bf16, .second = bf16},  // rounded at random
      {.first = DType::kFloat8E4M3, .second = DType::kFloat8E4M3}};
  const AdamWRule rule{.rounding = Rounding::kStochastic, .seed = 3};
  constexpr int64_t kNumel = 1'200'017;  // nine parts with many threads
  for (const UpdateTypes& types : cases) {
    UpdateMemory before(types, kNumel, /*flat_begin=*/77);
    before.draw_weights(1);
    before.draw_gradients(2);
    StepState state{.learning_rate = 0.01};
    begin_step(state, {});
    UpdateMemory alone = before;
    ThreadTeam caller(1);
    update_on_cpu(alone.span(), rule, state, caller);
    for (const int64_t num_threads : {2, 3, 16}) {
      UpdateMemory together = before;
      ThreadTeam team(num_threads);
      update_on_cpu(together.span(), rule, state, team);
      EXPECT_EQ(together.weight, alone.weight) << text_of(types);
      EXPECT_EQ(together.main_weight, alone.main_weight) << text_of(types);
      EXPECT_EQ(together.first, alone.first) << text_of(types);
      EXPECT_EQ(together.second, alone.second) << text_of(types);
    }
  }
}

}  // namespace
}  // namespace fsdp::span_update_test
