#include "fsdp/nn/layers/gated_delta_net.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <vector>

#include "fsdp/comm/mesh.h"
#include "fsdp/nn/layers/feed_forward.h"

namespace fsdp::nn {

// --- the rule ------------------------------------------------------------------------------------

// [Note: the delta rule of a chunk]
// Let G(i) be the sum of log_decay over the chunk's positions up to i, G(n) that of the whole
// chunk, and S the state before it. Matrices have a row per position; factors that depend on the
// position alone scale rows. From the recurrence:
//   state after i   exp(G(i)) S + sum over j <= i of exp(G(i) - G(j)) k(j) delta(j)^T
// With decay(i, j) = exp(G(i) - G(j)) for j <= i, else 0, that is for all rows at once:
//   overlap = K K^T * decay, below the diagonal        scores = Q K^T * decay
//   delta = beta (V - exp(G) K S - overlap delta)
//         = inverse (beta V) - seen S,  inverse = (1 + beta overlap)^-1,  seen = inverse (beta
//         exp(G) K)
//   Y = exp(G) Q S + scores delta
//   next S = exp(G(n)) S + (exp(G(n) - G) K)^T delta
//          = transition S + (exp(G(n) - G) K)^T inverse (beta V)
// So only one matrix product per chunk has to wait for the chunk before it; its gradient takes the
// same product with the transposed transition, from the last chunk to the first.

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor transposed(const at::Tensor& matrices) { return matrices.transpose(-1, -2); }

// How positions are divided. `shared` is the number of value heads that share a key head.
struct ChunkGrid {
  int64_t batch, sequence, key_heads, shared, positions, chunks;

  static ChunkGrid of(const at::Tensor& key, const at::Tensor& value, int64_t chunk_size) {
    const int64_t sequence = key.size(1);
    const int64_t positions = std::min(chunk_size, sequence);
    return {.batch = key.size(0),
            .sequence = sequence,
            .key_heads = key.size(2),
            .shared = value.size(2) / key.size(2),
            .positions = positions,
            .chunks = (sequence + positions - 1) / positions};
  }

  // [batch, sequence, heads, ...] -> [chunks, batch * key_heads, 1 or shared, positions, size].
  // Chunks come first, so that each is dense memory for the walk over them. Positions that are
  // missing in the last one are zeros, which change no state.
  at::Tensor divided(const at::Tensor& tensor) const {
    at::Tensor grouped =
        tensor.reshape({batch, sequence, key_heads, tensor.size(2) / key_heads, -1});
    if (const int64_t missing = chunks * positions - sequence; missing > 0)
      grouped = at::constant_pad_nd(grouped, {0, 0, 0, 0, 0, 0, 0, missing});
    return grouped.view({batch, chunks, positions, key_heads, grouped.size(3), grouped.size(4)})
        .permute({1, 0, 3, 4, 2, 5})
        .contiguous()
        .flatten(1, 2);
  }

  // Back to `shape`.
  at::Tensor joined(const at::Tensor& tensor, at::IntArrayRef shape) const {
    return tensor.unflatten(1, {batch, key_heads})
        .permute({1, 0, 4, 2, 3, 5})
        .reshape({batch, chunks * positions, -1})
        .narrow(1, 0, sequence)
        .reshape(shape);
  }
};

// (1 + lower)^-1 of matrices whose diagonal counts as 0.
at::Tensor unit_inverse(const at::Tensor& lower) {
  const auto solve = [](const at::Tensor& matrices) {
    return at::linalg_solve_triangular(
        matrices, at::eye(matrices.size(-1), matrices.options()).expand_as(matrices),
        /*upper=*/false, /*left=*/true, /*unitriangular=*/true);
  };
  // libtorch loads its solvers for GPUs at the first call, and throws where the threads of two
  // ranks make that call at once.
  static std::once_flag is_loaded;
  if (!lower.is_cpu())
    std::call_once(is_loaded, [&] { solve(at::zeros({1, 1}, lower.options())); });
  return solve(lower);
}

// The facts about each chunk that forward and backward know before its state, as in the note.
struct DeltaChunks {
  at::Tensor query, key;                    // [chunks, batch * key_heads, 1, positions, key_dim]
  at::Tensor value;                         // [..., shared, positions, value_dim]
  at::Tensor beta, since_begin, until_end;  // [..., shared, positions, 1]: exp(G), exp(G(n) - G)
  at::Tensor whole;                         // [..., shared, 1, 1]: exp(G(n))
  at::Tensor decay, overlap, inverse;       // [..., shared, positions, positions]
  at::Tensor seen;                          // [..., shared, positions, key_dim]
  at::Tensor transition;                    // [..., shared, key_dim, key_dim]

