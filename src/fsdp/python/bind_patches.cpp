// fsdp_cpp._C: patches of weights.
#include <utility>

#include "fsdp/checkpoint/patches.h"
#include "fsdp/python/bindings.h"
#include "fsdp/python/resources.h"

namespace fsdp {

namespace py = pybind11;

namespace {

using NamedValues = std::vector<std::pair<std::string, at::Tensor>>;

std::unique_ptr<PatchStream> stream_of(ShardedModel& model, ModelOptimizer* optimizer,
                                       const NamedValues& buffers, PatchNames names) {
  CheckpointState state{.sharded = model.sharded.get(),
                        .optimizer = optimizer == nullptr ? nullptr : &optimizer->get()};
  for (const auto& [name, value] : buffers) state.buffers.push_back({name, value});
  return std::make_unique<PatchStream>(state, PatchOptions{.names = names});
}

struct ModelPatches final : Resource {
  ModelPatches(std::shared_ptr<ShardedModel> patched, std::shared_ptr<ModelOptimizer> updates,
               const NamedValues& buffers, PatchNames names)
      : model(std::move(patched)),
        optimizer(std::move(updates)),
        stream(stream_of(*model, optimizer.get(), buffers, names)) {}
  void close() override { stream.close(); }
  PatchStream& get() { return *stream.get(); }

  std::shared_ptr<ShardedModel> model;
  std::shared_ptr<ModelOptimizer> optimizer;
  Held<std::unique_ptr<PatchStream>> stream;
};

// Ranges as positions: a program that takes tensors wants one form.
at::Tensor positions_of(const PatchTensor& tensor) {
  if (tensor.positions.defined()) return tensor.positions;
  std::vector<at::Tensor> parts;
  for (const PatchRange& range : tensor.ranges)
    parts.push_back(at::arange(range.begin, range.end, tensor.values.options().dtype(at::kLong)));
  return at::cat(parts);
}

}  // namespace

void bind_patches(py::module_& module) {
  py::class_<PatchTensor>(module, "PatchTensor")
      .def_readonly("name", &PatchTensor::name)
      .def_readonly("shape", &PatchTensor::shape)
      .def_property_readonly("positions", &positions_of)
      .def_readonly("values", &PatchTensor::values);
  py::class_<Patch>(module, "Patch")
      .def_readonly("base", &Patch::base)
      .def_readonly("begin", &Patch::from)
      .def_readonly("end", &Patch::to)
      .def_readonly("tensors", &Patch::tensors);
  py::class_<ModelPatches, std::shared_ptr<ModelPatches>>(module, "PatchStream")
      .def(py::init([](const std::shared_ptr<ShardedModel>& model,
                       const std::shared_ptr<ModelOptimizer>& optimizer, const NamedValues& buffers,
                       bool is_vllm) {
        const py::gil_scoped_release no_gil;
        return make_resource<ModelPatches>(model, optimizer, buffers,
                                           is_vllm ? PatchNames::kVllm : PatchNames::kPublished);
      }))
      .def(
          "take",
          [](ModelPatches& self, int64_t step, const std::string& device) {
            return self.get().take(step, c10::Device(device));
          },
          WithoutGil())
      .def(
          "write",
          [](ModelPatches& self, const std::string& directory, int64_t step) {
            return self.get().write(directory, step);
          },
          WithoutGil());
}

}  // namespace fsdp
