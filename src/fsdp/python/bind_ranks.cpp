// fsdp_cpp._C: the ranks of a job, their meshes, and the axes over which modules compute together:
// what they tell each other, with the way back of gradients, and what they say of tensors.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/base/option_values.h"
#include "fsdp/base/text.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/nn/layers/experts.h"
#include "fsdp/nn/layers/rank_slices.h"
#include "fsdp/python/bindings.h"
#include "fsdp/python/resources.h"
#include "fsdp/shard/module_roles.h"

namespace fsdp {

namespace py = pybind11;

namespace {

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

  // nullptr: the mesh has no such axis.
  const MeshAxis* axis() const { return (mesh_->mesh.get().*axis_)(); }

 private:
  // The way of a tensor; each transfer keeps the mesh, also for gradients on their way.
  nn::RankTransfer summed() const {
    return [self = *this](const at::Tensor& each) {
      return nn::all_summed(each, self.axis()->reduce());
    };
  }
  nn::RankTransfer gathered(int64_t dim) const {
    return [self = *this, dim](const at::Tensor& own) {
      return nn::slices_gathered(own, dim, self.axis()->gather());
    };
  }
  nn::RankTransfer scattered(int64_t dim) const {
    return [self = *this, dim](const at::Tensor& all) {
      return nn::sums_scattered(all, dim, self.axis()->reduce());
    };
  }
  nn::RankTransfer own_part(int64_t dim) const {
    return [self = *this, dim](const at::Tensor& all) {
      return nn::slice_kept(all, dim, self.axis()->gather()).clone(at::MemoryFormat::Contiguous);
    };
  }
  using RowCounts = std::vector<int64_t>;
  nn::RankTransfer exchanged(const RowCounts& output_rows, const RowCounts& input_rows) const {
    return [self = *this, output_rows, input_rows](const at::Tensor& rows) {
      return nn::rows_exchanged(rows, output_rows, input_rows, self.axis()->gather());
    };
  }