  DeltaChunks(const DeltaRuleInput& input, const ChunkGrid& grid)
      : query(grid.divided(input.query)),
        key(grid.divided(input.key)),
        value(grid.divided(input.value)),
        beta(grid.divided(input.beta)) {
    const at::TensorOptions options = key.options();
    // Sums can be large where their differences are small, so both are fp64.
    const at::Tensor sum = grid.divided(input.log_decay).to(at::kDouble).cumsum(-2);
    const at::Tensor total = sum.narrow(-2, grid.positions - 1, 1);
    since_begin = sum.exp().to(options.dtype());
    until_end = (total - sum).exp().to(options.dtype());
    whole = total.exp().to(options.dtype());
    // Masked before the exponential, which would overflow above the diagonal.
    const at::Tensor is_later =
        at::ones({grid.positions, grid.positions}, options.dtype(at::kBool)).triu_(1);
    decay = (sum - transposed(sum))
                .to(key.scalar_type())
                .masked_fill_(is_later, -std::numeric_limits<double>::infinity())
                .exp_();
    overlap = (at::matmul(key, transposed(key)) * decay).tril_(-1);
    inverse = unit_inverse(overlap * beta);
    seen = at::matmul(inverse, key * (beta * since_begin));
    transition = whole * at::eye(key.size(-1), key.options()) - at::matmul(writers(), seen);
  }

