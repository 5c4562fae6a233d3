// Where the documents of a packed batch begin: they do not see each other, and each counts its
// positions from 0.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace fsdp {

// Immutable. Of a batch [rows, sequence]; a document is inside a row.
class Documents {
 public:
  // `starts`: numbers of the documents' first tokens, counted row after row and in order. Every row
  // begins a document.
  Documents(std::vector<int64_t> starts, int64_t rows, int64_t sequence, c10::Device device);

  int64_t num_documents() const { return static_cast<int64_t>(starts_.size()); }
  int64_t longest() const { return longest_; }  // tokens

  // [rows, sequence], int64: of each token in its document.
  const at::Tensor& positions() const { return positions_; }
  // [documents + 1], int32: `starts`, and the number of all tokens.
  const at::Tensor& offsets() const { return offsets_; }

  // The first `length` tokens of each row.
  Documents cut(int64_t length) const;

  // Those of tensors [rows, sequence, ...], each as [1, its tokens, ...]; and back.
  std::vector<at::Tensor> divided(const at::Tensor& tensor) const;
  at::Tensor joined(const std::vector<at::Tensor>& parts) const;

 private:
  const std::vector<int64_t> starts_;
  const int64_t rows_;
  const int64_t sequence_;
  const c10::Device device_;
  int64_t longest_ = 0;
  at::Tensor positions_;
  at::Tensor offsets_;
};

// Applies `function` to each document alone; without documents, to the inputs as they are.
// Inputs and result are [rows, sequence, ...].
at::Tensor in_each_document(
    const std::shared_ptr<const Documents>& documents, const std::vector<at::Tensor>& inputs,
    const std::function<at::Tensor(const std::vector<at::Tensor>&)>& function);

}  // namespace fsdp
