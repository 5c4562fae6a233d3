#include "fsdp/nn/layers/rotary.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numbers>
#include <variant>

#include "fsdp/nn/kernels/kernel_calls.h"

namespace fsdp::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Two channels that turn together.
struct ChannelPair {
  int64_t number;    // of rotary_dim / 2
  double frequency;  // before scaling
  int64_t rotary_dim;
  double theta;
};

double scaled(const ChannelPair& pair, const std::monostate&) { return pair.frequency; }

// Stretches wavelengths beyond the positions of the first training, keeps short ones, and blends
// smoothly in between.
double scaled(const ChannelPair& pair, const Llama3RopeScaling& scaling) {
  const double frequency = pair.frequency;
  const double turns = static_cast<double>(scaling.original_max_position_embeddings) * frequency /
                       (2.0 * std::numbers::pi);
  if (turns < scaling.low_freq_factor) return frequency / scaling.factor;
  if (turns > scaling.high_freq_factor) return frequency;
  const double smooth =
      (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor);
  return (1.0 - smooth) * frequency / scaling.factor + smooth * frequency;
}

// Slows down between two pairs of channels, by their numbers; the published model class rounds them
// outwards.
double scaled(const ChannelPair& pair, const YarnRopeScaling& scaling) {
  const auto dim = static_cast<double>(pair.rotary_dim);
  const auto number_with_turns = [&](double turns) {
    const auto positions = static_cast<double>(scaling.original_max_position_embeddings);
    return dim * std::log(positions / (turns * 2.0 * std::numbers::pi)) /
           (2.0 * std::log(pair.theta));
  };
  const double first = std::max(std::floor(number_with_turns(scaling.beta_fast)), 0.0);
  const double last = std::min(std::ceil(number_with_turns(scaling.beta_slow)), dim - 1.0);
  const double width = first == last ? 0.001 : last - first;
  const double slowed = std::clamp((static_cast<double>(pair.number) - first) / width, 0.0, 1.0);
  return pair.frequency * (slowed / scaling.factor + (1.0 - slowed));
}

double magnitude_of(const RopeScaling& scaling) {
  const auto* yarn = std::get_if<YarnRopeScaling>(&scaling);
  if (yarn == nullptr) return 1.0;
  if (yarn->attention_factor > 0.0) return yarn->attention_factor;
  if (yarn->mscale == 0.0 || yarn->mscale_all_dim == 0.0) return yarn_mscale(yarn->factor, 1.0);
  return yarn_mscale(yarn->factor, yarn->mscale) / yarn_mscale(yarn->factor, yarn->mscale_all_dim);
}

using Direction = RotationDirection;

// One pass on the host, where ATen needs four.
void rotate_on_host(const at::Tensor& x, const at::Tensor& y, const at::Tensor& cosine,
                    const at::Tensor& sine, float sign) {
  const int64_t sequence = x.size(1);
  const int64_t heads = x.size(2);
  const int64_t half = x.size(3) / 2;
  const int64_t num_angles = cosine.numel() / half;  // those of one sequence, or of all
  const auto* from = x.const_data_ptr<float>();
  auto* to = y.data_ptr<float>();
  const auto* cosines = cosine.const_data_ptr<float>();
  const auto* sines = sine.const_data_ptr<float>();
  at::parallel_for(0, x.size(0) * sequence, 32, [&](int64_t begin, int64_t end) {
    for (int64_t position = begin; position < end; ++position) {
      const float* c = cosines + position % num_angles * half;
      const float* s = sines + position % num_angles * half;
      for (int64_t head = 0; head < heads; ++head) {
        const float* a = from + (position * heads + head) * 2 * half;
        float* b = to + (position * heads + head) * 2 * half;
        for (int64_t i = 0; i < half; ++i) {
          b[i] = a[i] * c[i] - a[i + half] * (sign * s[i]);
          b[i + half] = a[i + half] * c[i] + a[i] * (sign * s[i]);
        }
      }
    }
  });
}

at::Tensor rotated(const at::Tensor& x_in, const at::Tensor& cosine, const at::Tensor& sine,
                   Direction direction) {
  const at::Tensor x = x_in.contiguous();
  if (x.device().is_cpu() && x.scalar_type() == at::kFloat) {
    at::Tensor y = at::empty_like(x);
    rotate_on_host(x, y, cosine, sine, direction == Direction::kForward ? 1.0f : -1.0f);
    return y;
  }
  const at::Tensor wide = x.to(at::kFloat);
  const at::Tensor y = at::empty_like(wide);
  const at::Tensor c = cosine.unsqueeze(-2);  // over the heads
  const at::Tensor s = sine.unsqueeze(-2);
  const std::vector<at::Tensor> from = wide.chunk(2, -1);
  std::vector<at::Tensor> to = y.chunk(2, -1);
  const double sign = direction == Direction::kForward ? 1.0 : -1.0;
  at::mul_out(to[0], from[0], c).addcmul_(from[1], s, -sign);
  at::mul_out(to[1], from[1], c).addcmul_(from[0], s, sign);
  return y.to(x.scalar_type());
}

