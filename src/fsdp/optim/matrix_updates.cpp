#include "fsdp/optim/matrix_updates.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include "fsdp/base/torch_dtype.h"
#include "fsdp/layout/flat_layout.h"
#include "fsdp/optim/shard_passes.h"

namespace fsdp {

namespace {

// factor * left * right + diagonal * 1, for one matrix or several. One is not a batch, because
// libraries add up the same matrix in another order in a batch.
void multiply(const at::Tensor& into, const at::Tensor& left, const at::Tensor& right,
              double factor = 1.0, double diagonal = 0.0) {
  // Where a share is 0, libraries do not read what `into` has.
  if (into.size(0) > 1)
    at::Tensor(into).baddbmm_(left, right, 0.0, factor);
  else
    into[0].addmm_(left[0], right[0], 0.0, factor);
  if (diagonal != 0.0) into.diagonal(0, 1, 2).add_(diagonal);
}

}  // namespace

double matrix_rate_scale(MuonScale scale, int64_t rows, int64_t columns) {
  const auto m = static_cast<double>(rows);
  const auto n = static_cast<double>(columns);
  return scale == MuonScale::kOriginal ? std::sqrt(std::max(1.0, m / n))
                                       : 0.2 * std::sqrt(std::max(m, n));
}

MatrixUpdates::MatrixUpdates(const MatrixRule& rule, EngineMemory& memory, c10::Device device)
    : rule_(rule),
      memory_(memory),
      device_(device),
      dtype_(rule.products_dtype.value_or(device.is_cpu() ? at::kFloat : at::kBFloat16)),
      momentum_state_(at::zeros({static_cast<int64_t>(sizeof(StepState))},
                                at::device(device).dtype(at::kByte))),
      weight_state_(at::zeros_like(momentum_state_)) {}

std::vector<MatrixUpdates::Batch> MatrixUpdates::batches_of(const GroupUpdate& update) const {
  const FlatLayout& layout = update.group().layout();
  std::vector<Batch> batches;
  for (const UpdatePiece& piece : update.pieces()) {
    std::vector<Batch> of_piece;
    size_t span = 0;  // spans are matrices, in the same order
    for (int64_t tensor = 0; tensor < layout.num_tensors(); ++tensor)
      for (const OwnedMatrix& part : layout.matrices_of(tensor)) {
        const int64_t begin = layout.tensor_range(tensor).begin + part.range.begin;
        if (begin < piece.main().flat.begin || begin >= piece.main().flat.end) continue;
        auto it = std::find_if(of_piece.begin(), of_piece.end(), [&](const Batch& batch) {
          return batch.rows == part.rows && batch.columns == part.columns;
        });
        if (rule_.products == MuonProducts::kSingle || it == of_piece.end())
          it = of_piece.insert(of_piece.end(), {&piece, part.rows, part.columns, {}});
        it->spans.push_back(span++);
      }
    FSDP_ASSERT(span == piece.spans().size(), span, " matrices in ", piece.spans().size(),
                " spans");
    batches.insert(batches.end(), of_piece.begin(), of_piece.end());
  }
  return batches;
}

void MatrixUpdates::reserve(const std::vector<GroupUpdate>& groups) {
  int64_t bytes = slab_.bytes();
  int64_t num_matrices = sums_.defined() ? sums_.numel() : 0;
  for (const GroupUpdate& update : groups) {
    if (!update.group().has_matrices()) continue;
    batches_[&update] = batches_of(update);
    for (Batch& batch : batches_[&update]) {
      const auto count = static_cast<int64_t>(batch.spans.size());
      batch.first_sum = num_matrices;
      num_matrices += count;
      bytes = std::max(bytes, count * newton_schulz_numel(batch.rows, batch.columns) *
                                  static_cast<int64_t>(c10::elementSize(dtype_)));
    }
  }
  sums_ = at::empty({num_matrices}, at::device(device_).dtype(at::kDouble));
  if (bytes > slab_.bytes()) {
    slab_ = Slab();  // before allocating, because both might not fit
    slab_ = Slab(memory_.of(MemoryKind::kWorkspace), bytes, kStateAlignBytes);
  }
}

void MatrixUpdates::begin(const at::Tensor& state) {
  constexpr size_t kRate = offsetof(StepState, learning_rate);
  constexpr size_t kFactor = offsetof(StepState, gradient_factor);
  momentum_state_.copy_(state);
  field_of(momentum_state_, kRate).fill_(-1.0);
  field_of(momentum_state_, kFactor, at::kFloat).mul_(1.0 - rule_.momentum);
  weight_state_.copy_(state);
  field_of(weight_state_, kFactor, at::kFloat).fill_(1.0);
  sums_.fill_(rule_.norm_eps * rule_.norm_eps);  // so no norm is less
}

void MatrixUpdates::run(const GroupUpdate& update, const at::Tensor& workspace, ThreadTeam& team) {
  for (const Batch& batch : batches_.at(&update)) {
    Batch updated = batch;
    std::erase_if(updated.spans,
                  [&](size_t span) { return update.is_left_out(batch.piece->spans()[span]); });
    if (!updated.spans.empty()) run(update, updated, workspace, team);
  }
}

void MatrixUpdates::run(const GroupUpdate& update, const Batch& batch, const at::Tensor& workspace,
                        ThreadTeam& team) {
  const auto count = static_cast<int64_t>(batch.spans.size());
  const auto width = static_cast<int64_t>(c10::elementSize(dtype_));
  const int64_t matrix_bytes = batch.rows * batch.columns * width;
  const at::Tensor gradient = update.gradient_of(*batch.piece);
  const auto* gradients = static_cast<const std::byte*>(gradient.const_data_ptr());
  int64_t begin = 0;
  take(begin, {count, batch.rows, batch.columns}).zero_();
  for (int64_t i = 0; i < count; ++i) {
    UpdateSpan span = batch.piece->spans()[batch.spans[static_cast<size_t>(i)]];
    span.gradient = gradients + (span.flat_begin - batch.piece->main().flat.begin) *
                                    element_bytes(span.gradient_dtype);
    span.weight = slab_.at(i * matrix_bytes);
    span.weight_dtype = dtype_of(dtype_);
    span.main = MainWeight::kIsWeight;
    span.main_weight = nullptr;
    span.marks = nullptr;  // no weight changes yet
    span.rate_scale = 1.0f;
    span.weight_decay = 0.0f;
    update_span(span, SgdRule{.momentum = rule_.momentum, .nesterov = rule_.nesterov},
                momentum_state_, team);
  }
  const at::Tensor direction = orthogonal(batch, workspace, team);
  const auto scale = static_cast<float>(matrix_rate_scale(rule_.scale, batch.rows, batch.columns));
  for (int64_t i = 0; i < count; ++i) {
    UpdateSpan span = batch.piece->spans()[batch.spans[static_cast<size_t>(i)]];
    span.gradient = static_cast<const std::byte*>(direction.const_data_ptr()) + i * matrix_bytes;
    span.gradient_dtype = dtype_of(dtype_);
    span.first = {};
    span.rate_scale *= scale;
    span.weight_decay /= scale;  // which the rate has, too
    update_span(span, SgdRule{.rounding = rule_.rounding, .seed = rule_.seed}, weight_state_, team);
  }
}

at::Tensor MatrixUpdates::take(int64_t& begin, at::IntArrayRef shape) const {
  const int64_t numel = c10::multiply_integers(shape);
  const at::Tensor taken =
      tensor_over(slab_.at(begin * static_cast<int64_t>(c10::elementSize(dtype_))), numel, dtype_,
                  device_)
          .view(shape);
  begin += numel;
  return taken;
}

at::Tensor MatrixUpdates::orthogonal(const Batch& batch, const at::Tensor& workspace,
                                     ThreadTeam& team) {
  const auto count = static_cast<int64_t>(batch.spans.size());
  const int64_t shorter = std::min(batch.rows, batch.columns);
  int64_t begin = 0;
  at::Tensor x = take(begin, {count, batch.rows, batch.columns});
  at::Tensor next = take(begin, {count, batch.rows, batch.columns});
  const at::Tensor gram = take(begin, {count, shorter, shorter});
  const at::Tensor factor = take(begin, {count, shorter, shorter});

  // Sums of squares that are the same for any number of threads.
  const at::Tensor sums = sums_.narrow(0, batch.first_sum, count);
  const at::Tensor norms = at::empty({count}, x.options());
  for (int64_t i = 0; i < count; ++i)
    add_squared_norm(x[i].view({-1}), sums.narrow(0, i, 1), workspace, team);
  at::sqrt_out(const_cast<at::Tensor&>(norms), sums);
  for (int64_t i = 0; i < count; ++i) at::_foreach_div_(x[i], norms[i]);

  const bool is_wide = batch.rows <= batch.columns;
  for (int32_t i = 0; i < rule_.iterations; ++i) {
    const at::Tensor turned = x.transpose(1, 2);
    const at::Tensor& left = is_wide ? x : turned;
    const at::Tensor& right = is_wide ? turned : x;
    // a + b A + c A A as one square, so that no pass but those of products goes over A:
    // c (A + b / 2c)^2 + a - b b / 4c.
    if (rule_.c == 0.0) {
      multiply(factor, left, right, rule_.b, rule_.a);
    } else {
      const double shift = rule_.b / (2.0 * rule_.c);
      multiply(gram, left, right, 1.0, shift);
      multiply(factor, gram, gram, rule_.c, rule_.a - rule_.c * shift * shift);
    }
    if (is_wide)
      multiply(next, factor, x);
    else
      multiply(next, x, factor);
    std::swap(x, next);
  }
  return x;
}

}  // namespace fsdp
