// fsdp_cpp._C: the ranks of a job and their meshes.
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "fsdp/comm/communicator.h"
#include "fsdp/python/bindings.h"
#include "fsdp/python/rank_axis.h"
#include "fsdp/python/resources.h"

namespace fsdp {

namespace py = pybind11;

namespace {

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
      .def_property_readonly("num_losses", [](RankMesh& self) { return self.mesh->num_losses(); })
      .def_property_readonly("loss", [](RankMesh& self) { return self.mesh->loss(); });
}

}  // namespace fsdp
