// The way of tokens to experts with a capacity, against loops over their choices.
#include "fsdp/nn/layers/expert_route.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/comm/mesh.h"
#include "support/layer_gradients.h"
#include "support/run_ranks.h"

namespace fsdp::nn::expert_route_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::run_ranks;
using ::testing::ThrowsMessage;
using testing::waves;

constexpr int64_t kExperts = 8;
constexpr int64_t kTokens = 24;

// Expert 3 of every token but the last two, beside others by turns; ranks differ. A token's experts
// are distinct.
at::Tensor choices_of(int rank, int64_t num_tokens, int64_t num_chosen) {
  at::Tensor chosen = at::empty({num_tokens, num_chosen}, at::kLong);
  for (int64_t t = 0; t < num_tokens; ++t)
    for (int64_t c = 0; c < num_chosen; ++c)
      chosen[t][c] = c == 0 && t + 2 < num_tokens ? 3 : (4 + (t + 3 * rank + c) % 7) % kExperts;
  return chosen;
}

// A rank's expert multiplies: its number times the rows. Rows that are nobody's become NaN.
at::Tensor factors(const at::Tensor& ends, int64_t num_rows, int64_t first_expert) {
  at::Tensor result = at::full({num_rows, 1}, NAN);
  int64_t begin = 0;
  for (int64_t e = 0; e < ends.size(0); ++e) {
    const auto end = static_cast<int64_t>(ends[e].item<int32_t>());
    result.narrow(0, begin, end - begin).fill_(static_cast<double>(first_expert + e + 1));
    begin = end;
  }
  return result;
}

// [tokens, chosen]: 1 for the choices of each expert with the largest weights, as many as it has
// room for; of equal ones the first.
at::Tensor kept(const at::Tensor& chosen, const at::Tensor& weight, double capacity_factor) {
  if (capacity_factor == 0.0) return at::ones(chosen.sizes());
  const double even = static_cast<double>(chosen.numel()) / static_cast<double>(kExperts);
  const auto capacity = static_cast<size_t>(std::ceil(capacity_factor * even));
  std::vector<std::vector<std::pair<float, int64_t>>> of_expert(kExperts);
  const at::Tensor expert = chosen.flatten();
  const at::Tensor weights = weight.flatten();
  for (int64_t i = 0; i < expert.size(0); ++i)
    of_expert[static_cast<size_t>(expert[i].item<int64_t>())].emplace_back(
        -weights[i].item<float>(), i);
  at::Tensor result = at::zeros({expert.size(0)});
  for (auto& choices : of_expert) {
    std::sort(choices.begin(), choices.end());
    for (size_t i = 0; i < std::min(capacity, choices.size()); ++i)
      result[choices[i].second] = 1.0f;
  }
  return result.view(chosen.sizes());
}

void expect_by_loops(World& world, int ep, const at::Tensor& chosen, double capacity_factor,
                     const std::string& which, ExpertExchange exchange = ExpertExchange::kAuto) {
  const Mesh mesh = world.mesh({.ep = ep});
  // Few different weights, so that some are equal.
  const at::Tensor given_weight = waves(chosen.sizes(), 0.8 + world.rank()).mul(8).round().div(8);
  const auto route = c10::make_intrusive<ExpertRoute>(
      sort_choices(chosen, kExperts), given_weight,
      ExpertRanks{.ep = mesh.ep(), .capacity_factor = capacity_factor, .exchange = exchange});
  const auto gradients_of = [&](const auto& result_of) {
    const at::Tensor tokens =
        waves({chosen.size(0), 5}, 0.5 + world.rank()).set_requires_grad(true);
    const at::Tensor weight = given_weight.clone().set_requires_grad(true);
    const at::Tensor result = result_of(tokens, weight);
    (result * waves(result.sizes(), 0.9)).sum().backward();
    return std::vector<at::Tensor>{result.detach(), tokens.grad(), weight.grad()};
  };
  const int64_t first_expert = mesh.ep()->rank() * kExperts / ep;
  const auto actual = gradients_of([&](const at::Tensor& tokens, const at::Tensor& weight) {
    const at::Tensor rows = dispatch(tokens, route);
    return combine(rows * factors(route->ends(), rows.size(0), first_expert), weight, route);
  });
  const at::Tensor is_kept = kept(chosen, given_weight, capacity_factor);
  const auto expected = gradients_of([&](const at::Tensor& tokens, const at::Tensor& weight) {
    return tokens * (weight * is_kept * (chosen + 1)).sum(1, /*keepdim=*/true);
  });
  for (size_t i = 0; i < actual.size(); ++i)
    EXPECT_TRUE(at::allclose(actual[i], expected[i], 1e-5, 1e-6)) << which << ": " << i;
  const double share = 1.0 - is_kept.mean().item<double>();
  EXPECT_EQ(route->dropped().defined(), capacity_factor > 0.0 && share > 0.0) << which;
  if (route->dropped().defined()) {
    EXPECT_NEAR(route->dropped().item<double>(), share, 1e-6) << which;
  }
}