  std::shared_ptr<RankMesh> mesh_;  // keeps the axis
  OfMesh axis_;
  std::string name_;
};

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

at::Tensor RankAxis::all_reduce(const at::Tensor& tensor, GradientOnAxis gradient) const {
  if (size() == 1) return tensor;
  const nn::RankTransfer as_is = [](const at::Tensor& each) { return each; };
  return nn::along_ranks(tensor, summed(), gradient == GradientOnAxis::kEqual ? as_is : summed());
}

at::Tensor RankAxis::all_gather(const at::Tensor& tensor, int64_t dim,
                                GradientOnAxis gradient) const {
  dim = checked_dim(tensor, dim, "all_gather");
  if (size() == 1) return tensor;
  return nn::along_ranks(tensor, gathered(dim),
                         gradient == GradientOnAxis::kEqual ? own_part(dim) : scattered(dim));
}

at::Tensor RankAxis::reduce_scatter(const at::Tensor& tensor, int64_t dim) const {
  dim = shared_dim(*this, tensor, dim, "reduce_scatter");
  return size() == 1 ? tensor : nn::along_ranks(tensor, scattered(dim), gathered(dim));
}

at::Tensor RankAxis::split(const at::Tensor& tensor, int64_t dim) const {
  dim = shared_dim(*this, tensor, dim, "split");
  return size() == 1 ? tensor : nn::along_ranks(tensor, own_part(dim), gathered(dim));
}

at::Tensor RankAxis::sum_gradient(const at::Tensor& tensor) const {
  if (size() == 1 || !tensor.requires_grad() || !at::GradMode::is_enabled()) return tensor;
  // A view and a hook, so that nothing is copied.
  const at::Tensor same = tensor.view_as(tensor);
  same.register_hook(summed());
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
  return nn::along_ranks(rows, exchanged(output, input), exchanged(input, output));
}

// The module that calls it keeps `agreed_tokens` from call to call (ExpertRanks), and gets it back.
std::pair<at::Tensor, int64_t> mix_by_experts(const at::Tensor& tokens, const at::Tensor& chosen,
                                              const at::Tensor& weight, const at::Tensor& gate_up,
                                              const at::Tensor& down, const std::string& activation,
                                              const std::optional<RankAxis>& ep,
                                              int64_t agreed_tokens) {
  static const auto gated =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("fsdp_cpp::gated", "")
          .typed<at::Tensor(const at::Tensor&, const std::optional<at::Tensor>&,
                            std::string_view)>();
  const int64_t num_experts = gate_up.size(0) * (ep ? ep->size() : 1);
  const auto result = nn::mixed_by_experts(
      tokens, nn::sort_choices(chosen, num_experts), weight,
      {gate_up.flatten(0, 1), down.flatten(0, 1),
       [&](const at::Tensor& rows) { return gated.call(rows, std::nullopt, activation); }},
      {.ep = ep && ep->size() > 1 ? ep->axis() : nullptr, .agreed_tokens = &agreed_tokens});
  return {result.output, agreed_tokens};
}

GradientOnAxis parse_gradient(const std::string& value) {
  const std::vector<std::string> names = {"equal", "partial"};
  return static_cast<GradientOnAxis>(parse_choice("gradient", value, names));
}

std::string text_of(const TpShard& cut) {
  const auto pieces = py::str(
      "TpShard(dim={}, num_sections={}, section_sizes={}, "
      "partial_if_uneven={})");
  return pieces.format(cut.dim, cut.num_sections, cut.section_sizes, cut.partial_if_uneven);
}

void bind_placements(py::module_& module) {
  py::class_<TpEqual>(module, "TpEqual").def(py::init<>()).def("__repr__", [](const TpEqual&) {
    return "TpEqual()";
  });
  py::class_<TpPartial>(module, "TpPartial")
      .def(py::init<>())
      .def("__repr__", [](const TpPartial&) { return "TpPartial()"; });
  py::class_<TpShard>(module, "TpShard")
      .def(py::init([](int64_t dim, int64_t num_sections, std::vector<int64_t> section_sizes,
                       bool partial_if_uneven) {
             return TpShard{dim, num_sections, std::move(section_sizes), partial_if_uneven};
           }),
           py::arg("dim"), py::kw_only(), py::arg("num_sections") = 1,
           py::arg("section_sizes") = std::vector<int64_t>(), py::arg("partial_if_uneven") = false)
      .def_readonly("dim", &TpShard::dim)
      .def_readonly("num_sections", &TpShard::num_sections)
      .def_readonly("section_sizes", &TpShard::section_sizes)
      .def_readonly("partial_if_uneven", &TpShard::partial_if_uneven)
      .def("__repr__", &text_of);
}

void bind_axis(py::module_& module) {
  py::class_<RankAxis>(module, "Axis")
      .def_property_readonly("name", &RankAxis::name)
      .def_property_readonly("rank", &RankAxis::rank)
      .def_property_readonly("size", &RankAxis::size)
      .def("__repr__",
           [](const RankAxis& self) {
             return concat("Axis(name='", self.name(), "', rank=", self.rank(),
                           ", size=", self.size(), ")");
           })
      // A handle: a copy of a module that has one computes with the same ranks.
      .def("__deepcopy__", [](const RankAxis& self, const py::dict&) { return self; })
      .def(
          "all_reduce",
          [](const RankAxis& self, const at::Tensor& tensor, const std::string& gradient) {
            return self.all_reduce(tensor, parse_gradient(gradient));
          },
          py::arg("tensor"), py::kw_only(), py::arg("gradient") = "equal", WithoutGil())
      .def(
          "all_gather",
          [](const RankAxis& self, const at::Tensor& tensor, int64_t dim,
             const std::string& gradient) {
            return self.all_gather(tensor, dim, parse_gradient(gradient));
          },
          py::arg("tensor"), py::arg("dim") = 0, py::kw_only(), py::arg("gradient") = "partial",
          WithoutGil())
      .def("reduce_scatter", &RankAxis::reduce_scatter, py::arg("tensor"), py::arg("dim") = 0,
           WithoutGil())
      .def("split", &RankAxis::split, py::arg("tensor"), py::arg("dim") = 0, WithoutGil())
      .def("sum_gradient", &RankAxis::sum_gradient, py::arg("tensor"), WithoutGil())
      .def("all_to_all", &RankAxis::all_to_all, py::arg("rows"),
           py::arg("output_counts") = py::none(), py::arg("input_counts") = py::none(),
           WithoutGil());
  module.def("mix_by_experts", &mix_by_experts, WithoutGil());
}

std::shared_ptr<RankWorld> world_of_store(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                          int size, int local_rank, int local_size,
                                          const std::string& master_address,
                                          const std::string& meeting) {
  const py::gil_scoped_release no_gil;
  Launch launch;
  launch.launcher = Launcher::kTorchrun;
  launch.rank = rank;
  launch.size = size;
  launch.local_rank = local_rank;
  launch.local_size = local_size;
  launch.master_address = master_address;
  return make_resource<RankWorld>(World::from_store(*store, launch, meeting));
}

}  // namespace

