// fsdp_cpp._C: optimizers and recorded steps.
#include "fsdp/graph/graph.h"
#include "fsdp/python/bindings.h"
#include "fsdp/python/resources.h"

namespace fsdp {

namespace py = pybind11;

namespace {

template <typename Optimizer, typename Options>
std::shared_ptr<ModelOptimizer> make_optimizer(const std::shared_ptr<ShardedModel>& model,
                                               const Options& options) {
  const py::gil_scoped_release no_gil;
  return make_resource<ModelOptimizer>(model, nullptr,
                                       std::make_unique<Optimizer>(model->sharded.get(), options));
}

using StepGraph = OnModel<Graph>;

}  // namespace

void bind_optim(py::module_& module) {
  module.def("adamw", [](const std::shared_ptr<ShardedModel>& model, const py::dict& keywords) {
    return make_optimizer<AdamW>(model, adamw_options(keywords));
  });
  module.def("sgd", [](const std::shared_ptr<ShardedModel>& model, const py::dict& keywords) {
    return make_optimizer<SGD>(model, sgd_options(keywords));
  });
  module.def("muon", [](const std::shared_ptr<ShardedModel>& model, const py::dict& keywords) {
    return make_optimizer<Muon>(model, muon_options(keywords));
  });
  py::class_<ModelOptimizer, std::shared_ptr<ModelOptimizer>>(module, "Optimizer")
      .def("step", method_of<ModelOptimizer>(&Optimizer::step), WithoutGil())
      .def("zero_grad", method_of<ModelOptimizer>(&Optimizer::zero_grad), WithoutGil())
      .def("wait", method_of<ModelOptimizer>(&Optimizer::wait), WithoutGil())
      .def_property("learning_rate", method_of<ModelOptimizer>(&Optimizer::learning_rate),
                    [](ModelOptimizer& self, double rate) { self.get().set_learning_rate(rate); })
      .def("set_rule", method_of<ModelOptimizer>(&Optimizer::set_rule), WithoutGil())
      .def(
          "set_momenta",
          [](ModelOptimizer& self, std::optional<double> beta1, std::optional<double> beta2,
             std::optional<double> momentum) {
            self.get().set_momenta({.beta1 = beta1, .beta2 = beta2, .momentum = momentum});
          },
          WithoutGil())
      .def("scaled", method_of<ModelOptimizer>(&Optimizer::scaled))
      .def("gradient_norm", method_of<ModelOptimizer>(&Optimizer::gradient_norm), WithoutGil())
      .def("was_skipped", method_of<ModelOptimizer>(&Optimizer::was_skipped), WithoutGil());
  py::class_<StepGraph, std::shared_ptr<StepGraph>>(module, "Graph")
      .def(py::init([](const std::shared_ptr<ShardedModel>& model,
                       const std::shared_ptr<ModelOptimizer>& optimizer, const py::object& body,
                       int32_t warmup, const std::vector<at::Generator>& generators) {
        return make_resource<StepGraph>(
            model, optimizer,
            std::make_unique<Graph>(model->sharded.get(), optimizer_in(optimizer), callback(body),
                                    GraphOptions{.warmup = warmup, .generators = generators}));
      }))
      .def("run", method_of<StepGraph>(&Graph::run), WithoutGil())
      .def_property_readonly("is_recorded", method_of<StepGraph>(&Graph::is_recorded));
}

}  // namespace fsdp
