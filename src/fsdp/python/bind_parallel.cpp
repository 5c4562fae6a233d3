// fsdp_cpp._C: the axes of a mesh over which modules compute together, and what they say of
// tensors.
#include "fsdp/base/option_values.h"
#include "fsdp/base/text.h"
#include "fsdp/python/bindings.h"
#include "fsdp/python/rank_axis.h"
#include "fsdp/shard/parallel_module.h"

namespace fsdp {

namespace py = pybind11;

namespace {

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

}  // namespace

void bind_parallel(py::module_& module) {
  bind_placements(module);
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
}

}  // namespace fsdp