  // Turn corrections into what they add to the state at the chunk's end.
  at::Tensor writers() const { return transposed(key * until_end); }
  at::Tensor scores() const { return at::matmul(query, transposed(key)) * decay; }
  // The corrections, if all states were 0.
  at::Tensor own_delta() const { return at::matmul(inverse, value * beta); }
};

// A chunk's states or transitions, as matrices. Never a copy: the walks write into it.
at::Tensor of_chunk(const at::Tensor& tensor, int64_t chunk) {
  return tensor.select(0, chunk).view({-1, tensor.size(-2), tensor.size(-1)});
}

// [chunks + 1, ...]: the state before each chunk, and the last one.
at::Tensor walk_forward(const DeltaChunks& c, const at::Tensor& first, const at::Tensor& added) {
  const at::Tensor states = at::cat({first.reshape_as(added[0]).unsqueeze(0), added});
  for (int64_t chunk = 0; chunk < added.size(0); ++chunk)
    of_chunk(states, chunk + 1).baddbmm_(of_chunk(c.transition, chunk), of_chunk(states, chunk));
  return states;
}

// Their gradients, of those that chunks have by themselves.
at::Tensor walk_backward(const DeltaChunks& c, const at::Tensor& own, const at::Tensor& last) {
  const at::Tensor states = at::cat({own, last.reshape_as(own[0]).unsqueeze(0)});
  for (int64_t chunk = own.size(0) - 1; chunk >= 0; --chunk)
    of_chunk(states, chunk)
        .baddbmm_(transposed(of_chunk(c.transition, chunk)), of_chunk(states, chunk + 1));
  return states;
}

at::Tensor sum_in_double(const at::Tensor& tensor, int64_t dim) {
  return tensor.sum(dim, /*keepdim=*/true, at::kDouble);
}

// Gradients of the exponentials of sums of decays, each times the exponential itself: then that of
// a difference of sums goes to the one with its sign and to the other one with the opposite sign.
struct OfExponentials {
  at::Tensor decay;        // [..., positions, positions]
  at::Tensor since_begin;  // [..., positions, 1], fp64 like the next ones
  at::Tensor until_end;    // [..., positions, 1]
  at::Tensor whole;        // [..., 1, 1]
};

at::Tensor log_decay_gradient(const OfExponentials& of) {
  const at::Tensor of_sum = sum_in_double(of.decay, -1) - transposed(sum_in_double(of.decay, -2)) +
                            of.since_begin - of.until_end;
  of_sum.narrow(-2, of_sum.size(-2) - 1, 1).add_(of.until_end.sum(-2, true)).add_(of.whole);
  return of_sum.flip(-2).cumsum(-2).flip(-2).to(of.decay.scalar_type());
}

class DeltaRule final : public torch::autograd::Function<DeltaRule> {
 public:
  // {y, the state at the end}
  static variable_list forward(AutogradContext* context, const at::Tensor& query,
                               const at::Tensor& key, const at::Tensor& value,
                               const at::Tensor& log_decay, const at::Tensor& beta,
                               const at::Tensor& first_state, int64_t chunk_size) {
    const ChunkGrid grid = ChunkGrid::of(key, value, chunk_size);
    const DeltaChunks c({query, key, value, log_decay, beta}, grid);
    const at::Tensor own = c.own_delta();
    const at::Tensor states = walk_forward(c, first_state, at::matmul(c.writers(), own));
    const at::Tensor before = states.narrow(0, 0, grid.chunks);
    const at::Tensor delta = own - at::matmul(c.seen, before);
    const at::Tensor y =
        at::matmul(c.query * c.since_begin, before) + at::matmul(c.scores(), delta);
    context->save_for_backward({query, key, value, log_decay, beta, before});
    context->saved_data["chunk_size"] = chunk_size;
    // A copy: a cache that keeps the last state must not keep all of them.
    return {grid.joined(y, value.sizes()),
            states[grid.chunks].reshape(first_state.sizes()).clone()};
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const DeltaRuleInput input{saved[0], saved[1], saved[2], saved[3], saved[4]};
    const at::Tensor& before = saved[5];
    const ChunkGrid grid =
        ChunkGrid::of(input.key, input.value, context->saved_data["chunk_size"].toInt());
    const DeltaChunks c(input, grid);
    const at::Tensor scores = c.scores();
    const at::Tensor delta = c.own_delta() - at::matmul(c.seen, before);

    const at::Tensor of_y = grid.divided(gradients[0]);
    const at::Tensor by_y = at::matmul(transposed(scores), of_y);
    const at::Tensor of_states =
        walk_backward(c,
                      at::matmul(transposed(c.query * c.since_begin), of_y) -
                          at::matmul(transposed(c.seen), by_y),
                      gradients[1]);
    const at::Tensor of_after = of_states.narrow(0, 1, grid.chunks);
    const at::Tensor of_delta = by_y + at::matmul(transposed(c.writers()), of_after);

    // delta = beta * error, and the error is v - exp(G) K S - overlap delta.
    const at::Tensor of_product = at::matmul(transposed(c.inverse), of_delta);
    const at::Tensor error =
        c.value - at::matmul(c.key * c.since_begin, before) - at::matmul(c.overlap, delta);
    const at::Tensor of_beta = (of_product * error).sum(-1, true);
    const at::Tensor of_error = of_product * c.beta;

    // Queries and keys: with each other, and with the states before and after. Value heads add up.
    const at::Tensor of_overlap = at::matmul(of_error, transposed(delta)).neg_().tril_(-1);
    const at::Tensor of_scores = at::matmul(of_y, transposed(delta));
    const at::Tensor of_key_pairs = (of_overlap * c.decay).sum(2, true);
    const at::Tensor of_pairs = (of_scores * c.decay).sum(2, true);
    const at::Tensor of_asking = at::matmul(of_y, transposed(before)) * c.since_begin;
    const at::Tensor of_reading = at::matmul(of_error, transposed(before)) * -c.since_begin;
    const at::Tensor of_writing = at::matmul(delta, transposed(of_after)) * c.until_end;
    const at::Tensor of_query = at::matmul(of_pairs, c.key) + of_asking.sum(2, true);
    const at::Tensor of_key = at::matmul(of_key_pairs + transposed(of_key_pairs), c.key) +
                              at::matmul(transposed(of_pairs), c.query) +
                              (of_reading + of_writing).sum(2, true);

    const at::Tensor of_log_decay = log_decay_gradient(
        {.decay = of_overlap * c.overlap + (of_scores * scores).tril_(-1),  // 1 on the diagonal
         .since_begin = sum_in_double(c.query * of_asking + c.key * of_reading, -1),
         .until_end = sum_in_double(c.key * of_writing, -1),
         .whole = sum_in_double((before * of_after * c.whole).flatten(-2), -1).unsqueeze(-1)});
    return {grid.joined(of_query, input.query.sizes()),
            grid.joined(of_key, input.key.sizes()),
            grid.joined(of_error, input.value.sizes()),
            grid.joined(of_log_decay, input.log_decay.sizes()),
            grid.joined(of_beta, input.beta.sizes()),
            of_states[0].reshape(gradients[1].sizes()),
            at::Tensor()};
  }
};

// One position: the recurrence itself.
at::Tensor delta_step(const DeltaRuleInput& input, at::Tensor& state) {
  const int64_t batch = input.key.size(0);
  const int64_t key_heads = input.key.size(2);
  const auto by_head = [&](const at::Tensor& tensor, int64_t rows) {
    return tensor.reshape({batch, key_heads, tensor.size(2) / key_heads, rows, -1});
  };
  const at::Tensor key = by_head(input.key, 1);
  const at::Tensor kept = state.unflatten(1, {key_heads, -1}) * by_head(input.log_decay.exp(), 1);
  const at::Tensor delta =
      (by_head(input.value, 1) - at::matmul(key, kept)) * by_head(input.beta, 1);
  const at::Tensor next = at::addcmul(kept, transposed(key), delta);
  state = next.flatten(1, 2);
  return at::matmul(by_head(input.query, 1), next).view(input.value.sizes());
}

}  // namespace

