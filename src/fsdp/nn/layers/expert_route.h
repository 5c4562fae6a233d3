// The way of tokens to the experts they chose, and of the results back: sorted by expert, through
// the ranks of an ep group where experts are shared out. Nothing is dropped unless a capacity is
// set, and in a padded exchange nothing waits for the host.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "fsdp/nn/language_model.h"

namespace fsdp {
class Communicator;
class MeshAxis;
}  // namespace fsdp

namespace fsdp::nn {

struct CombineMemory;

// A choice is one token with one of its experts: choice c is of token c / num_chosen.
struct SortedChoices {
  at::Tensor chosen;   // [tokens, num_chosen], the expert of each choice
  at::Tensor order;    // [choices], sorted by expert, and by token among those of one expert
  at::Tensor inverse;  // where a choice is in that order
  at::Tensor ends;     // [experts], where the choices of each expert end
};
SortedChoices sort_choices(const at::Tensor& chosen, int64_t num_experts);

// The ranks that share out the experts of a layer, equally many and in order.
struct ExpertRanks {
  const MeshAxis* ep = nullptr;  // nullptr: this rank has all experts
  // Every expert has room for this many times the rows that each rank would send it in an even
  // load; choices beyond it, those with the smallest weights, count nothing. 0: for all rows that
  // could come.
  double capacity_factor = 0.0;
  ExpertExchange exchange = ExpertExchange::kAuto;
  // The number of tokens that all of them have agreed on, kept from call to call: a padded exchange
  // compares numbers where this one is another. nullptr: it does so every time.
  int64_t* agreed_tokens = nullptr;

  bool pads(c10::Device device) const;
};

// Slots are rows on their way: of this rank's choices, in parts that go to one rank each. In an
// exact exchange a slot is a sorted choice. In a padded one the parts are equally long, with slots
// at their ends that carry no choice of theirs and that nobody reads at the other side.
class ExpertRoute final : public torch::CustomClassHolder {
 public:
  // `weight`: [tokens, num_chosen], by which a bounded expert picks its choices; of equal ones it
  // takes those of earlier tokens.
  ExpertRoute(const SortedChoices& choices, const at::Tensor& weight, const ExpertRanks& ranks);

  // [experts of this rank], int32, on the choices' device: where the rows of each expert end. Rows
  // behind the last end are nobody's.
  const at::Tensor& ends() const { return ends_; }
  // The share of this rank's choices that found no room, one fp32 element; undefined if all have.
  const at::Tensor& dropped() const { return dropped_; }

  // Tokens [tokens, n] to rows sorted by this rank's experts; and such rows times the weights
  // [tokens, num_chosen] of their choices, added up for each token, to [tokens, n]. With gradients.
  friend at::Tensor dispatch(const at::Tensor& tokens, c10::intrusive_ptr<ExpertRoute> route);
  friend at::Tensor combine(const at::Tensor& rows, const at::Tensor& weight,
                            c10::intrusive_ptr<ExpertRoute> route);

 private:
  friend class Dispatch;
  friend class Combine;
  enum class Way : uint8_t { kForward, kBackward };

  void share_out(const SortedChoices& choices, const at::Tensor& weight, const ExpertRanks& ranks);
  void bound_parts(const SortedChoices& choices, const at::Tensor& weight, double capacity_factor,
                   at::Tensor& counts);
  void drop_beyond(int64_t capacity, const SortedChoices& choices, const at::Tensor& weight,
                   at::Tensor& counts);
  at::Tensor received_counts(const at::Tensor& counts) const;

  // Slots of this rank to rows of its experts, and back.
  at::Tensor to_experts(const at::Tensor& slots, Way way) const;
  at::Tensor from_experts(const at::Tensor& rows, Way way) const;
  Communicator& ranks_of(Way way) const;

  at::Tensor token_of_slot() const { return choice_of_slot_.div(num_chosen_, "floor"); }
  at::Tensor of_choices(const at::Tensor& slots) const;
  CombineMemory memory_of(const at::Tensor& slots, const at::Tensor& weight) const;
  at::Tensor sum_of(const at::Tensor& slots, const at::Tensor& weight) const;
  std::pair<at::Tensor, at::Tensor> sum_backward(const at::Tensor& slots, const at::Tensor& weight,
                                                 const at::Tensor& gradient) const;

  const int64_t num_chosen_;
  const MeshAxis* const ep_;
  at::Tensor choice_of_slot_;
  at::Tensor slot_of_choice_;             // -1 for those that found no room
  std::vector<int64_t> sent_, received_;  // slots per rank of the ep group
  at::Tensor by_expert_, by_slot_;        // received slots in the order of experts, and back
  at::Tensor ends_;
  at::Tensor dropped_;
};

}  // namespace fsdp::nn
