#include "fsdp/python/rank_axis.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <functional>
#include <numeric>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/comm/communicator.h"

namespace fsdp {

namespace {

using torch::autograd::variable_list;
using Transfer = std::function<at::Tensor(const at::Tensor&)>;

// --- tensors alone -------------------------------------------------------------------------------

at::Tensor summed(const MeshAxis& axis, const at::Tensor& tensor) {
  at::Tensor sum = tensor.contiguous().clone();
  axis.reduce().all_reduce(sum, {}, "module sum").wait();
  return sum;
}

// Communicators know one range of elements per rank, that is rows of the first dim.
at::Tensor gathered(const MeshAxis& axis, const at::Tensor& tensor, int64_t dim) {
  const at::Tensor rows = tensor.movedim(dim, 0).contiguous();
  std::vector<int64_t> sizes = rows.sizes().vec();
  sizes.front() *= axis.size();
  const at::Tensor all = at::empty(sizes, rows.options());
  axis.gather().all_gather(all, rows, "module rows").wait();
  return all.movedim(0, dim).contiguous();
}

at::Tensor scattered(const MeshAxis& axis, const at::Tensor& tensor, int64_t dim) {
  const at::Tensor rows = tensor.movedim(dim, 0).contiguous();
  std::vector<int64_t> sizes = rows.sizes().vec();
  sizes.front() /= axis.size();
  const at::Tensor own = at::empty(sizes, rows.options());
  axis.reduce().reduce_scatter(own, rows, {}, "module sum").wait();
  return own.movedim(0, dim).contiguous();
}

at::Tensor own_part(const MeshAxis& axis, const at::Tensor& tensor, int64_t dim) {
  const int64_t part = tensor.size(dim) / axis.size();
  return tensor.narrow(dim, axis.rank() * part, part).clone(at::MemoryFormat::Contiguous);
}

std::vector<int64_t> times(std::vector<int64_t> counts, int64_t factor) {
  for (int64_t& count : counts) count *= factor;
  return counts;
}

at::Tensor exchanged(const MeshAxis& axis, const at::Tensor& tensor,
                     const std::vector<int64_t>& output_counts,
                     const std::vector<int64_t>& input_counts) {
  const at::Tensor rows = tensor.contiguous();
  std::vector<int64_t> sizes = rows.sizes().vec();
  sizes.front() = std::accumulate(output_counts.begin(), output_counts.end(), int64_t{0});
  const int64_t row_numel = c10::multiply_integers(sizes.begin() + 1, sizes.end());
  const at::Tensor received = at::empty(sizes, rows.options());
  axis.gather()
      .all_to_all(received, rows, "module rows", times(output_counts, row_numel),
                  times(input_counts, row_numel))
      .wait();
  return received;
}

// --- with gradients ------------------------------------------------------------------------------

// A gradient's way back; a capsule, since autograd's nodes keep values of its own types alone.
struct WayBack : torch::CustomClassHolder {
  explicit WayBack(Transfer back) : transfer(std::move(back)) {}
  const Transfer transfer;
};

struct AlongAxis : torch::autograd::Function<AlongAxis> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& tensor,
                            const Transfer& there, const Transfer& back) {
    context->saved_data["back"] = c10::IValue::make_capsule(c10::make_intrusive<WayBack>(back));
    return there(tensor);
  }
  static variable_list backward(torch::autograd::AutogradContext* context,
                                const variable_list& gradients) {
    FSDP_CHECK(!at::GradMode::is_enabled(),
               "collectives of a mesh axis have no second derivatives; call backward() without "
               "create_graph");
    const c10::intrusive_ptr<torch::CustomClassHolder> back =
        context->saved_data["back"].toCapsule();
    return {static_cast<const WayBack&>(*back).transfer(gradients[0]), {}, {}};
  }
};

at::Tensor along(const at::Tensor& tensor, const Transfer& there, const Transfer& back) {
  return AlongAxis::apply(tensor, there, back);
}

// --- sizes ---------------------------------------------------------------------------------------

int64_t checked_dim(const at::Tensor& tensor, int64_t dim, const char* operation) {
  if (dim < -tensor.dim() || dim >= tensor.dim())
    throw UsageError(concat(operation, " along dim ", dim, " of a tensor of shape ",
                            list_text(tensor.sizes()), "; choose one of its ", tensor.dim(),
                            " dims"));
  return dim < 0 ? dim + tensor.dim() : dim;
}

