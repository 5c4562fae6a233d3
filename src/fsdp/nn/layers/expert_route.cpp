#include "fsdp/nn/layers/expert_route.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/comm/mesh.h"
#include "fsdp/nn/kernels/kernel_calls.h"
#include "fsdp/nn/layers/rank_slices.h"

namespace fsdp::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Route = c10::intrusive_ptr<ExpertRoute>;

constexpr int64_t kNoSlot = -1;  // of a choice that found no room

// [ranks, room]: the expert of every slot among those of its rank, and their number for a slot
// without a choice; `counts`: [ranks, experts].
at::Tensor experts_of_slots(const at::Tensor& counts, int64_t room) {
  const at::Tensor places =
      at::arange(room, counts.options()).expand({counts.size(0), -1}).contiguous();
  return at::searchsorted(counts.cumsum(1), places, /*out_int32=*/true, /*right=*/true);
}

at::Tensor inverse_of(const at::Tensor& order) {
  return at::empty_like(order).scatter_(0, order, at::arange(order.size(0), order.options()));
}

// [ranks]: where the choices of each rank begin; `counts`: [ranks, experts].
at::Tensor begins_of_rows(const at::Tensor& counts) {
  const at::Tensor sums = counts.sum(1);
  return sums.cumsum(0) - sums;
}

std::vector<int64_t> on_host(const at::Tensor& numbers) {
  const at::Tensor host = numbers.to(at::kCPU).contiguous();
  const auto* first = host.const_data_ptr<int64_t>();
  return {first, first + host.numel()};
}

SortedChoices sort_on_device(const at::Tensor& chosen_in, int64_t num_experts) {
  const at::Tensor chosen = chosen_in.contiguous();
  const int64_t num_choices = chosen.numel();
  SortedChoices sorted{.chosen = chosen,
                       .order = at::empty({num_choices}, chosen.options()),
                       .inverse = at::empty({num_choices}, chosen.options()),
                       .ends = at::empty({num_experts}, chosen.options())};
  at::Tensor counts =
      at::empty({choice_block_counts(num_choices, num_experts)}, chosen.options().dtype(at::kInt));
  const OnDeviceOf on_device(chosen);
  sort_choices_on_device({.num_choices = num_choices,
                          .num_experts = num_experts,
                          .chosen = chosen.const_data_ptr<int64_t>(),
                          .block_counts = counts.mutable_data_ptr<int32_t>(),
                          .order = sorted.order.mutable_data_ptr<int64_t>(),
                          .inverse = sorted.inverse.mutable_data_ptr<int64_t>(),
                          .ends = sorted.ends.mutable_data_ptr<int64_t>()},
                         on_device.stream());
  return sorted;
}

// Whether a choice finds no room at its expert, which takes as many as it can of the largest
// weight.
at::Tensor choices_beyond(int64_t capacity, const SortedChoices& choices,
                          const at::Tensor& weight) {
  const at::Tensor by_weight = at::argsort(weight.detach().flatten(), /*stable=*/true, /*dim=*/0,
                                           /*descending=*/true);
  const at::Tensor expert = choices.chosen.flatten().index_select(0, by_weight);
  const SortedChoices sorted = sort_choices(expert.unsqueeze(1), choices.ends.size(0));
  const at::Tensor begins = at::constant_pad_nd(sorted.ends, {1, -1});
  const at::Tensor place = sorted.inverse - begins.index_select(0, expert);
  return place.ge(capacity).index_select(0, inverse_of(by_weight));
}

