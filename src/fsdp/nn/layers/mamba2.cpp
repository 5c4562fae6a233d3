#include "fsdp/nn/layers/mamba2.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "fsdp/comm/mesh.h"
#include "fsdp/nn/layers/feed_forward.h"

namespace fsdp::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Sizes, in the order of dimensions: batch, chunks, groups, heads of a group, positions of a chunk.
struct Sizes {
  int64_t batch, chunks, groups, heads, positions, head_dim, state;
};

// Appends zeros: steps of length zero, which change no state.
at::Tensor padded(const at::Tensor& tensor, int64_t length) {
  const int64_t missing = length - tensor.size(1);
  if (missing == 0) return tensor;
  std::vector<int64_t> padding(static_cast<size_t>(2 * (tensor.dim() - 1)), 0);
  padding.back() = missing;  // pairs (before, after), last dimension first
  return at::constant_pad_nd(tensor, padding, 0);
}

// The decay from position j to position i of a chunk, j <= i: exp(sum(i) - sum(j)), where `sum`
// adds up the logarithms of decays, [..., positions], fp64. Differences of large sums, and in the
// gradient again, need fp64; the matrix is fp32.
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

// The states that chunks begin with, one after the other. Sets `state` to the one after the last
// chunk.
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

// The range of first steps, uniform in their logarithm.
constexpr double kFirstStepMin = 0.001;
constexpr double kFirstStepMax = 0.1;

// The sizes of a mixer, or of what one of several ranks has of it.
struct MixerSizes {
  int64_t heads, groups, inner, per_group;  // per_group: of B, and of C

  int64_t convolved() const { return inner + 2 * per_group; }
  std::vector<int64_t> x_b_c() const { return {inner, per_group, per_group}; }
};

MixerSizes sizes_of(const NemotronHConfig& c, int64_t ranks = 1) {
  const int64_t heads = c.mamba_num_heads / ranks;
  const int64_t groups = c.n_groups / ranks;
  return {heads, groups, heads * c.mamba_head_dim, groups * c.ssm_state_size};
}

ProjectionOptions into_mixer(const NemotronHConfig& c) {
  const MixerSizes n = sizes_of(c);
  return {.in = c.hidden_size,
          .out = n.inner + n.convolved() + n.heads,
          .bias = c.use_bias,
          .standard_deviation = c.initializer_range,
          .cut = ProjectionCut::kOutputs,
          .sections = {n.inner, n.inner, n.per_group, n.per_group, n.heads}};
}

ProjectionOptions out_of_mixer(const NemotronHConfig& c) {
  return {.in = sizes_of(c).inner,
          .out = c.hidden_size,
          .bias = c.use_bias,
          .standard_deviation = c.initializer_range,
          .cut = ProjectionCut::kInputs};
}

CausalConv convolution_of(const NemotronHConfig& c) {
  const MixerSizes n = sizes_of(c);
  return CausalConv(n.x_b_c(), c.conv_kernel, c.use_conv_bias);
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
  // Converts before it sums, so that the gradient's sums are fp64, too.
  const at::Tensor sum = by_head(input.step * input.a).squeeze(-1).to(at::kDouble).cumsum(-1);

  // The part from positions of the same chunk.
  const at::Tensor scores = at::matmul(c, b.transpose(-1, -2)).unsqueeze(3);
  const at::Tensor within = at::matmul(scores * DecayWithin::apply(sum), stepped);

  // The state that each chunk adds, and the one it begins with.
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

  // The part from earlier chunks: [batch, chunks, groups, positions, heads, head_dim].
  const at::Tensor before =
      at::matmul(c, states.flatten(3, 4).transpose(-1, -2))
          .view({n.batch, n.chunks, n.groups, n.positions, n.heads, n.head_dim});
  const at::Tensor y = within.permute({0, 1, 4, 2, 3, 5}) +
                       before.transpose(2, 3) * since_begin.permute({0, 1, 4, 2, 3}).unsqueeze(-1);
  return y.reshape({n.batch, chunks * positions, n.groups * n.heads, n.head_dim})
             .narrow(1, 0, sequence) +
         input.x * input.d.unsqueeze(-1);
}

