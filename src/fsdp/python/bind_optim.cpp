// fsdp_cpp._C: optimizers.
#include "fsdp/python/bindings.h"
#include "fsdp/python/keywords.h"
#include "fsdp/python/resources.h"

namespace fsdp {

namespace py = pybind11;

namespace {

template <typename Optimizer, typename Options>
std::shared_ptr<ModelOptimizer> make_optimizer(const std::shared_ptr<ShardedModel>& model,
                                               const Options& options) {
  const py::gil_scoped_release no_gil;
  return make_resource<ModelOptimizer>(model,
                                       std::make_unique<Optimizer>(model->sharded.get(), options));
}

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
      .def(
          "step", [](ModelOptimizer& self) { self.get().step(); }, WithoutGil())
      .def(
          "zero_grad", [](ModelOptimizer& self) { self.get().zero_grad(); }, WithoutGil())
      .def(
          "wait", [](ModelOptimizer& self) { self.get().wait(); }, WithoutGil())
      .def_property(
          "learning_rate", [](ModelOptimizer& self) { return self.get().learning_rate(); },
          [](ModelOptimizer& self, double rate) { self.get().set_learning_rate(rate); })
      .def(
          "set_rule",
          [](ModelOptimizer& self, size_t index, double weight_decay, double rate_scale) {
            self.get().set_rule(index, weight_decay, rate_scale);
          },
          WithoutGil())
      .def(
          "set_momenta",
          [](ModelOptimizer& self, std::optional<double> beta1, std::optional<double> beta2,
             std::optional<double> momentum) {
            self.get().set_momenta({.beta1 = beta1, .beta2 = beta2, .momentum = momentum});
          },
          WithoutGil())
      .def("scaled",
           [](ModelOptimizer& self, const at::Tensor& loss) { return self.get().scaled(loss); })
      .def(
          "gradient_norm", [](ModelOptimizer& self) { return self.get().gradient_norm(); },
          WithoutGil())
      .def(
          "was_skipped", [](ModelOptimizer& self) { return self.get().was_skipped(); },
          WithoutGil());
}

}  // namespace fsdp
