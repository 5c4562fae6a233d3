// fsdp_cpp._C: recorded steps.
#include "fsdp/graph/graph.h"
#include "fsdp/python/bindings.h"
#include "fsdp/python/resources.h"

namespace fsdp {

namespace py = pybind11;

namespace {

struct StepGraph final : Resource {
  StepGraph(std::shared_ptr<ShardedModel> stepped, std::shared_ptr<ModelOptimizer> updates,
            std::function<void()> body, const GraphOptions& options)
      : model(std::move(stepped)),
        optimizer(std::move(updates)),
        graph(std::make_unique<Graph>(model->sharded.get(), optimizer ? &optimizer->get() : nullptr,
                                      std::move(body), options)) {}
  void close() override { graph.close(); }

  std::shared_ptr<ShardedModel> model;
  std::shared_ptr<ModelOptimizer> optimizer;
  Held<std::unique_ptr<Graph>> graph;
};

}  // namespace

void bind_graph(py::module_& module) {
  py::class_<StepGraph, std::shared_ptr<StepGraph>>(module, "Graph")
      .def(py::init([](const std::shared_ptr<ShardedModel>& model,
                       const std::shared_ptr<ModelOptimizer>& optimizer, const py::object& body,
                       int32_t warmup, const std::vector<at::Generator>& generators) {
        return make_resource<StepGraph>(model, optimizer, callback(body),
                                        GraphOptions{.warmup = warmup, .generators = generators});
      }))
      .def(
          "run", [](StepGraph& self) { self.graph.get()->run(); }, WithoutGil())
      .def_property_readonly("is_recorded",
                             [](StepGraph& self) { return self.graph.get()->is_recorded(); });
}

}  // namespace fsdp
