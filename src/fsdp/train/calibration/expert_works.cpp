#include <ATen/ATen.h>

#include <algorithm>
#include <memory>

#include "fsdp/base/text.h"
#include "fsdp/base/torch_dtype.h"
#include "fsdp/nn/layers/expert_route.h"
#include "fsdp/nn/layers/grouped_linear.h"
#include "fsdp/nn/layers/router.h"
#include "fsdp/train/calibration/call_timer.h"
#include "fsdp/train/calibration/measured_work.h"

namespace fsdp::train {

namespace {

using Sizes = std::span<const int64_t>;
using Tensors = std::vector<at::Tensor>;

// A function for both directions.
struct TwoWays {
  TensorFunction function;
  Tensors inputs;
  Tensors parameters = {};
};

std::vector<MeasuredWork> both_ways(const std::string& name, const std::vector<std::string>& axes,
                                    const std::vector<std::vector<int64_t>>& points,
                                    const std::function<TwoWays(Sizes)>& prepare) {
  return {{.name = concat(name, " forward"),
           .axes = axes,
           .points = points,
           .prepare =
               [=](Sizes sizes) {
                 const TwoWays ways = prepare(sizes);
                 return forward_call(ways.function, ways.inputs);
               }},
          {.name = concat(name, " backward"),
           .axes = axes,
           .points = points,
           .prepare = [=](Sizes sizes) {
             const TwoWays ways = prepare(sizes);
             return backward_call(ways.function, ways.inputs, ways.parameters);
           }}};
}

// Rows spread evenly over experts. Sizes: rows, experts, out, in.
TwoWays grouped_product(Sizes sizes, const WorkPlace& place) {
  const at::Tensor rows = some_numbers({sizes[0], sizes[3]}, place);
  const at::Tensor weight = some_numbers({sizes[1] * sizes[2], sizes[3]}, place);
  const at::Tensor ends = at::arange(1, sizes[1] + 1, at::dtype(at::kLong))
                              .mul_(sizes[0])
                              .div_(sizes[1], "floor")
                              .to(place.device, at::kInt);
  const nn::RowGroups groups = nn::row_groups(rows, ends, {sizes[2], sizes[3]});
  return {[=](const Tensors& in) { return Tensors{nn::grouped_linear(in[0], in[1], groups)}; },
          {rows, weight}};
}

// With its product, choices and their order. Sizes: tokens, experts, in.
TwoWays routed(Sizes sizes, const WorkPlace& place) {
  constexpr int64_t kMostChosen = 8;
  const auto router = std::make_shared<nn::RouterImpl>(
      nn::RouterOptions{.hidden_size = sizes[2],
                        .num_experts = sizes[1],
                        .num_chosen = std::min(kMostChosen, sizes[1] / 2)});
  router->to(place.device, place.dtype);
  const at::Tensor weight = router->parameters()[0];
  {
    const at::NoGradGuard no_grad;
    weight.copy_(some_numbers(weight.sizes(), place));
  }
  return {[=](const Tensors& in) {
            const nn::RoutedChoices choices = router->forward(in[0]);
            return Tensors{choices.weight, choices.load.mean_probability};
          },
          {some_numbers({sizes[0], sizes[2]}, place)},
          {weight}};
}

// Choices of tokens by turns. Sizes: elements of all choices, choices of a token.
struct RoutedRows {
  c10::intrusive_ptr<nn::ExpertRoute> route;
  at::Tensor tokens;
  at::Tensor rows;
  at::Tensor weight;
};

RoutedRows routed_rows(Sizes sizes, const WorkPlace& place) {
  const std::vector<int64_t> shape = rows_of(sizes[0]);
  const int64_t chosen = sizes[1];
  const int64_t tokens = std::max<int64_t>(1, shape[0] / chosen);
  const int64_t experts = 4 * chosen;
  const at::Tensor choices = some_tokens(tokens * chosen, experts, place).view({tokens, chosen});
  return {.route = c10::make_intrusive<nn::ExpertRoute>(nn::sort_choices(choices, experts),
                                                        nn::ExpertRanks{}),
          .tokens = some_numbers({tokens, shape[1]}, place),
          .rows = some_numbers({tokens * chosen, shape[1]}, place),
          .weight = some_numbers({tokens, chosen}, place)};
}

}  // namespace

std::vector<MeasuredWork> expert_works(const WorkPlace& place, const WorkSizes& sizes) {
  std::vector<MeasuredWork> works;
  const auto add = [&](std::vector<MeasuredWork> more) {
    for (MeasuredWork& work : more) works.push_back(std::move(work));
  };
  add(both_ways(concat("grouped product ", name_of(dtype_of(place.dtype))),
                {"rows", "experts", "out", "in"},
                {sizes.expert_rows, sizes.experts, sizes.expert_widths, sizes.expert_widths},
                [place](Sizes at) { return grouped_product(at, place); }));
  add(both_ways("router", {"tokens", "experts", "in"},
                {sizes.tokens, sizes.experts, sizes.expert_widths},
                [place](Sizes at) { return routed(at, place); }));
  const std::vector<std::vector<int64_t>> choices = {sizes.elements, {2, 8}};
  add(both_ways("dispatch", {"elements", "chosen"}, choices, [place](Sizes at) -> TwoWays {
    const RoutedRows routed = routed_rows(at, place);
    return {[route = routed.route](const Tensors& in) { return Tensors{dispatch(in[0], route)}; },
            {routed.tokens}};
  }));
  add(both_ways("combine", {"elements", "chosen"}, choices, [place](Sizes at) -> TwoWays {
    const RoutedRows routed = routed_rows(at, place);
    return {
        [route = routed.route](const Tensors& in) { return Tensors{combine(in[0], in[1], route)}; },
        {routed.rows, routed.weight}};
  }));
  return works;
}

}  // namespace fsdp::train
