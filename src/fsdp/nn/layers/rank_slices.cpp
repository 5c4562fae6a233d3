#include "fsdp/nn/layers/rank_slices.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <numeric>
#include <utility>

#include "fsdp/base/check.h"

namespace fsdp::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A gradient's way back; a capsule, since autograd's nodes keep values of its own types alone.
struct WayBack final : torch::CustomClassHolder {
  explicit WayBack(RankTransfer back) : transfer(std::move(back)) {}
  const RankTransfer transfer;
};

class AlongRanks final : public torch::autograd::Function<AlongRanks> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& tensor,
                            const RankTransfer& there, const RankTransfer& back) {
    context->saved_data["back"] = c10::IValue::make_capsule(c10::make_intrusive<WayBack>(back));
    return there(tensor);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    FSDP_CHECK(!at::GradMode::is_enabled(),
               "collectives of a mesh axis have no second derivatives; call backward() without "
               "create_graph");
    const c10::intrusive_ptr<torch::CustomClassHolder> back =
        context->saved_data["back"].toCapsule();
    return {static_cast<const WayBack&>(*back).transfer(gradients[0]), {}, {}};
  }
};

}  // namespace

// In memory the ranks' slices come one after the other, each of them whole: that is their order
// along the first dim alone, and for other dims they are copied.
GatheredSlices::GatheredSlices(const at::Tensor& own, int64_t dim, Communicator& ranks)
    : dim_(dim) {
  std::vector<int64_t> sizes = own.sizes().vec();
  sizes.insert(sizes.begin(), ranks.size());
  slices_ = at::empty(sizes, own.options());
  work_ = ranks.all_gather(slices_, own.contiguous(), "slices");
}

at::Tensor GatheredSlices::wait() {
  work_.wait();
  return slices_.movedim(0, dim_).flatten(dim_, dim_ + 1);
}

ScatteredSums::ScatteredSums(const at::Tensor& parts, int64_t dim, Communicator& ranks) {
  const at::Tensor slices =
      parts.unflatten(dim, {ranks.size(), parts.size(dim) / ranks.size()}).movedim(dim, 0);
  own_ = at::empty(slices.sizes().slice(1), parts.options());
  work_ = ranks.reduce_scatter(own_, slices.contiguous(), {}, "parts of sums");
}

at::Tensor ScatteredSums::wait() {
  work_.wait();
  return own_;
}

at::Tensor slices_gathered(const at::Tensor& own, int64_t dim, Communicator& ranks) {
  return GatheredSlices(own, dim, ranks).wait();
}

at::Tensor sums_scattered(const at::Tensor& parts, int64_t dim, Communicator& ranks) {
  return ScatteredSums(parts, dim, ranks).wait();
}

at::Tensor slice_kept(const at::Tensor& whole, int64_t dim, Communicator& ranks) {
  const int64_t size = whole.size(dim) / ranks.size();
  return whole.narrow(dim, ranks.rank() * size, size);
}

at::Tensor all_summed(const at::Tensor& parts, Communicator& ranks) {
  at::Tensor sum = parts.clone(at::MemoryFormat::Contiguous);
  ranks.all_reduce(sum, {}, "parts of sums").wait();
  return sum;
}

at::Tensor rows_exchanged(const at::Tensor& rows, const std::vector<int64_t>& output_rows,
                          const std::vector<int64_t>& input_rows, Communicator& ranks) {
  std::vector<int64_t> sizes = rows.sizes().vec();
  sizes.front() = std::accumulate(output_rows.begin(), output_rows.end(), int64_t{0});
  const int64_t row_numel = c10::multiply_integers(sizes.begin() + 1, sizes.end());
  const auto elements_of = [row_numel](std::vector<int64_t> counts) {
    for (int64_t& count : counts) count *= row_numel;
    return counts;
  };
  const at::Tensor received = at::empty(sizes, rows.options());
  ranks
      .all_to_all(received, rows.contiguous(), "rows", elements_of(output_rows),
                  elements_of(input_rows))
      .wait();
  return received;
}

at::Tensor along_ranks(const at::Tensor& tensor, const RankTransfer& there,
                       const RankTransfer& back) {
  return AlongRanks::apply(tensor, there, back);
}

}  // namespace fsdp::nn
