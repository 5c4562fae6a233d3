#include "fsdp/nn/layers/expert_route.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "fsdp/base/integer.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/comm/mesh.h"

namespace fsdp::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Route = c10::intrusive_ptr<ExpertRoute>;

at::Tensor inverse_of(const at::Tensor& order) {
  return at::empty_like(order).scatter_(0, order, at::arange(order.size(0), order.options()));
}

std::vector<int64_t> on_host(const at::Tensor& numbers) {
  const at::Tensor host = numbers.to(at::kCPU).contiguous();
  const auto* first = host.const_data_ptr<int64_t>();
  return {first, first + host.numel()};
}

void keep(AutogradContext* context, const Route& route) {
  context->saved_data["route"] = c10::IValue::make_capsule(route);
}

Route kept_by(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<ExpertRoute>(context->saved_data["route"].toCapsule());
}

}  // namespace

SortedChoices sort_choices(const at::Tensor& chosen, int64_t num_experts) {
  // Numbers of four bytes are sorted in half the passes.
  auto [sorted, order] = at::sort(chosen.reshape({-1}).to(at::kInt), /*stable=*/true, /*dim=*/0,
                                  /*descending=*/false);
  const at::Tensor experts = at::arange(num_experts, sorted.options());
  return {.chosen = chosen,
          .order = order,
          .inverse = inverse_of(order),
          .ends = at::searchsorted(sorted, experts, /*out_int32=*/false, /*right=*/true)};
}

ExpertRoute::ExpertRoute(const SortedChoices& choices, const ExpertRanks& ranks)
    : num_chosen_(choices.chosen.size(1)),
      ep_(ranks.ep),
      choice_of_slot_(choices.order),
      slot_of_choice_(choices.inverse),
      ends_(choices.ends.to(at::kInt)) {
  if (ep_ != nullptr) share_out(choices, ranks.capacity_factor);
}

void ExpertRoute::share_out(const SortedChoices& choices, double capacity_factor) {
  at::Tensor counts = at::diff(choices.ends, 1, 0, at::zeros({1}, choices.ends.options()))
                          .view({ep_->size(), -1});  // per rank, for each of its experts
  if (counts.is_cuda())
    bound_parts(choices, counts, capacity_factor);
  else
    sent_ = on_host(counts.sum(1));
  const at::Tensor received = received_counts(counts);
  if (received_.empty()) received_ = on_host(received.sum(1));
  by_expert_ = at::argsort(experts_of_slots(received), /*stable=*/true, /*dim=*/0,
                           /*descending=*/false);
  by_slot_ = inverse_of(by_expert_);
  ends_ = received.sum(0).cumsum(0).to(at::kInt);
}

// Gives every rank equally many slots; `counts` loses the choices that find none.
void ExpertRoute::bound_parts(const SortedChoices& choices, at::Tensor& counts,
                              double capacity_factor) {
  const int64_t num_experts = counts.size(1);  // of one rank
  const int64_t num_choices = choices.order.size(0);
  const int64_t num_tokens = num_choices / num_chosen_;
  const int64_t most = num_tokens * std::min(num_chosen_, num_experts);
  const double even = static_cast<double>(num_choices) / static_cast<double>(ep_->size());
  const int64_t room =
      capacity_factor == 0.0
          ? most
          : std::clamp<int64_t>(std::llround(std::ceil(capacity_factor * even)), 1, most);
  sent_.assign(static_cast<size_t>(ep_->size()), room);
  received_ = sent_;

  const at::Tensor ends = choices.ends.view_as(counts).select(1, num_experts - 1);
  const at::Tensor begins = ends - counts.sum(1);
  const at::Tensor places = at::arange(room, ends.options());
  const at::Tensor sorted =
      (begins.unsqueeze(1) + places).clamp_max(num_choices - 1).flatten();  // a slot's choice
  choice_of_slot_ = choices.order.index_select(0, sorted);

  const at::Tensor rank = choices.chosen.flatten().div(num_experts, "floor");
  at::Tensor place = choices.inverse - begins.index_select(0, rank);
  if (room < most) {
    kept_ = place.lt(room).unsqueeze(1);
    dropped_ = 1.0 - kept_.to(at::kFloat).mean().view({1});
    place = place.clamp_max(room - 1);
    const at::Tensor within = counts.cumsum(1).clamp_max(room);
    counts = at::diff(within, 1, 1, at::zeros({counts.size(0), 1}, counts.options()));
  }
  slot_of_choice_ = rank * room + place;
}