void bind_ranks(py::module_& module) {
  bind_placements(module);
  bind_axis(module);
  py::class_<RankWorld, std::shared_ptr<RankWorld>>(module, "World")
      .def_static(
          "from_environment", [] { return make_resource<RankWorld>(World::from_environment()); },
          WithoutGil())
      .def_static("from_store", &world_of_store)
      .def_property_readonly("rank", [](RankWorld& self) { return self.world->rank(); })
      .def_property_readonly("size", [](RankWorld& self) { return self.world->size(); })
      .def_property_readonly("local_rank", [](RankWorld& self) { return self.world->local_rank(); })
      .def_property_readonly("local_size",
                             [](RankWorld& self) { return self.world->launch().local_size; })
      .def_property_readonly("launcher",
                             [](RankWorld& self) { return name_of(self.world->launch().launcher); })
      .def_property_readonly("is_open", [](RankWorld& self) { return self.world.is_open(); })
      .def(
          "mesh",
          [](const std::shared_ptr<RankWorld>& self, int outer, int ep, int tp) {
            return make_resource<RankMesh>(self, MeshOptions{.outer = outer, .ep = ep, .tp = tp});
          },
          py::arg("outer"), py::arg("ep"), py::arg("tp"), WithoutGil())
      .def(
          "barrier", [](RankWorld& self) { self.world->communicator().barrier("barrier").wait(); },
          WithoutGil())
      .def(
          "abort",
          [](RankWorld& self, const std::string& message) {
            self.world->communicator().abort(message);
          },
          WithoutGil());
  py::class_<RankMesh, std::shared_ptr<RankMesh>>(module, "Mesh")
      .def_property_readonly("world", [](RankMesh& self) { return self.ranks; })
      // A handle, as its axes are.
      .def("__deepcopy__",
           [](const std::shared_ptr<RankMesh>& self, const py::dict&) { return self; })
      .def_property_readonly("inner_size", [](RankMesh& self) { return self.mesh->inner().size(); })
      .def_property_readonly("outer_size", [](RankMesh& self) { return self.mesh->outer().size(); })
      .def_property_readonly("inner_rank", [](RankMesh& self) { return self.mesh->inner().rank(); })
      .def_property_readonly("outer_rank", [](RankMesh& self) { return self.mesh->outer().rank(); })
      .def_property_readonly(
          "ep",
          [](const std::shared_ptr<RankMesh>& self) { return RankAxis(self, &Mesh::ep, "ep"); })
      .def_property_readonly(
          "tp",
          [](const std::shared_ptr<RankMesh>& self) { return RankAxis(self, &Mesh::tp, "tp"); })
      .def_property_readonly("data_parallel_size",
                             [](RankMesh& self) { return self.mesh->data_parallel_size(); })
      .def_property_readonly("data_parallel_rank",
                             [](RankMesh& self) { return self.mesh->data_parallel_rank(); });
}

}  // namespace fsdp
