// fsdp_cpp._C: the module tree, units, and sharded models.
#include "fsdp/nn/layers/linear.h"
#include "fsdp/python/bindings.h"
#include "fsdp/python/resources.h"
#include "fsdp/python/whole_model.h"
#include "fsdp/shard/engine/engine.h"

namespace fsdp {

namespace py = pybind11;

namespace {

using Tensors = std::vector<at::Tensor>;

template <typename Mirror>
std::shared_ptr<Mirror> make_mirror(const std::string& class_name, const py::object& initialize,
                                    bool multiplies_codes) {
  return std::make_shared<Mirror>(class_name, callback(initialize), multiplies_codes);
}

// One call of a unit, between its two ends.
struct OpenCall {
  std::shared_ptr<UnitHooks::Call> call;
};

// `now` where a tensor was replaced; None, the usual case, spares Python the search for its place.
std::optional<Tensors> if_replaced(const Tensors& before, Tensors now) {
  for (size_t i = 0; i < now.size(); ++i)
    if (!now[i].is_same(before[i])) return now;
  return std::nullopt;
}

std::pair<OpenCall, std::optional<Tensors>> enter_unit(UnitMirror& unit, const Tensors& inputs) {
  Tensors entered = inputs;
  OpenCall open{unit.enter(entered)};
  return {std::move(open), if_replaced(inputs, std::move(entered))};
}

std::optional<Tensors> leave_unit(OpenCall& open, const Tensors& outputs) {
  Tensors left = outputs;
  if (open.call != nullptr) leave(*open.call, left);
  open.call.reset();
  return if_replaced(outputs, std::move(left));
}

void fail_unit(OpenCall& open) {
  if (open.call != nullptr) open.call->fail();
  open.call.reset();
}

std::shared_ptr<ShardedModel> shard_model(const std::shared_ptr<ModuleMirror>& root,
                                          const std::shared_ptr<RankMesh>& mesh,
                                          const py::dict& keywords) {
  const ShardOptions options = shard_options(keywords);
  const py::gil_scoped_release no_gil;
  auto model = make_resource<ShardedModel>(mesh, root, options);
  root->forget_initialization();
  return model;
}

// Whole parameters between enter() and exit().
class WholeParameters {
 public:
  WholeParameters(std::shared_ptr<ShardedModel> model, Sharded::Access access,
                  std::vector<std::string> units)
      : model_(std::move(model)), access_(access), units_(std::move(units)) {}
  void enter() {
    guard_.reset(new Sharded::FullParameters(model_->sharded->full_parameters(access_, units_)));
  }
  void exit() {
    if (const auto guard = std::move(guard_)) guard->close();
  }