at::Tensor ExpertRoute::received_counts(const at::Tensor& counts) const {
  at::Tensor received = counts.clone();  // in a simulated world, where nothing comes: all alike
  ep_->gather().all_to_all(received, counts.contiguous(), "expert counts").wait();
  return received;
}

// The expert of every received slot among this rank's, and their number for one without a choice.
at::Tensor ExpertRoute::experts_of_slots(const at::Tensor& counts) const {
  if (!counts.is_cuda()) return at::repeat_interleave(counts.flatten()).remainder(counts.size(1));
  const at::Tensor places =
      at::arange(received_[0], counts.options()).expand({counts.size(0), -1}).contiguous();
  return at::searchsorted(counts.cumsum(1), places, /*out_int32=*/true, /*right=*/true).flatten();
}

at::Tensor ExpertRoute::exchange(const at::Tensor& rows, const std::vector<int64_t>& sent,
                                 const std::vector<int64_t>& received, Way way) const {
  const int64_t width = rows.size(1);
  const auto in_elements = [width](std::vector<int64_t> counts) {
    for (int64_t& count : counts) count *= width;
    return counts;
  };
  int64_t num_rows = 0;
  for (const int64_t count : received) num_rows += count;
  at::Tensor result = at::empty({num_rows, width}, rows.options());
  Communicator& ranks = way == Way::kForward ? ep_->gather() : ep_->reduce();
  ranks
      .all_to_all(result, rows.contiguous(), "expert rows", in_elements(received),
                  in_elements(sent))
      .wait();
  return result;
}

at::Tensor ExpertRoute::to_experts(const at::Tensor& slots, Way way) const {
  if (ep_ == nullptr) return slots;
  return exchange(slots, sent_, received_, way).index_select(0, by_expert_);
}

at::Tensor ExpertRoute::from_experts(const at::Tensor& rows, Way way) const {
  if (ep_ == nullptr) return rows;
  return exchange(rows.index_select(0, by_slot_), received_, sent_, way);
}

at::Tensor ExpertRoute::of_choices(const at::Tensor& slots) const {
  const at::Tensor rows = slots.index_select(0, slot_of_choice_);
  return kept_.defined() ? rows.masked_fill(kept_.logical_not(), 0.0) : rows;
}

// Both ways gather rows in both directions and never scatter them, so that sums have one order on
// every device.
class Dispatch final : public torch::autograd::Function<Dispatch> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tokens,
                            const Route& route) {
    keep(context, route);
    const at::Tensor token_of_slot = route->choice_of_slot_.div(route->num_chosen_, "floor");
    return route->to_experts(tokens.index_select(0, token_of_slot), ExpertRoute::Way::kForward);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const Route route = kept_by(context);
    const at::Tensor rows =
        route->of_choices(route->from_experts(gradients[0], ExpertRoute::Way::kBackward));
    return {rows.view({-1, route->num_chosen_, rows.size(1)}).sum(1), at::Tensor()};
  }
};

class Collect final : public torch::autograd::Function<Collect> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& rows, const Route& route) {
    keep(context, route);
    return route->of_choices(route->from_experts(rows, ExpertRoute::Way::kForward));
  }

  // The gradient of a choice without room goes to nobody: no slot that is read has it.
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const Route route = kept_by(context);
    return {route->to_experts(gradients[0].index_select(0, route->choice_of_slot_),
                              ExpertRoute::Way::kBackward),
            at::Tensor()};
  }
};

// Autograd's own backward of such a product multiplies every token's column by its row as a matrix
// product, which takes a GPU five times as long as the multiplication.
class WeightedSum final : public torch::autograd::Function<WeightedSum> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& by_choice,
                            const at::Tensor& weight) {
    context->save_for_backward({by_choice, weight});
    return at::bmm(weight.unsqueeze(1), by_choice).squeeze(1);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor gradient = gradients[0].unsqueeze(1);
    return {saved[1].unsqueeze(2) * gradient,
            at::bmm(gradient, saved[0].transpose(1, 2)).squeeze(1)};
  }
};

at::Tensor dispatch(const at::Tensor& tokens, Route route) {
  return Dispatch::apply(tokens, route);
}

at::Tensor collect(const at::Tensor& rows, Route route) {
  const int64_t num_chosen = route->num_chosen_;
  const at::Tensor by_choice = Collect::apply(rows, route);
  return by_choice.view({-1, num_chosen, by_choice.size(1)});
}

at::Tensor weighted_sum(const at::Tensor& by_choice, const at::Tensor& weight) {
  return WeightedSum::apply(by_choice, weight);
}

}  // namespace fsdp::nn
