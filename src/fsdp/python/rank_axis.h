// What Python's modules tell the other ranks of their ep or tp group, with the way back of
// gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/python/resources.h"

namespace fsdp {

// The gradient of a result that every rank of the group has.
enum class GradientOnAxis : uint8_t {
  kEqual,    // all ranks use the result alike: each has the whole gradient
  kPartial,  // each uses it in its own way: the gradient is the sum of theirs
};

// The ranks of an ep or tp group, seen from this one. Of a mesh without the axis it is one rank,
// and every function returns its argument; so modules need no branches.
//
// All ranks of the group call the same functions in the same order, and the backward of what they
// return. Rows of `dim` are shared out in rank order. UsageError for sizes that do not fit.
class RankAxis {
 public:
  using OfMesh = const MeshAxis* (Mesh::*)() const;
  RankAxis(std::shared_ptr<RankMesh> mesh, OfMesh of_mesh, std::string name)
      : mesh_(std::move(mesh)), axis_(of_mesh), name_(std::move(name)) {}

  const std::string& name() const { return name_; }
  int rank() const { return axis() == nullptr ? 0 : axis()->rank(); }
  int size() const { return axis() == nullptr ? 1 : axis()->size(); }

  //                       result                             gradient of the argument
  // all_reduce            the sum of the ranks' tensors      equal: as it is; partial: the sum
  // all_gather            one below the other along dim      partial: the sum, this rank's part;
  //                                                          equal: this rank's part
  // reduce_scatter        this rank's part of the sum        one below the other
  // split                 this rank's part of what all have  one below the other
  // sum_gradient          the argument                       the sum
  // all_to_all            rows from every rank               the same way back
  at::Tensor all_reduce(const at::Tensor& tensor, GradientOnAxis gradient) const;
  at::Tensor all_gather(const at::Tensor& tensor, int64_t dim, GradientOnAxis gradient) const;
  at::Tensor reduce_scatter(const at::Tensor& tensor, int64_t dim) const;
  at::Tensor split(const at::Tensor& tensor, int64_t dim) const;
  at::Tensor sum_gradient(const at::Tensor& tensor) const;

  // Rows of the first dimension: `input_counts[r]` of them go to rank r, `output_counts[r]` come
  // from it. Without counts everybody gets equally many.
  using Counts = std::optional<std::vector<int64_t>>;
  at::Tensor all_to_all(const at::Tensor& rows, const Counts& output_counts,
                        const Counts& input_counts) const;

 private:
  const MeshAxis* axis() const { return (mesh_->mesh.get().*axis_)(); }

  std::shared_ptr<RankMesh> mesh_;  // keeps the axis, also for gradients on their way
  OfMesh axis_;
  std::string name_;
};

}  // namespace fsdp