 private:
  const std::shared_ptr<ShardedModel> model_;
  const Sharded::Access access_;
  const std::vector<std::string> units_;  // none: all
  std::unique_ptr<Sharded::FullParameters> guard_;
};

// Whether ShardedParameter::main_weight is a copy of some main weight.
bool has_copied_main_weights(ShardedModel& model) {
  for (const auto& unit : EngineAccess::of(model.sharded.get()).units())
    for (const ParamGroup& group : unit->groups())
      if (group.is_trainable() && !group.main_weights().has_views()) return true;
  return false;
}

py::dict memory_of(const MemoryReport& memory) {
  py::dict bytes;
  bytes["weights"] = memory.weight_bytes;
  bytes["main_weights"] = memory.main_weight_bytes;
  bytes["main_grads"] = memory.main_grad_bytes;
  bytes["pool"] = memory.pool_bytes;
  bytes["reduction"] = memory.reduction_bytes;
  bytes["moments"] = memory.moment_bytes;
  bytes["workspace"] = memory.workspace_bytes;
  bytes["host"] = memory.host_bytes;
  bytes["total"] = memory.total_bytes();
  bytes["peak"] = memory.peak_bytes;
  return bytes;
}

void bind_modules(py::module_& module) {
  py::class_<ModuleMirror, std::shared_ptr<ModuleMirror>>(module, "Module")
      .def(py::init(&make_mirror<ModuleMirror>))
      .def("add_parameter", &ModuleMirror::add_parameter)
      .def("add_buffer", &ModuleMirror::add_buffer)
      .def("add_child", &ModuleMirror::add_child);
  py::class_<UnitMirror, ModuleMirror, std::shared_ptr<UnitMirror>>(module, "Unit")
      .def(py::init(&make_mirror<UnitMirror>))
      .def("enter", &enter_unit, WithoutGil());
  py::class_<OpenCall>(module, "Call")
      .def("leave", &leave_unit, WithoutGil())
      .def("fail", &fail_unit, WithoutGil());
}

}  // namespace

void bind_shard(py::module_& module) {
  bind_modules(module);
  module.def("fully_shard", &shard_model);
  module.def(
      "linear",
      [](const at::Tensor& input, const Tensors& weights,
         const std::vector<std::optional<at::Tensor>>& biases) {
        Tensors present;
        for (const auto& bias : biases) present.push_back(bias.value_or(at::Tensor()));
        return nn::linear(input, weights, present);
      },
      WithoutGil());
  py::class_<ParameterPart>(module, "ShardedParameter")
      .def_property_readonly("name", &ParameterPart::name)
      .def_property_readonly("aliases", &ParameterPart::aliases)
      .def_property_readonly("unit", &ParameterPart::unit)
      .def_property_readonly("shape", &ParameterPart::shape)
      .def_property_readonly("is_trainable", &ParameterPart::is_trainable)
      .def_property_readonly("begin", &ParameterPart::begin)
      .def_property_readonly("numel", &ParameterPart::numel)
      .def_property_readonly("main_weight",
                             [](const ParameterPart& self) {
                               const py::gil_scoped_release no_gil;
                               return self.main_weight();
                             })
      .def_property_readonly("gradient", &ParameterPart::gradient);
  py::class_<WholeParameters>(module, "WholeParameters")
      .def("enter", &WholeParameters::enter, WithoutGil())
      .def("exit", &WholeParameters::exit, WithoutGil());
  py::class_<ShardedModel, std::shared_ptr<ShardedModel>>(module, "Sharded")
      .def_property_readonly("mesh", [](ShardedModel& self) { return self.mesh; })
      .def("close", &ShardedModel::close, WithoutGil())
      .def_property_readonly("unit_names", method_of<ShardedModel>(&Sharded::unit_names))
      .def("memory", [](ShardedModel& self) { return memory_of(self.sharded->memory()); })
      .def("memory_text", [](ShardedModel& self) { return self.sharded->memory().text(); })
      .def(
          "microbatch", [](ShardedModel& self, bool last) { self.sharded->microbatch({last}); },
          WithoutGil())
      .def_property_readonly(
          "is_last_microbatch",
          [](ShardedModel& self) {
            return EngineAccess::of(self.sharded.get()).gradients().is_last_microbatch();
          })
      .def(
          "end_cycle",
          [](ShardedModel& self, const char* reader) {
            EngineAccess::of(self.sharded.get()).end_cycle(reader);
          },
          WithoutGil())
      .def("check_complete", &check_complete, WithoutGil())
      .def("gradients_for_update", &gradients_for_update, WithoutGil())
      .def("wait_gradients", method_of<ShardedModel>(&Sharded::wait_gradients), WithoutGil())
      .def("zero_grad", method_of<ShardedModel>(&Sharded::zero_grad), WithoutGil())
      .def("found_nonfinite", method_of<ShardedModel>(&Sharded::found_nonfinite), WithoutGil())
      .def("refresh_weights", method_of<ShardedModel>(&Sharded::refresh_weights), WithoutGil())
      .def("clip_gradients", &clip_gradients, WithoutGil())
      .def("scale_gradients", &scale_gradients, WithoutGil())
      .def("set_main_weights", &set_main_weights, WithoutGil())
      .def("join_slices", &join_slices, WithoutGil())
      .def_property_readonly("has_copied_main_weights", &has_copied_main_weights)
      .def("whole_parameters",
           [](const std::shared_ptr<ShardedModel>& self, bool writes,
              std::vector<std::string> units) {
             return std::make_unique<WholeParameters>(
                 self, writes ? Sharded::Access::kWrite : Sharded::Access::kRead, std::move(units));
           })
      .def("parameters", &parts_of)
      .def("unshard", method_of<ShardedModel>(&Sharded::unshard), WithoutGil())
      .def("reshard", method_of<ShardedModel>(&Sharded::reshard), WithoutGil())
      .def("set_precision",
           [](ShardedModel& self, const py::dict& keywords) {
             const PrecisionPolicy precision =
                 precision_policy(self.sharded->options().precision, keywords);
             const py::gil_scoped_release no_gil;
             self.sharded->set_precision(precision);
           })
      .def(
          "set_prefetch",
          [](ShardedModel& self, const std::string& unit, const std::vector<std::string>& ahead,
             bool in_backward) {
            self.sharded->set_prefetch(unit, ahead,
                                       in_backward ? PrefetchIn::kBackward : PrefetchIn::kForward);
          },
          WithoutGil())
      .def("reset", method_of<ShardedModel>(&Sharded::reset), WithoutGil());
}

}  // namespace fsdp
