#include "fsdp/nn/selective_scan.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <limits>
#include <vector>

namespace fsdp::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Sizes, in the order of dimensions: batch, chunks, groups, heads of a group, positions of a chunk.
struct Sizes {
  int64_t batch, chunks, groups, heads, positions, head_dim, state;
};

// Zeros behind the end: steps of length zero, which change no state.
at::Tensor padded(const at::Tensor& tensor, int64_t length) {
  const int64_t missing = length - tensor.size(1);
  if (missing == 0) return tensor;
  std::vector<int64_t> padding(static_cast<size_t>(2 * (tensor.dim() - 1)), 0);
  padding.back() = missing;  // pairs (before, after), last dimension first
  return at::constant_pad_nd(tensor, padding, 0);
}

// What position i gets from position j of its chunk, for j <= i: exp(sum(i) - sum(j)), where `sum`
// adds up the logarithms of decays, [..., positions], fp64. Differences of large sums decide here,
// and their gradients are differences of sums again; those are taken in fp64, the matrix is fp32.
class DecayWithin final : public torch::autograd::Function<DecayWithin> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& sum) {
    const at::Tensor high = sum.to(at::kFloat);
    const at::Tensor low = (sum - high).to(at::kFloat);
    const at::Tensor decay = high.unsqueeze(-1) - high.unsqueeze(-2);
    decay.add_(low.unsqueeze(-1)).sub_(low.unsqueeze(-2));
    const int64_t positions = sum.size(-1);
    const at::Tensor is_later =
        at::ones({positions, positions}, decay.options().dtype(at::kBool)).triu_(1);
    decay.masked_fill_(is_later, -std::numeric_limits<double>::infinity()).exp_();
    context->save_for_backward({decay});
    return decay;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const at::Tensor gradient = gradients[0] * context->get_saved_variables()[0];
    gradient.diagonal(0, -2, -1).zero_();  // exp(0), whatever the sums
    return {gradient.sum(-1, false, at::kDouble) - gradient.sum(-2, false, at::kDouble)};
  }
};

// The states that chunks begin with, one after the other. `state` becomes what the last one ends
// with.
at::Tensor states_at_begin(const at::Tensor& added, const at::Tensor& kept, at::Tensor* state) {
  const std::vector<at::Tensor> added_by = added.unbind(1);
  const std::vector<at::Tensor> kept_by = kept.unbind(1);
  const bool is_given = state != nullptr && state->defined();
  std::vector<at::Tensor> states = {is_given ? *state : at::zeros_like(added_by[0])};
  for (size_t chunk = 0; chunk + 1 < added_by.size(); ++chunk)
    states.push_back(at::addcmul(added_by[chunk], states.back(), kept_by[chunk]));
  if (state != nullptr) *state = at::addcmul(added_by.back(), states.back(), kept_by.back());
  return at::stack(states, 1);
}

// One position: the recurrence itself.
at::Tensor one_step(const ScanInput& input, at::Tensor& state) {
  const int64_t batch = input.x.size(0);
  const int64_t groups = input.b.size(2);
  const int64_t heads = input.x.size(2) / groups;
  const auto by_head = [&](const at::Tensor& tensor) {  // [batch, groups, heads, ...]
    return tensor.reshape({batch, groups, heads, -1});
  };
  const at::Tensor kept = by_head((input.step * input.a).exp()).unsqueeze(-1);
  const at::Tensor stepped = by_head(input.x * input.step.unsqueeze(-1)).unsqueeze(-1);
  const at::Tensor b = input.b.reshape({batch, groups, 1, 1, -1});
  const at::Tensor c = input.c.reshape({batch, groups, 1, -1, 1});
  state = at::addcmul(state * kept, stepped, b);
  return at::matmul(state, c).view(input.x.sizes()) + input.x * input.d.unsqueeze(-1);
}

}  // namespace

at::Tensor selective_scan(const ScanInput& input, int64_t chunk_size, at::Tensor* state) {
  const int64_t sequence = input.x.size(1);
  if (sequence == 1 && state != nullptr && state->defined()) return one_step(input, *state);
  const int64_t positions = std::min(chunk_size, sequence);
  const int64_t chunks = (sequence + positions - 1) / positions;
  const Sizes n{.batch = input.x.size(0),
                .chunks = chunks,
                .groups = input.b.size(2),
                .heads = input.x.size(2) / input.b.size(2),
                .positions = positions,
                .head_dim = input.x.size(3),
                .state = input.b.size(3)};
  const auto by_head =
      [&](const at::Tensor& tensor) {  // [batch, chunks, groups, heads, positions, ...]
        return padded(tensor, chunks * positions)
            .view({n.batch, n.chunks, n.positions, n.groups, n.heads, -1})
            .permute({0, 1, 3, 4, 2, 5});
      };
  const auto by_group =
      [&](const at::Tensor& tensor) {  // [batch, chunks, groups, positions, state]
        return padded(tensor, chunks * positions)
            .view({n.batch, n.chunks, n.positions, n.groups, n.state})
            .transpose(2, 3);
      };
  const at::Tensor stepped = by_head(input.x * input.step.unsqueeze(-1));
  const at::Tensor b = by_group(input.b);
  const at::Tensor c = by_group(input.c);
  // First fp64, then sums, so that the gradient's sums are fp64, too.
  const at::Tensor sum = by_head(input.step * input.a).squeeze(-1).to(at::kDouble).cumsum(-1);

  // From the positions of the same chunk.
  const at::Tensor scores = at::matmul(c, b.transpose(-1, -2)).unsqueeze(3);
  const at::Tensor within = at::matmul(scores * DecayWithin::apply(sum), stepped);

  // What each chunk adds to the state, and the state it began with.
  const at::Tensor whole = sum.narrow(-1, positions - 1, 1);
  const at::Tensor until_end = (whole - sum).exp().to(at::kFloat).unsqueeze(-1);
  const at::Tensor weighted = (stepped * until_end).permute({0, 1, 2, 3, 5, 4});
  const at::Tensor added =
      at::matmul(weighted.reshape({n.batch, n.chunks, n.groups, n.heads * n.head_dim, n.positions}),
                 b)
          .view({n.batch, n.chunks, n.groups, n.heads, n.head_dim, n.state});
  const at::Tensor since_begin = sum.exp().to(at::kFloat);
  const at::Tensor kept = since_begin.narrow(-1, positions - 1, 1).unsqueeze(-1);
  const at::Tensor states = states_at_begin(added, kept, state);

  // From the chunks before: [batch, chunks, groups, positions, heads, head_dim].
  const at::Tensor before =
      at::matmul(c, states.flatten(3, 4).transpose(-1, -2))
          .view({n.batch, n.chunks, n.groups, n.positions, n.heads, n.head_dim});
  const at::Tensor y = within.permute({0, 1, 4, 2, 3, 5}) +
                       before.transpose(2, 3) * since_begin.permute({0, 1, 4, 2, 3}).unsqueeze(-1);
  return y.reshape({n.batch, chunks * positions, n.groups * n.heads, n.head_dim})
             .narrow(1, 0, sequence) +
         input.x * input.d.unsqueeze(-1);
}

}  // namespace fsdp::nn
