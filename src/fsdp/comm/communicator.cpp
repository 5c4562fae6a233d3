#include "fsdp/comm/communicator.h"

#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/device_stream.h"
#include "fsdp/comm/enqueued_operation.h"
#include "fsdp/comm/reduce/reduce_ranks.h"
#include "fsdp/comm/reduce/sum_order.h"

namespace fsdp {

namespace {

void check_tensor(const at::Tensor& tensor, const char* what, const Tag& tag) {
  FSDP_CHECK(tensor.defined(), what, " of '", tag.text(), "' is an undefined tensor: pass one");
  FSDP_CHECK(tensor.is_contiguous(), what, " of '", tag.text(), "' has sizes ",
             list_text(tensor.sizes()), " and strides ", list_text(tensor.strides()),
             ": it must be contiguous");
}

void check_numel(const at::Tensor& tensor, const char* what, const Tag& tag, int64_t expected) {
  FSDP_CHECK(tensor.numel() == expected, what, " of '", tag.text(), "' has ", tensor.numel(),
             " elements: it must have ", expected);
}

void check_pair(const at::Tensor& output, const at::Tensor& input, const Tag& tag) {
  check_tensor(output, "output", tag);
  check_tensor(input, "input", tag);
  FSDP_CHECK(output.device() == input.device(), "output of '", tag.text(), "' is on ",
             output.device().str(), " and input on ", input.device().str(),
             ": both must be on one device");
}

void check_same_dtype(const at::Tensor& output, const at::Tensor& input, const Tag& tag) {
  FSDP_CHECK(output.scalar_type() == input.scalar_type(), "output of '", tag.text(), "' is ",
             c10::toString(output.scalar_type()), " and input ", c10::toString(input.scalar_type()),
             ": this operation only moves data, both must be equal");
}

const char* begin_of(const at::Tensor& tensor) {
  return static_cast<const char*>(tensor.const_data_ptr());
}

bool apart(const at::Tensor& a, const at::Tensor& b) {
  return begin_of(b) + b.nbytes() <= begin_of(a) || begin_of(a) + a.nbytes() <= begin_of(b);
}

// `part` may lie in `whole` at element `offset` (in place); any other overlap would be read after
// it was overwritten.
void check_overlap(const at::Tensor& whole, const at::Tensor& part, int64_t offset,
                   const Tag& tag) {
  if (whole.nbytes() == 0 || part.nbytes() == 0) return;
  const char* allowed = begin_of(whole) + offset * whole.element_size();
  if (begin_of(part) == allowed && whole.scalar_type() == part.scalar_type()) return;
  FSDP_CHECK(apart(whole, part), "input and output of '", tag.text(),
             "' overlap: only this rank's own share, at "
             "element ",
             offset, " and of the same dtype, may be in place");
}

int64_t nbytes(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

Operation operation_on(OpKind kind, const at::Tensor& output, const at::Tensor& input,
                       const Tag& tag) {
  Operation operation;
  operation.print.kind = kind;
  operation.print.tag = tag;
  operation.print.wire = input.scalar_type();
  operation.print.result = output.scalar_type();
  operation.print.device = output.device().type();
  operation.output = output;
  operation.input = input;
  if (!input.device().is_cpu()) {
    const c10::Stream caller = current_stream(input.device());
    operation.on_device = std::make_unique<OnDevice>(
        OnDevice{.called_on = caller, .ready = c10::Event(caller.device_type())});
    operation.on_device->ready.record(caller);
  }
  return operation;
}

void check_watcher(const char* field, const at::Tensor& watcher, at::ScalarType dtype,
                   const at::Tensor& output, const Tag& tag) {
  if (!watcher.defined()) return;
  FSDP_CHECK(
      watcher.numel() == 1 && watcher.scalar_type() == dtype && watcher.device() == output.device(),
      field, " of '", tag.text(), "' has ", watcher.numel(), " elements of ",
      c10::toString(watcher.scalar_type()), " on ", watcher.device().str(),
      ": it must be one element of ", c10::toString(dtype), " on ", output.device().str());
}

void set_reduction(Operation& operation, const Reduction& reduction, const Tag& tag) {
  check_watcher("nonfinite", reduction.nonfinite, at::kFloat, operation.output, tag);
  check_watcher("squares", reduction.squares, at::kDouble, operation.output, tag);
  const ReduceTypes types{operation.print.wire, operation.print.result};
  operation.reduction = checked_reduction(reduction, types, tag.text());
  operation.print.reduce = reduction.op;
  operation.print.store = reduction.store;
  operation.print.scale = reduction.scale;
}

}  // namespace

Communicator::Communicator(int rank, int size, std::string name, int sum_group)
    : rank_(rank), size_(size), name_(std::move(name)), sum_group_(sum_group) {
  FSDP_CHECK(size >= 1 && rank >= 0 && rank < size, "communicator '", name_, "' has rank ", rank,
             " of size ", size, ": the rank must be from 0 to size - 1");
}

Shares Communicator::shares_of(const at::Tensor& tensor, const char* what,
                               std::span<const int64_t> counts) const {
  if (counts.empty()) {
    FSDP_CHECK(tensor.numel() % size_ == 0, what, " has ", tensor.numel(), " elements, which ",
               size_, " ranks cannot share equally: pass counts");
    return Shares::equal(tensor.numel() / size_, size_);
  }
  FSDP_CHECK(static_cast<int>(counts.size()) == size_, "counts has ", counts.size(),
             " entries: it must have one per rank, ", size_);
  Shares shares = Shares::uneven(counts);
  FSDP_CHECK(shares.total() == tensor.numel(), what, " has ", tensor.numel(),
             " elements, but counts adds up to ", shares.total());
  return shares;
}

Work Communicator::all_gather(const at::Tensor& output, const at::Tensor& input, const Tag& tag,
                              std::span<const int64_t> counts, const Work& after) {
  check_pair(output, input, tag);
  check_same_dtype(output, input, tag);
  Operation operation = operation_on(OpKind::kAllGather, output, input, tag);
  operation.output_shares = shares_of(output, "output", counts);
  check_numel(input, "input", tag, operation.output_shares.count(rank_));
  check_overlap(output, input, operation.output_shares.offset(rank_), tag);
  operation.print.bytes = nbytes(output);
  operation.received_bytes = nbytes(output) - nbytes(input);
  operation.after = after;
  return enqueue(std::move(operation));
}

Work Communicator::reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                  const Reduction& reduction, const Tag& tag,
                                  std::span<const int64_t> counts, const Work& after) {
  check_pair(output, input, tag);
  Operation operation = operation_on(OpKind::kReduceScatter, output, input, tag);
  operation.input_shares = shares_of(input, "input", counts);
  check_numel(output, "output", tag, operation.input_shares.count(rank_));
  check_overlap(input, output, operation.input_shares.offset(rank_), tag);
  FSDP_CHECK(reduction.store == Store::kWrite || apart(input, output), "output of '", tag.text(),
             "' lies in its input and store is add, which would count this rank's values twice: "
             "add to memory of its own");
  set_reduction(operation, reduction, tag);
  operation.print.bytes = nbytes(input);
  operation.received_bytes = (size_ - 1) * output.numel() * input.element_size();
  operation.after = after;
  return enqueue(std::move(operation));
}

Work Communicator::all_reduce(const at::Tensor& tensor, const Reduction& reduction, const Tag& tag,
                              const Work& after) {
  check_tensor(tensor, "tensor", tag);
  FSDP_CHECK(reduction.store == Store::kWrite, "store of all_reduce '", tag.text(),
             "' is add: its tensor is input and output at once, only reduce_scatter can add");
  Operation operation = operation_on(OpKind::kAllReduce, tensor, tensor, tag);
  set_reduction(operation, reduction, tag);
  // Whole cache lines, so that two ranks never write the same one.
  operation.input_shares = Shares::cut(tensor.numel(), size_, 64);
  operation.output_shares = operation.input_shares;
  operation.print.bytes = nbytes(tensor);
  operation.received_bytes = 2 * (size_ - 1) * nbytes(tensor) / size_;
  operation.after = after;
  return enqueue(std::move(operation));
}

Work Communicator::all_to_all(const at::Tensor& output, const at::Tensor& input, const Tag& tag,
                              std::span<const int64_t> output_counts,
                              std::span<const int64_t> input_counts) {
  check_pair(output, input, tag);
  check_same_dtype(output, input, tag);
  Operation operation = operation_on(OpKind::kAllToAll, output, input, tag);
  operation.output_shares = shares_of(output, "output", output_counts);
  operation.input_shares = shares_of(input, "input", input_counts);
  const int64_t kept = operation.input_shares.count(rank_);
  FSDP_CHECK(kept == operation.output_shares.count(rank_), "all_to_all '", tag.text(), "' sends ",
             kept, " elements to its own rank ", rank_, " and expects ",
             operation.output_shares.count(rank_), ": both must be equal");
  check_overlap(output, input, output.numel(), tag);
  const bool uneven = !output_counts.empty() || !input_counts.empty();
  operation.print.bytes = uneven ? -1 : nbytes(input);
  operation.received_bytes = nbytes(output) - kept * output.element_size();
  return enqueue(std::move(operation));
}

Work Communicator::broadcast(const at::Tensor& tensor, int root, const Tag& tag) {
  check_tensor(tensor, "tensor", tag);
  FSDP_CHECK(root >= 0 && root < size_, "root of broadcast '", tag.text(), "' is ", root,
             ": it must be from 0 to ", size_ - 1);
  Operation operation = operation_on(OpKind::kBroadcast, tensor, tensor, tag);
  operation.print.root = root;
  operation.print.bytes = nbytes(tensor);
  operation.received_bytes = rank_ == root ? 0 : nbytes(tensor);
  operation.output_shares = Shares::cut(tensor.numel(), size_, 64);
  return enqueue(std::move(operation));
}

Work Communicator::copy(const at::Tensor& output, const at::Tensor& input, const Tag& tag,
                        const Work& after) {
  check_pair(output, input, tag);
  check_numel(output, "output", tag, input.numel());
  FSDP_CHECK(apart(output, input), "input and output of copy '", tag.text(), "' overlap");
  Operation operation = operation_on(OpKind::kCopy, output, input, tag);
  operation.print.bytes = nbytes(input);
  operation.after = after;
  return enqueue(std::move(operation));
}

Work Communicator::barrier(const Tag& tag) {
  Operation operation;
  operation.print.kind = OpKind::kBarrier;
  operation.print.tag = tag;
  return enqueue(std::move(operation));
}

std::unique_ptr<Communicator> Communicator::split(std::span<const int> colors, std::string name,
                                                  const SubgroupOptions& options) {
  FSDP_CHECK(static_cast<int>(colors.size()) == size_, "colors has ", colors.size(),
             " entries: it must have one per rank of '", name_, "', ", size_);
  Subgroup part{.colors = colors,
                .members = {},
                .rank = 0,
                .name = std::move(name),
                .sum_group = 1,
                .options = options};
  std::vector<int> groups;  // ranks that are no neighbours here are none there
  for (int other = 0; other < size_; ++other) {
    if (colors[static_cast<size_t>(other)] != colors[static_cast<size_t>(rank_)]) continue;
    if (other == rank_) part.rank = part.size();
    part.members.push_back(other);
    groups.push_back(other / sum_group_);
  }
  part.sum_group = group_within(groups);
  return split_off(std::move(part));
}

}  // namespace fsdp
