// A model that the ranks of a tp group and of an ep group compute together: every kind of
// parameter, with the collectives that a layer has around it.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/linear.h>

#include <string>
#include <vector>

#include "fsdp/comm/communicator.h"
#include "fsdp/comm/mesh.h"
#include "fsdp/shard/module_roles.h"
#include "fsdp/shard/unit.h"

namespace fsdp::testing::parallel {

inline constexpr int64_t kTokens = 8;
inline constexpr int64_t kHidden = 6;
inline constexpr int64_t kWide = 8;
inline constexpr int64_t kNumExperts = 8;

// --- rows and sums on an axis, and the way back of their gradients -------------------------------

inline at::Tensor as_is(const MeshAxis&, const at::Tensor& rows) { return rows.clone(); }

inline at::Tensor summed(const MeshAxis& axis, const at::Tensor& rows) {
  at::Tensor sum = rows.contiguous().clone();
  axis.reduce().all_reduce(sum, {}, "rows").wait();
  return sum;
}

inline at::Tensor gathered(const MeshAxis& axis, const at::Tensor& rows) {
  std::vector<int64_t> sizes = rows.sizes().vec();
  sizes.front() *= axis.size();
  at::Tensor all = at::empty(sizes, rows.options());
  axis.gather().all_gather(all, rows.contiguous(), "rows").wait();
  return all;
}

inline at::Tensor scattered(const MeshAxis& axis, const at::Tensor& rows) {
  at::Tensor own = at::empty({rows.size(0) / axis.size(), rows.size(1)}, rows.options());
  axis.reduce().reduce_scatter(own, rows.contiguous(), {}, "rows").wait();
  return own;
}

inline at::Tensor own_rows(const MeshAxis& axis, const at::Tensor& rows) {
  return rows.chunk(axis.size(), 0)[static_cast<size_t>(axis.rank())].clone();
}

using OnAxis = at::Tensor (*)(const MeshAxis&, const at::Tensor&);

template <OnAxis kThere, OnAxis kBack>
struct Along : torch::autograd::Function<Along<kThere, kBack>> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& rows,
                            int64_t axis) {
    context->saved_data["axis"] = axis;
    return kThere(*reinterpret_cast<const MeshAxis*>(axis), rows);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const int64_t axis = context->saved_data["axis"].toInt();
    return {kBack(*reinterpret_cast<const MeshAxis*>(axis), gradients[0]), at::Tensor()};
  }
};

template <OnAxis kThere, OnAxis kBack>
at::Tensor along(const MeshAxis* axis, const at::Tensor& rows) {
  if (axis == nullptr) return rows;
  return Along<kThere, kBack>::apply(rows, reinterpret_cast<int64_t>(axis));
}

// --- modules -------------------------------------------------------------------------------------

struct JoinsTp : TensorParallelModule {
  void join(const MeshAxis& axis) override { tp = &axis; }
  const MeshAxis* tp = nullptr;
};

// Three columns for each of kWide: one of the first section, and two neighbours of the second one.
struct ColumnImpl : torch::nn::Module, JoinsTp {
  ColumnImpl()
      : weight(register_parameter("weight", at::rand({3 * kWide, kHidden}) - 0.5)),
        bias(register_parameter("bias", at::rand({3 * kWide}))) {}
  TpPlacement tp_placement(const std::string&) const override {
    return TpShard{.dim = 0, .section_sizes = {kWide, 2 * kWide}};
  }
  at::Tensor forward(const at::Tensor& x) const {
    const at::Tensor all = at::linear(x, weight, bias);
    const int64_t columns = all.size(1) / 3;
    const at::Tensor pairs = all.slice(1, columns).reshape({x.size(0), columns, 2}).sum(-1);
    return at::tanh(all.slice(1, 0, columns)) * pairs;
  }
  at::Tensor weight, bias;
};
TORCH_MODULE(Column);

// A gate and an up projection in one tensor.
struct GatedImpl : torch::nn::Module, JoinsTp {
  GatedImpl() : weight(register_parameter("weight", at::rand({2 * kWide, kHidden}) - 0.5)) {}
  TpPlacement tp_placement(const std::string&) const override {
    return TpShard{.dim = 0, .num_sections = 2};
  }
  at::Tensor forward(const at::Tensor& x) const {
    const std::vector<at::Tensor> parts = at::linear(x, weight).chunk(2, 1);
    return at::sigmoid(parts[0]) * parts[1];
  }
  at::Tensor weight;
};
TORCH_MODULE(Gated);

// Its bias is added after the sum over the ranks: they all compute the same gradient of it.
struct RowImpl : torch::nn::Module, JoinsTp {
  RowImpl()
      : weight(register_parameter("weight", at::rand({kHidden, kWide}) - 0.5)),
        bias(register_parameter("bias", at::rand({kHidden}))) {}
  TpPlacement tp_placement(const std::string& name) const override {
    if (name == "bias") return TpEqual{};
    return TpShard{.dim = 1};
  }
  at::Tensor forward(const at::Tensor& x) const {
    return along<summed, as_is>(tp, at::linear(x, weight)) + bias;
  }
  at::Tensor weight, bias;
};
TORCH_MODULE(Row);