// Ranks whose rooms differed would take each other's rows for their own. If only some of them have
// another number than before, they wait here for the others, and the error says so.
void agree_on_tokens(int64_t num_tokens, const ExpertRanks& ranks) {
  if (ranks.agreed_tokens != nullptr && *ranks.agreed_tokens == num_tokens) return;
  Communicator& all = ranks.ep->gather();
  const at::Tensor most = at::tensor({num_tokens, -num_tokens}, at::kLong);
  all.all_reduce(most, {.op = ReduceOp::kMax}, "tokens of each rank").wait();
  const auto largest = most[0].item<int64_t>();
  const auto smallest = -most[1].item<int64_t>();
  FSDP_CHECK(largest == smallest, "rank ", all.rank(), " of '", all.name(), "' has ", num_tokens,
             " tokens for its experts, and the ranks have from ", smallest, " to ", largest,
             ": give all ranks batches of one size, or exchange rows exactly "
             "(BuildOptions::expert_exchange, --expert-exchange exact)");
  if (ranks.agreed_tokens != nullptr) *ranks.agreed_tokens = num_tokens;
}

void keep(AutogradContext* context, const Route& route) {
  context->saved_data["route"] = c10::IValue::make_capsule(route);
}

Route kept_by(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<ExpertRoute>(context->saved_data["route"].toCapsule());
}

}  // namespace

SortedChoices sort_choices(const at::Tensor& chosen, int64_t num_experts) {
  if (has_kernels_on(chosen.device()) && num_experts <= kMaxSortedExperts)
    return sort_on_device(chosen, num_experts);
  // Numbers of four bytes are sorted in half the passes.
  auto [sorted, order] = at::sort(chosen.reshape({-1}).to(at::kInt), /*stable=*/true, /*dim=*/0,
                                  /*descending=*/false);
  const at::Tensor experts = at::arange(num_experts, sorted.options());
  return {.chosen = chosen,
          .order = order,
          .inverse = inverse_of(order),
          .ends = at::searchsorted(sorted, experts, /*out_int32=*/false, /*right=*/true)};
}

bool ExpertRanks::pads(c10::Device device) const {
  if (capacity_factor > 0.0 || exchange == ExpertExchange::kPadded) return true;
  const Communicator& all = ep->gather();
  return exchange == ExpertExchange::kAuto && device.is_cuda() && all.sum_group() == all.size();
}

ExpertRoute::ExpertRoute(const SortedChoices& choices, const at::Tensor& weight,
                         const ExpertRanks& ranks)
    : num_chosen_(choices.chosen.size(1)),
      ep_(ranks.ep),
      choice_of_slot_(choices.order),
      slot_of_choice_(choices.inverse),
      ends_(choices.ends.to(at::kInt)) {
  if (ep_ != nullptr) share_out(choices, weight, ranks);
}