RotatedHeads strided_heads(const at::Tensor& from, const at::Tensor& to) {
  return {.from = from.const_data_ptr(),
          .to = to.mutable_data_ptr(),
          .num_heads = from.size(2),
          .strides = {from.stride(0), from.stride(1), from.stride(2)}};
}

// Rotates queries and keys in one launch, for any strides of their heads.
QueryAndKey rotated_by_kernel(const QueryAndKey& x, const RotaryTables& tables,
                              Direction direction) {
  const auto with_dense_heads = [](const at::Tensor& heads) {
    return heads.stride(3) == 1 ? heads : heads.contiguous();
  };
  const QueryAndKey from{with_dense_heads(x.query), with_dense_heads(x.key)};
  const QueryAndKey to{at::empty(x.query.sizes(), x.query.options()),
                       at::empty(x.key.sizes(), x.key.options())};
  const OnDeviceOf on_device(x.query);
  rotate_on_device({strided_heads(from.query, to.query), strided_heads(from.key, to.key)},
                   {.dtype = dtype_of(x.query.scalar_type()),
                    .batch = x.query.size(0),
                    .sequence = x.query.size(1),
                    .head_dim = x.query.size(3)},
                   {.cosine = tables.cosine.const_data_ptr<float>(),
                    .sine = tables.sine.const_data_ptr<float>(),
                    .batch_stride = tables.cosine.dim() == 3 ? tables.cosine.stride(0) : 0,
                    .sign = direction == Direction::kForward ? 1.0f : -1.0f},
                   on_device.stream());
  return to;
}

class Rotation final : public torch::autograd::Function<Rotation> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& query,
                               const at::Tensor& key, const at::Tensor& cosine,
                               const at::Tensor& sine) {
    context->save_for_backward({cosine, sine});
    const QueryAndKey result = rotated({query, key}, {cosine, sine}, Direction::kForward);
    return {result.query, result.key};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const QueryAndKey result =
        rotated({gradients[0], gradients[1]}, {saved[0], saved[1]}, Direction::kBack);
    return {result.query, result.key, at::Tensor(), at::Tensor()};
  }
};

}  // namespace

std::vector<double> rotary_frequencies(const LlamaConfig& config, int64_t rotary_dim) {
  std::vector<double> frequencies;
  for (int64_t number = 0; 2 * number < rotary_dim; ++number) {
    const double exponent = -static_cast<double>(2 * number) / static_cast<double>(rotary_dim);
    const ChannelPair pair{number, std::pow(config.rope_theta, exponent), rotary_dim,
                           config.rope_theta};
    frequencies.push_back(std::visit([&](const auto& scaling) { return scaled(pair, scaling); },
                                     config.rope_scaling));
  }
  return frequencies;
}

double yarn_mscale(double factor, double mscale) {
  return factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

Rotary::Rotary(const LlamaConfig& config, int64_t rotary_dim)
    : frequencies_(rotary_frequencies(config, rotary_dim)),
      magnitude_(magnitude_of(config.rope_scaling)) {}

RotaryTables Rotary::tables(int64_t begin, int64_t end, const at::Device& device) {
  const std::lock_guard lock(mutex_);
  const bool fits = !made_.empty() && made_.back().cosine.size(0) >= end &&
                    made_.back().cosine.device() == device;
  if (!fits) {
    const at::NoGradGuard no_grad;
    const auto num_positions =
        static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(end, 1))));
    const auto on_host = at::device(at::kCPU);
    const at::Tensor frequency =
        at::tensor(frequencies_, on_host.dtype(at::kDouble)).to(at::kFloat);
    const at::Tensor angle =
        at::outer(at::arange(num_positions, on_host.dtype(at::kFloat)), frequency);
    made_.push_back(
        {angle.cos().mul_(magnitude_).to(device), angle.sin().mul_(magnitude_).to(device)});
  }
  const RotaryTables& longest = made_.back();
  return {longest.cosine.narrow(0, begin, end - begin), longest.sine.narrow(0, begin, end - begin)};
}

QueryAndKey rotated(const QueryAndKey& x, const RotaryTables& tables, RotationDirection direction) {
  if (has_kernels(x.query) && x.key.scalar_type() == x.query.scalar_type())
    return rotated_by_kernel(x, tables, direction);
  return {rotated(x.query, tables.cosine, tables.sine, direction),
          rotated(x.key, tables.cosine, tables.sine, direction)};
}

QueryAndKey rotate(const QueryAndKey& heads, const RotaryTables& tables) {
  const int64_t rotary_dim = 2 * tables.cosine.size(-1);
  if (rotary_dim < heads.query.size(3)) {
    const auto divided = [&](const at::Tensor& x) {
      return x.split_with_sizes({rotary_dim, x.size(3) - rotary_dim}, 3);
    };
    const std::vector<at::Tensor> query = divided(heads.query);
    const std::vector<at::Tensor> key = divided(heads.key);
    const QueryAndKey rotated = rotate({query[0], key[0]}, tables);
    return {at::cat({rotated.query, query[1]}, 3), at::cat({rotated.key, key[1]}, 3)};
  }
  const variable_list result = Rotation::apply(heads.query, heads.key, tables.cosine, tables.sine);
  return {result[0], result[1]};
}

}  // namespace fsdp::nn