// Each rank of a tp group has tokens of its own: their gradients are parts.
struct ScaleImpl : torch::nn::Module, JoinsTp {
  ScaleImpl() : weight(register_parameter("weight", at::rand({kHidden}) + 0.5)) {}
  TpPlacement tp_placement(const std::string&) const override { return TpPartial{}; }
  at::Tensor forward(const at::Tensor& x) const { return x * weight; }
  at::Tensor weight;
};
TORCH_MODULE(Scale);

struct TokenExpertsImpl : torch::nn::Module, ExpertModule {
  TokenExpertsImpl()
      : weight(register_parameter("weight", at::rand({kNumExperts, kHidden}) + 0.5)) {}
  void join(const MeshAxis& axis) override { ep = &axis; }
  // Ranks of an ep group see each other's rows, and compute those of their own experts.
  at::Tensor forward(const at::Tensor& rows, const at::Tensor& expert) const {
    if (ep == nullptr) return rows * weight.index_select(0, expert);
    const at::Tensor all = along<gathered, scattered>(ep, rows);
    const at::Tensor local = gathered(*ep, expert) - ep->rank() * weight.size(0);
    const at::Tensor mine = local.ge(0).logical_and(local.lt(weight.size(0))).nonzero().view({-1});
    const at::Tensor computed =
        all.index_select(0, mine) * weight.index_select(0, local.index_select(0, mine));
    return along<scattered, gathered>(ep, at::zeros_like(all).index_copy(0, mine, computed));
  }
  at::Tensor weight;
  const MeshAxis* ep = nullptr;
};
TORCH_MODULE(TokenExperts);

// It has no parameters of its own, but divides the tokens among the ranks of its tp group.
struct ParallelLayerImpl : torch::nn::Module, JoinsTp {
  ParallelLayerImpl()
      : linear(register_module("linear", torch::nn::Linear(kHidden, kHidden))),
        column(register_module("column", Column())),
        gated(register_module("gated", Gated())),
        row(register_module("row", Row())),
        scale(register_module("scale", Scale())),
        experts(register_module("experts", TokenExperts())) {}
  TpPlacement tp_placement(const std::string&) const override { return TpEqual{}; }

  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor hidden = at::tanh(linear(x));
    const at::Tensor input = along<as_is, summed>(tp, hidden);
    const at::Tensor wide = hidden + row(column(input) * gated(input));
    // From here on each rank has tokens of its own. Some experts have none.
    at::Tensor expert = (at::arange(kTokens) * 3).remainder(kNumExperts - 1);
    if (tp != nullptr) expert = own_rows(*tp, expert);
    const at::Tensor scaled = scale(along<own_rows, gathered>(tp, wide));
    return along<gathered, own_rows>(tp, scaled + experts(scaled, expert));
  }

  torch::nn::Linear linear;
  Column column;
  Gated gated;
  Row row;
  Scale scale;
  TokenExperts experts;
};
TORCH_MODULE(ParallelLayer);

struct ParallelModelImpl : torch::nn::Module {
  ParallelModelImpl()
      : first(register_module("first", Unit<ParallelLayer>())),
        second(register_module("second", Unit<ParallelLayer>())),
        last(register_module("last", Scale())) {}  // outside any unit
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor hidden = second(first(x));
    return along<gathered, own_rows>(last->tp, last(along<own_rows, gathered>(last->tp, hidden)));
  }
  Unit<ParallelLayer> first, second;
  Scale last;
};
TORCH_MODULE(ParallelModel);

// A rank's part of the parameter `name`, given all of it; done by hand.
inline at::Tensor owned_by(const Mesh& mesh, const std::string& name, const at::Tensor& whole) {
  const auto part = [](const MeshAxis* axis, const at::Tensor& tensor, int64_t dim) {
    if (axis == nullptr) return tensor;
    return tensor.chunk(axis->size(), dim)[static_cast<size_t>(axis->rank())];
  };
  const auto sections = [&](std::vector<int64_t> sizes) {
    std::vector<at::Tensor> parts;
    for (const at::Tensor& section : whole.split_with_sizes(sizes, 0))
      parts.push_back(part(mesh.tp(), section, 0));
    return at::cat(parts, 0);
  };
  const auto is = [&](const char* what) { return name.find(what) != std::string::npos; };
  if (is("column")) return sections({kWide, 2 * kWide});
  if (is("gated")) return sections({kWide, kWide});
  if (is("row.weight")) return part(mesh.tp(), whole, 1);
  if (is("experts")) return part(mesh.ep(), whole, 0);
  return whole;
}

}  // namespace fsdp::testing::parallel
