#include "fsdp/nn/layers/documents.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "fsdp/base/check.h"

namespace fsdp {

namespace {

void check_starts(const std::vector<int64_t>& starts, int64_t rows, int64_t sequence) {
  FSDP_CHECK(rows >= 1 && sequence >= 1, "documents of a batch of ", rows, " x ", sequence,
             " tokens; it must have some");
  int64_t num_first = 0;
  for (size_t i = 0; i < starts.size(); ++i) {
    FSDP_CHECK(
        starts[i] >= 0 && starts[i] < rows * sequence && (i == 0 || starts[i] > starts[i - 1]),
        "document ", i, " begins at token ", starts[i], " of ", rows * sequence,
        "; documents must begin one after the other");
    num_first += starts[i] % sequence == 0 ? 1 : 0;
  }
  FSDP_CHECK(num_first == rows, "documents begin at the first token of ", num_first, " rows of ",
             rows, "; every row must begin one");
}

}  // namespace

Documents::Documents(std::vector<int64_t> starts, int64_t rows, int64_t sequence,
                     c10::Device device)
    : starts_(std::move(starts)), rows_(rows), sequence_(sequence), device_(device) {
  check_starts(starts_, rows, sequence);
  std::vector<int64_t> positions(static_cast<size_t>(rows * sequence));
  std::vector<int32_t> offsets(starts_.begin(), starts_.end());
  offsets.push_back(static_cast<int32_t>(positions.size()));
  for (size_t i = 0; i < starts_.size(); ++i) {
    longest_ = std::max<int64_t>(longest_, offsets[i + 1] - offsets[i]);
    for (int64_t token = offsets[i]; token < offsets[i + 1]; ++token)
      positions[static_cast<size_t>(token)] = token - offsets[i];
  }
  positions_ = at::tensor(positions, at::kLong).view({rows, sequence}).to(device);
  offsets_ = at::tensor(offsets, at::kInt).to(device);
}

Documents Documents::cut(int64_t length) const {
  std::vector<int64_t> starts;
  for (const int64_t start : starts_)
    if (start % sequence_ < length)
      starts.push_back(start / sequence_ * length + start % sequence_);
  return Documents(std::move(starts), rows_, length, device_);
}

std::vector<at::Tensor> Documents::divided(const at::Tensor& tensor) const {
  std::vector<int64_t> lengths;
  for (size_t i = 0; i < starts_.size(); ++i)
    lengths.push_back((i + 1 < starts_.size() ? starts_[i + 1] : rows_ * sequence_) - starts_[i]);
  return tensor.flatten(0, 1).unsqueeze(0).split_with_sizes(lengths, 1);
}

at::Tensor Documents::joined(const std::vector<at::Tensor>& parts) const {
  return at::cat(parts, 1).squeeze(0).unflatten(0, {rows_, sequence_});
}

at::Tensor in_each_document(
    const std::shared_ptr<const Documents>& documents, const std::vector<at::Tensor>& inputs,
    const std::function<at::Tensor(const std::vector<at::Tensor>&)>& function) {
  if (!documents) return function(inputs);
  std::vector<std::vector<at::Tensor>> parts;
  for (const at::Tensor& input : inputs) parts.push_back(documents->divided(input));
  std::vector<at::Tensor> results;
  for (size_t i = 0; i < static_cast<size_t>(documents->num_documents()); ++i) {
    std::vector<at::Tensor> one;
    for (const std::vector<at::Tensor>& each : parts) one.push_back(each[i]);
    results.push_back(function(one));
  }
  return documents->joined(results);
}

}  // namespace fsdp