void ExpertRoute::share_out(const SortedChoices& choices, const at::Tensor& weight,
                            const ExpertRanks& ranks) {
  at::Tensor counts = at::diff(choices.ends, 1, 0, at::zeros({1}, choices.ends.options()))
                          .view({ep_->size(), -1});  // per rank, for each of its experts
  const bool is_bounded = ranks.pads(counts.device());
  if (is_bounded) {
    agree_on_tokens(choices.chosen.size(0), ranks);
    bound_parts(choices, weight, ranks.capacity_factor, counts);
  }
  const at::Tensor received = received_counts(counts);
  if (!is_bounded) {  // the host waits here, and nowhere else
    const std::vector<int64_t> both = on_host(at::cat({counts.sum(1), received.sum(1)}));
    const auto middle = both.begin() + ep_->size();
    sent_.assign(both.begin(), middle);
    received_.assign(middle, both.end());
  }
  const std::optional<int64_t> num_received =
      std::accumulate(received_.begin(), received_.end(), int64_t{0});
  const at::Tensor experts =
      is_bounded
          ? experts_of_slots(received, received_[0]).flatten()
          : at::repeat_interleave(received.flatten(), num_received).remainder(received.size(1));
  by_expert_ = at::argsort(experts, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  by_slot_ = inverse_of(by_expert_);
  ends_ = received.sum(0).cumsum(0).to(at::kInt);
}

// Gives every rank equally many slots, and every expert as much room; `counts` loses the choices
// that find none. Slots are in the order of experts, and choices in their rank's part of it.
void ExpertRoute::bound_parts(const SortedChoices& choices, const at::Tensor& weight,
                              double capacity_factor, at::Tensor& counts) {
  const int64_t num_experts = counts.size(1);  // of one rank
  const int64_t num_choices = choices.order.size(0);
  const int64_t num_tokens = num_choices / num_chosen_;
  const double even = static_cast<double>(num_choices) / static_cast<double>(counts.numel());
  const int64_t capacity =  // of an expert
      capacity_factor == 0.0
          ? num_tokens
          : std::min<int64_t>(std::llround(std::ceil(capacity_factor * even)), num_tokens);
  const int64_t room =
      std::min(num_tokens * std::min(num_chosen_, num_experts), checked_mul(capacity, num_experts));
  sent_.assign(static_cast<size_t>(ep_->size()), room);
  received_ = sent_;
  if (capacity < num_tokens) return drop_beyond(capacity, choices, weight, counts);

  const at::Tensor begins = begins_of_rows(counts);
  const at::Tensor rank = choices.chosen.flatten().div(num_experts, "floor");
  slot_of_choice_ = rank * room + choices.inverse - begins.index_select(0, rank);
  const at::Tensor places = begins.unsqueeze(1) + at::arange(room, counts.options());
  choice_of_slot_ = choices.order.index_select(0, places.clamp_max(num_choices - 1).flatten());
}

void ExpertRoute::drop_beyond(int64_t capacity, const SortedChoices& choices,
                              const at::Tensor& weight, at::Tensor& counts) {
  const int64_t room = sent_[0];
  const at::Tensor is_lost = choices_beyond(capacity, choices, weight);
  dropped_ = is_lost.to(at::kFloat).mean().view({1});
  counts = counts.clamp_max(capacity);
  const at::Tensor rank = choices.chosen.flatten().div(counts.size(1), "floor");
  const at::Tensor is_kept = is_lost.logical_not().to(at::kLong).index_select(0, choices.order);
  const at::Tensor kept_before = (is_kept.cumsum(0) - is_kept).index_select(0, choices.inverse);
  slot_of_choice_ = rank * room + kept_before - begins_of_rows(counts).index_select(0, rank);
  slot_of_choice_.masked_fill_(is_lost, kNoSlot);
  // Lost choices are written behind the last slot, whatever their order: nobody reads there.
  const int64_t num_slots = counts.size(0) * room;
  choice_of_slot_ = at::zeros({num_slots + 1}, counts.options())
                        .scatter_(0, slot_of_choice_.masked_fill(is_lost, num_slots),
                                  at::arange(is_lost.size(0), counts.options()))
                        .narrow(0, 0, num_slots);
}

at::Tensor ExpertRoute::received_counts(const at::Tensor& counts) const {
  at::Tensor received = counts.clone();  // in a simulated world, where nothing comes: all alike
  ep_->gather().all_to_all(received, counts.contiguous(), "expert counts").wait();
  return received;
}

Communicator& ExpertRoute::ranks_of(Way way) const {
  return way == Way::kForward ? ep_->gather() : ep_->reduce();
}

at::Tensor ExpertRoute::to_experts(const at::Tensor& slots, Way way) const {
  if (ep_ == nullptr) return slots;
  return rows_exchanged(slots, received_, sent_, ranks_of(way)).index_select(0, by_expert_);
}

at::Tensor ExpertRoute::from_experts(const at::Tensor& rows, Way way) const {
  if (ep_ == nullptr) return rows;
  return rows_exchanged(rows.index_select(0, by_slot_), sent_, received_, ranks_of(way));
}

at::Tensor ExpertRoute::of_choices(const at::Tensor& slots) const {
  if (!dropped_.defined()) return slots.index_select(0, slot_of_choice_);
  return slots.index_select(0, slot_of_choice_.clamp_min(0))
      .masked_fill(slot_of_choice_.eq(kNoSlot).unsqueeze(1), 0.0);
}

CombineMemory ExpertRoute::memory_of(const at::Tensor& slots, const at::Tensor& weight) const {
  return {.dtype = dtype_of(slots.scalar_type()),
          .num_tokens = slot_of_choice_.numel() / num_chosen_,
          .num_chosen = num_chosen_,
          .size = slots.size(1),
          .rows = slots.const_data_ptr(),
          .row_of_choice = slot_of_choice_.const_data_ptr<int64_t>(),
          .weights = weight.defined() ? weight.const_data_ptr() : nullptr};
}

// A token's sum of its choices' slots, times their weights if these are defined.
at::Tensor ExpertRoute::sum_of(const at::Tensor& slots, const at::Tensor& weight) const {
  if (!has_kernels(slots)) {
    const at::Tensor by_choice = of_choices(slots).view({-1, num_chosen_, slots.size(1)});
    return weight.defined() ? at::bmm(weight.unsqueeze(1), by_choice).squeeze(1) : by_choice.sum(1);
  }
  const CombineMemory memory = memory_of(slots, weight);
  at::Tensor sum = at::empty({memory.num_tokens, memory.size}, slots.options());
  const OnDeviceOf on_device(slots);
  combine_on_device(memory, sum.mutable_data_ptr(), on_device.stream());
  return sum;
}

// The gradients of slots and weights.
std::pair<at::Tensor, at::Tensor> ExpertRoute::sum_backward(const at::Tensor& slots,
                                                            const at::Tensor& weight,
                                                            const at::Tensor& gradient) const {
  if (!has_kernels(slots)) {
    const at::Tensor by_choice = of_choices(slots).view({-1, num_chosen_, slots.size(1)});
    const at::Tensor of_weight =
        at::bmm(gradient.unsqueeze(1), by_choice.transpose(1, 2)).squeeze(1);
    return {gradient.index_select(0, token_of_slot()) *
                weight.flatten().index_select(0, choice_of_slot_).unsqueeze(1),
            of_weight};
  }
  at::Tensor of_slots = at::empty_like(slots);
  at::Tensor of_weight = at::empty_like(weight);
  const OnDeviceOf on_device(slots);
  combine_backward_on_device(memory_of(slots, weight), gradient.const_data_ptr(),
                             of_slots.mutable_data_ptr(), of_weight.mutable_data_ptr(),
                             on_device.stream());
  return {of_slots, of_weight};
}

// Both ways gather rows in both directions and never scatter them, so that sums have one order on
// every device.
class Dispatch final : public torch::autograd::Function<Dispatch> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tokens,
                            const Route& route) {
    keep(context, route);
    return route->to_experts(tokens.index_select(0, route->token_of_slot()),
                             ExpertRoute::Way::kForward);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const Route route = kept_by(context);
    const at::Tensor slots =
        route->from_experts(gradients[0].contiguous(), ExpertRoute::Way::kBackward);
    return {route->sum_of(slots, {}), at::Tensor()};
  }
};

class Combine final : public torch::autograd::Function<Combine> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& rows,
                            const at::Tensor& weight_in, const Route& route) {
    keep(context, route);
    const at::Tensor weight = weight_in.contiguous();
    const at::Tensor slots = route->from_experts(rows.contiguous(), ExpertRoute::Way::kForward);
    context->save_for_backward({slots, weight});
    return route->sum_of(slots, weight);
  }

  // The gradient of a choice without room goes to nobody: no slot that is read has it.
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const Route route = kept_by(context);
    const variable_list saved = context->get_saved_variables();
    const auto [of_slots, of_weight] =
        route->sum_backward(saved[0], saved[1], gradients[0].contiguous());
    return {route->to_experts(of_slots, ExpertRoute::Way::kBackward), of_weight, at::Tensor()};
  }
};

at::Tensor dispatch(const at::Tensor& tokens, Route route) {
  return Dispatch::apply(tokens, route);
}

at::Tensor combine(const at::Tensor& rows, const at::Tensor& weight, Route route) {
  return Combine::apply(rows, weight, route);
}

}  // namespace fsdp::nn