at::Tensor gated_delta_rule(const DeltaRuleInput& input, int64_t chunk_size, at::Tensor* state) {
  const bool is_given = state != nullptr && state->defined();
  if (input.key.size(1) == 1 && is_given) return delta_step(input, *state);
  const at::Tensor first = is_given ? *state
                                    : at::zeros({input.key.size(0), input.value.size(2),
                                                 input.key.size(3), input.value.size(3)},
                                                input.value.options());
  const variable_list results = DeltaRule::apply(input.query, input.key, input.value,
                                                 input.log_decay, input.beta, first, chunk_size);
  if (state != nullptr) *state = results[1];
  return results[0];
}

// --- the mixer -----------------------------------------------------------------------------------

namespace {

// Queries and keys are divided by the root of their sum of squares and this.
constexpr double kSquaredLengthEps = 1e-6;

// The range of the first exp(A_log), the published one. Not 0, of which there is no logarithm.
constexpr double kFirstRateMin = 0.01;
constexpr double kFirstRateMax = 16.0;

int64_t key_size(const GatedDeltaNetOptions& o) { return o.num_key_heads * o.key_head_dim; }
int64_t value_size(const GatedDeltaNetOptions& o) { return o.num_value_heads * o.value_head_dim; }

// Channels of queries, keys and values of so many key heads.
std::vector<int64_t> convolved_sizes(const GatedDeltaNetOptions& o, int64_t num_key_heads) {
  const int64_t keys = num_key_heads * o.key_head_dim;
  return {keys, keys, value_size(o) / o.num_key_heads * num_key_heads};
}

// Scales rows to length `length`. The RMS norm does that, too, if its weight is constant, and takes
// one pass where single operations take four.
at::Tensor of_length(const at::Tensor& rows, double length) {
  const auto size = static_cast<double>(rows.size(-1));
  const at::Tensor weight =
      at::full({rows.size(-1)}, length / std::sqrt(size), rows.options().requires_grad(false));
  return rms_norm(rows, weight, kSquaredLengthEps / size);
}

}  // namespace