Mamba2Impl::Mamba2Impl(const NemotronHConfig& c)
    : config_(c),
      a_log_(register_parameter("A_log", at::empty({c.mamba_num_heads}))),
      d_(register_parameter("D", at::empty({c.mamba_num_heads}))),
      dt_bias_(register_parameter("dt_bias", at::empty({c.mamba_num_heads}))),
      in_proj_(register_module("in_proj", Projection(into_mixer(c)))),
      conv1d_(register_module("conv1d", convolution_of(c))),
      norm_(register_module("norm", RmsNorm(sizes_of(c).inner, c.layer_norm_epsilon,
                                            NormWeight::kFactor, TpShard{.dim = 0}))),
      out_proj_(register_module("out_proj", Projection(out_of_mixer(c)))) {}

at::Tensor Mamba2Impl::forward(const at::Tensor& own, const LayerContext& context) {
  const NemotronHConfig& c = config_;
  const MixerSizes n = sizes_of(c, tp() == nullptr ? 1 : tp()->size());
  const at::Tensor whole = project(own, {in_proj_}, tp()).front();
  const int64_t batch = whole.size(0);
  const int64_t sequence = whole.size(1);
  const std::vector<at::Tensor> projected =
      whole.split_with_sizes({n.inner, n.convolved(), n.heads}, -1);
  const at::Tensor& gate = projected[0];
  const auto convolve = [&](const std::vector<at::Tensor>& x) {
    return conv1d_(x[0], context.window());
  };
  const std::vector<at::Tensor> convolved =
      at::silu(in_each_document(context.documents, {projected[1]}, convolve))
          .to(at::kFloat)
          .split_with_sizes(n.x_b_c(), -1);
  const at::Tensor step = at::softplus(projected[2].to(at::kFloat) + dt_bias_.to(at::kFloat))
                              .clamp_min(c.time_step_min);
  const auto per_group = [&](const at::Tensor& tensor) {
    return tensor.reshape({batch, sequence, n.groups, c.ssm_state_size});
  };
  const at::Tensor a = a_log_.to(at::kFloat).exp().neg();
  const at::Tensor d = d_.to(at::kFloat);
  const auto scan = [&](const std::vector<at::Tensor>& x) {
    return selective_scan({.x = x[0], .step = x[1], .a = a, .b = x[2], .c = x[3], .d = d},
                          c.chunk_size, context.state());
  };
  const at::Tensor y =
      in_each_document(context.documents,
                       {convolved[0].reshape({batch, sequence, n.heads, c.mamba_head_dim}), step,
                        per_group(convolved[1]), per_group(convolved[2])},
                       scan);
  const at::Tensor gated = gated_silu(gate.to(at::kFloat), y.flatten(2));
  return out_proj_(
      rms_norm(gated, norm_->weight, c.layer_norm_epsilon, n.groups).to(own.scalar_type()));
}

void Mamba2Impl::reset_parameters() {
  const at::NoGradGuard no_grad;
  const auto on_host = at::device(at::kCPU).dtype(at::kFloat);
  a_log_.copy_(at::arange(1, a_log_.numel() + 1, on_host).log());
  d_.fill_(1.0);
  // softplus(dt_bias) is the step without input.
  at::Tensor random = at::empty({dt_bias_.numel()}, on_host);
  fill_uniform(random, "dt_bias", 0.5);
  const double first = std::log(std::max(kFirstStepMin, config_.time_step_min));
  const double last = std::log(kFirstStepMax);
  const at::Tensor step =
      ((random.to(at::kDouble) + 0.5) * std::max(0.0, last - first) + first).exp();
  dt_bias_.copy_(step + (-at::expm1(-step)).log());
}

}  // namespace fsdp::nn