// The load of expert 3 takes no room from those beside it, on its rank and on others.
TEST(ExpertRoute, GivesEveryExpertRoomOfItsOwn) {
  for (const auto& [ranks, ep] : {std::pair{4, 2}, {4, 4}})
    for (const int64_t num_chosen : {1, 5})
      for (const double capacity_factor : {1.0, 1.3})
        run_ranks(ranks, [&](World& world) {
          expect_by_loops(world, ep, choices_of(world.rank(), kTokens, num_chosen), capacity_factor,
                          concat(ranks, ", ", ep, ", ", num_chosen, ", ", capacity_factor));
        });
}

TEST(ExpertRoute, GivesTheSameRowsWithRoomForAll) {
  for (const auto& [ranks, ep] : {std::pair{4, 2}, {4, 4}})
    for (const int64_t num_chosen : {1, 3, 5})
      run_ranks(ranks, [&](World& world) {
        expect_by_loops(world, ep, choices_of(world.rank(), kTokens, num_chosen), 0.0,
                        concat(ranks, ", ", ep, ", ", num_chosen), ExpertExchange::kPadded);
      });
  run_ranks(2, [](World& world) {
    expect_by_loops(world, 2, choices_of(world.rank(), 0, 2), 0.0, "none", ExpertExchange::kPadded);
  });
}

TEST(ExpertRoute, RefusesUnequalTokensWhereRowsHaveRooms) {
  const auto run = [](int64_t first, int64_t second, double capacity_factor) {
    run_ranks(2, [&](World& world) {
      const Mesh mesh = world.mesh({.ep = 2});
      int64_t agreed = -1;
      const auto route_of = [&](int64_t num_tokens) {
        const at::Tensor chosen = choices_of(world.rank(), num_tokens, 2);
        return c10::make_intrusive<ExpertRoute>(sort_choices(chosen, kExperts),
                                                at::ones(chosen.sizes()),
                                                ExpertRanks{.ep = mesh.ep(),
                                                            .capacity_factor = capacity_factor,
                                                            .exchange = ExpertExchange::kPadded,
                                                            .agreed_tokens = &agreed});
      };
      route_of(world.rank() == 0 ? first : kTokens);
      EXPECT_EQ(agreed, kTokens);
      route_of(world.rank() == 0 ? kTokens : second);
    });
  };
  for (const double capacity_factor : {0.0, 1.0}) {
    EXPECT_NO_THROW(run(kTokens, kTokens, capacity_factor));
    EXPECT_THAT([&] { run(kTokens - 4, kTokens, capacity_factor); },
                ThrowsMessage<Error>(
                    AllOf(HasSubstr("tokens for its experts"), HasSubstr("from 20 to 24"))));
    // One rank compares, and the other one does not.
    EXPECT_THAT([&] { run(kTokens, kTokens - 4, capacity_factor); },
                ThrowsMessage<Error>(HasSubstr("'tokens of each rank'")));
  }
}

TEST(ExpertRoute, TakesRanksWithoutTokens) {
  for (const int without : {0, 1, 2})
    run_ranks(2, [&](World& world) {
      const bool has_none = without == 2 || world.rank() == without;
      expect_by_loops(world, 2, choices_of(world.rank(), has_none ? 0 : kTokens, 2), 0.0,
                      concat("none on ", without));
    });
  run_ranks(2, [](World& world) {
    expect_by_loops(world, 2, choices_of(world.rank(), 0, 2), 1.0, "none with a capacity");
  });
}

}  // namespace
}  // namespace fsdp::nn::expert_route_test