GatedDeltaNetImpl::GatedDeltaNetImpl(const GatedDeltaNetOptions& o)
    : options_(o),
      dt_bias_(register_parameter("dt_bias", at::empty({o.num_value_heads}))),
      a_log_(register_parameter("A_log", at::empty({o.num_value_heads}))),
      in_proj_qkvz_(register_module(
          "in_proj_qkvz",
          Projection(ProjectionOptions{o.hidden_size, 2 * key_size(o) + 2 * value_size(o), false,
                                       o.standard_deviation, ProjectionCut::kOutputs}))),
      in_proj_ba_(register_module(
          "in_proj_ba",
          Projection(ProjectionOptions{o.hidden_size, 2 * o.num_value_heads, false,
                                       o.standard_deviation, ProjectionCut::kOutputs}))),
      conv1d_(register_module("conv1d", CausalConv(convolved_sizes(o, o.num_key_heads),
                                                   o.conv_kernel, /*with_bias=*/false))),
      norm_(register_module("norm", RmsNorm(o.value_head_dim, o.norm_eps))),
      out_proj_(register_module("out_proj", Projection(ProjectionOptions{
                                                value_size(o), o.hidden_size, false,
                                                o.standard_deviation, ProjectionCut::kInputs}))) {}

at::Tensor GatedDeltaNetImpl::forward(const at::Tensor& own, const LayerContext& context) {
  const GatedDeltaNetOptions& o = options_;
  const at::ScalarType wide = at::promote_types(own.scalar_type(), at::kFloat);
  const int64_t num_key_heads = o.num_key_heads / (tp() == nullptr ? 1 : tp()->size());
  // Published matrices are divided by key head: first all that belongs to the first one.
  const int64_t shared = o.num_value_heads / o.num_key_heads;
  const std::vector<at::Tensor> projected = project(own, {in_proj_qkvz_, in_proj_ba_}, tp());
  const std::vector<at::Tensor> qkvz =
      projected[0]
          .unflatten(-1, {num_key_heads, -1})
          .split_with_sizes({o.key_head_dim, o.key_head_dim, shared * o.value_head_dim,
                             shared * o.value_head_dim},
                            -1);
  const std::vector<at::Tensor> ba =
      projected[1].unflatten(-1, {num_key_heads, -1}).split(shared, -1);

  const at::Tensor qkv = at::cat({qkvz[0].flatten(2), qkvz[1].flatten(2), qkvz[2].flatten(2)}, -1);
  const auto convolve = [&](const std::vector<at::Tensor>& x) {
    return conv1d_(x[0], context.window());
  };
  const std::vector<at::Tensor> convolved =
      at::silu(in_each_document(context.documents, {qkv}, convolve))
          .split_with_sizes(convolved_sizes(o, num_key_heads), -1);
  const auto heads = [&](const at::Tensor& tensor, int64_t size) {
    return tensor.to(wide).unflatten(-1, {-1, size});
  };
  const at::Tensor rate = a_log_.to(wide).exp();
  const auto apply_rule = [&](const std::vector<at::Tensor>& x) {
    return gated_delta_rule(
        {.query = x[0], .key = x[1], .value = x[2], .log_decay = x[3], .beta = x[4]}, o.chunk_size,
        context.state());
  };
  const at::Tensor y = in_each_document(
      context.documents,
      {of_length(heads(convolved[0], o.key_head_dim),
                 1.0 / std::sqrt(static_cast<double>(o.key_head_dim))),
       of_length(heads(convolved[1], o.key_head_dim), 1.0), heads(convolved[2], o.value_head_dim),
       -rate * at::softplus(ba[1].flatten(2).to(wide) + dt_bias_.to(wide)),
       ba[0].flatten(2).to(wide).sigmoid()},
      apply_rule);

  const at::Tensor normed = rms_norm(y, norm_->weight.to(wide), o.norm_eps);
  const at::Tensor gate = heads(qkvz[3].flatten(2), o.value_head_dim);
  return out_proj_(gated_silu(gate, normed).flatten(2).to(own.scalar_type()));
}

void GatedDeltaNetImpl::reset_parameters() {
  const at::NoGradGuard no_grad;
  dt_bias_.fill_(1.0);
  const at::Tensor random = at::empty({a_log_.numel()}, at::device(at::kCPU).dtype(at::kFloat));
  fill_uniform(random, "A_log", 0.5);
  a_log_.copy_(
      ((random.to(at::kDouble) + 0.5) * (kFirstRateMax - kFirstRateMin) + kFirstRateMin).log());
}

}  // namespace fsdp::nn