int64_t shared_dim(const RankAxis& axis, const at::Tensor& tensor, int64_t dim,
                   const char* operation) {
  dim = checked_dim(tensor, dim, operation);
  if (tensor.size(dim) % axis.size() != 0)
    throw UsageError(concat(operation, " along dim ", dim, " of a tensor of shape ",
                            list_text(tensor.sizes()), ": its size ", tensor.size(dim), ", which ",
                            axis.name(), " ", axis.size(), " ranks cannot share evenly (",
                            tensor.size(dim), " = ", axis.size(), " x ",
                            tensor.size(dim) / axis.size(), " + ", tensor.size(dim) % axis.size(),
                            "); pad it, or choose another ", axis.name()));
  return dim;
}

std::vector<int64_t> checked_counts(const RankAxis& axis, const at::Tensor& rows,
                                    const RankAxis::Counts& given, const char* which) {
  if (!given)
    return std::vector<int64_t>(static_cast<size_t>(axis.size()),
                                rows.size(shared_dim(axis, rows, 0, "all_to_all")) / axis.size());
  if (std::ssize(*given) != axis.size())
    throw UsageError(concat("all_to_all has ", which, " of ", given->size(), " ranks, but ",
                            axis.name(), " is ", axis.size(), "; give one for each"));
  for (const int64_t count : *given)
    if (count < 0)
      throw UsageError(concat("all_to_all has ", which, " ", list_text(*given),
                              "; numbers of rows are 0 or more"));
  return *given;
}

}  // namespace

at::Tensor RankAxis::all_reduce(const at::Tensor& tensor, GradientOnAxis gradient) const {
  if (size() == 1) return tensor;
  const Transfer sum = [self = *this](const at::Tensor& each) {
    return summed(*self.axis(), each);
  };
  const Transfer as_is = [](const at::Tensor& each) { return each; };
  return along(tensor, sum, gradient == GradientOnAxis::kEqual ? as_is : sum);
}

at::Tensor RankAxis::all_gather(const at::Tensor& tensor, int64_t dim,
                                GradientOnAxis gradient) const {
  dim = checked_dim(tensor, dim, "all_gather");
  if (size() == 1) return tensor;
  return along(
      tensor,
      [self = *this, dim](const at::Tensor& own) { return gathered(*self.axis(), own, dim); },
      [self = *this, dim, gradient](const at::Tensor& all) {
        return gradient == GradientOnAxis::kEqual ? own_part(*self.axis(), all, dim)
                                                  : scattered(*self.axis(), all, dim);
      });
}

at::Tensor RankAxis::reduce_scatter(const at::Tensor& tensor, int64_t dim) const {
  dim = shared_dim(*this, tensor, dim, "reduce_scatter");
  if (size() == 1) return tensor;
  return along(
      tensor,
      [self = *this, dim](const at::Tensor& all) { return scattered(*self.axis(), all, dim); },
      [self = *this, dim](const at::Tensor& own) { return gathered(*self.axis(), own, dim); });
}

at::Tensor RankAxis::split(const at::Tensor& tensor, int64_t dim) const {
  dim = shared_dim(*this, tensor, dim, "split");
  if (size() == 1) return tensor;
  return along(
      tensor,
      [self = *this, dim](const at::Tensor& all) { return own_part(*self.axis(), all, dim); },
      [self = *this, dim](const at::Tensor& own) { return gathered(*self.axis(), own, dim); });
}

at::Tensor RankAxis::sum_gradient(const at::Tensor& tensor) const {
  if (size() == 1 || !tensor.requires_grad() || !at::GradMode::is_enabled()) return tensor;
  // A view and a hook, so that nothing is copied.
  const at::Tensor same = tensor.view_as(tensor);
  same.register_hook(
      [self = *this](const at::Tensor& gradient) { return summed(*self.axis(), gradient); });
  return same;
}

at::Tensor RankAxis::all_to_all(const at::Tensor& rows, const Counts& output_counts,
                                const Counts& input_counts) const {
  checked_dim(rows, 0, "all_to_all");
  const std::vector<int64_t> input = checked_counts(*this, rows, input_counts, "input_counts");
  const std::vector<int64_t> output = checked_counts(*this, rows, output_counts, "output_counts");
  const int64_t num_rows = std::accumulate(input.begin(), input.end(), int64_t{0});
  if (num_rows != rows.size(0))
    throw UsageError(concat("all_to_all has input_counts ", list_text(input), ", whose sum is ",
                            num_rows, ", but ", rows.size(0), " rows"));
  if (size() == 1) return rows;
  return along(
      rows,
      [self = *this, output, input](const at::Tensor& sent) {
        return exchanged(*self.axis(), sent, output, input);
      },
      [self = *this, output, input](const at::Tensor& received) {
        return exchanged(*self.axis(), received, input, output);
      });
}

}  // namespace fsdp
