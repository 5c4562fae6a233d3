// fsdp_cpp._C: checkpoints.
#include "fsdp/base/torch_dtype.h"
#include "fsdp/checkpoint/checkpointer.h"
#include "fsdp/checkpoint/load.h"
#include "fsdp/checkpoint/weight_export.h"
#include "fsdp/python/bindings.h"
#include "fsdp/python/resources.h"

namespace fsdp {

namespace py = pybind11;

namespace {

using Buffers = std::vector<std::pair<std::string, at::Tensor>>;
using OptimizerHandle = std::shared_ptr<ModelOptimizer>;  // nullptr: weights alone
using OtherHandle = std::shared_ptr<OtherOptimizer>;      // the same

CheckpointState state_of(ShardedModel& model, const OptimizerHandle& optimizer,
                         const OtherHandle& other, const Buffers& buffers) {
  CheckpointState state{.sharded = model.sharded.get(),
                        .optimizer = optimizer ? &optimizer->get() : nullptr,
                        .other = other.get()};
  for (const auto& [name, value] : buffers) state.buffers.push_back({name, value});
  return state;
}

TrainingPosition position_of(int64_t step, const std::string& schedule, const std::string& data,
                             const std::string& settings) {
  return {.step = step, .schedule = schedule, .data = data, .optimizer = settings};
}

CheckpointerOptions options_of(bool in_background, int64_t keep_last, int64_t keep_every,
                               std::optional<at::ScalarType> dtype,
                               const std::string& model_config) {
  CheckpointerOptions options;
  options.mode = in_background ? SaveMode::kBackground : SaveMode::kBlocking;
  options.keep = {.keep_last = keep_last, .keep_every = keep_every};
  if (dtype) options.form.model_dtype = dtype_of(*dtype);
  options.model_config = model_config;
  return options;
}

LoadOptions load_options(const std::vector<std::string>& allow_missing, bool allow_extra) {
  return {.allow_missing = allow_missing,
          .extra = allow_extra ? LoadOptions::Extra::kAllow : LoadOptions::Extra::kRefuse};
}

ExportOptions export_options(std::optional<at::ScalarType> dtype, bool is_main,
                             int64_t chunk_bytes) {
  ExportOptions options{.values = is_main ? WeightValues::kMain : WeightValues::kCompute,
                        .chunk_bytes = chunk_bytes};
  if (dtype) options.form.model_dtype = dtype_of(*dtype);
  return options;
}

struct ModelCheckpointer final : Resource {
  ModelCheckpointer(const std::string& directory, std::shared_ptr<ShardedModel> saved,
                    OptimizerHandle updates, const CheckpointerOptions& options)
      : model(std::move(saved)),
        optimizer(std::move(updates)),
        checkpointer(std::make_unique<Checkpointer>(directory, model->mesh->mesh.get(), options)) {}
  void close() override { checkpointer.close(); }
  Checkpointer& get() { return *checkpointer.get(); }

  std::shared_ptr<ShardedModel> model;
  OptimizerHandle optimizer;
  Held<std::unique_ptr<Checkpointer>> checkpointer;
};

}  // namespace

void bind_checkpoint(py::module_& module) {
  py::class_<OtherOptimizer, OtherHandle>(module, "OtherOptimizer")
      .def(py::init<>())
      .def_readwrite("name", &OtherOptimizer::name)
      .def_readwrite("step", &OtherOptimizer::step)
      .def_readwrite("tensors", &OtherOptimizer::tensors)
      .def_readwrite("parts", &OtherOptimizer::parts);
  py::class_<LoadedCheckpoint>(module, "LoadedCheckpoint")
      .def_readonly("path", &LoadedCheckpoint::path)
      .def_readonly("step", &LoadedCheckpoint::step)
      .def_readonly("schedule", &LoadedCheckpoint::schedule)
      .def_readonly("optimizer", &LoadedCheckpoint::optimizer)
      .def_readonly("optimizer_step", &LoadedCheckpoint::optimizer_step)
      .def_readonly("data", &LoadedCheckpoint::data)
      .def_readonly("missing", &LoadedCheckpoint::missing)
      .def_readonly("extra", &LoadedCheckpoint::extra);
  module.def(
      "save_checkpoint",
      [](const std::string& directory, ShardedModel& model, const OptimizerHandle& optimizer,
         const OtherHandle& other, const Buffers& buffers, int64_t step,
         const std::string& schedule, const std::string& data, const std::string& settings,
         std::optional<at::ScalarType> dtype, const std::string& model_config) {
        save_checkpoint(directory, state_of(model, optimizer, other, buffers),
                        position_of(step, schedule, data, settings),
                        options_of(/*in_background=*/false, 0, 0, dtype, model_config));
      },
      WithoutGil());
  module.def(
      "load_checkpoint",
      [](const std::string& path, ShardedModel& model, const OptimizerHandle& optimizer,
         const OtherHandle& other, const Buffers& buffers,
         const std::vector<std::string>& allow_missing, bool allow_extra) {
        return load_checkpoint(path, state_of(model, optimizer, other, buffers),
                               load_options(allow_missing, allow_extra));
      },
      WithoutGil());
  module.def("export_weights_to",
             [](ShardedModel& model, const Buffers& buffers, const py::function& on_tensor,
                std::optional<at::ScalarType> dtype, bool is_main, bool on_all_ranks,
                int64_t chunk_bytes) {
               ExportOptions options = export_options(dtype, is_main, chunk_bytes);
               if (on_all_ranks) options.receivers = ExportOptions::Receivers::kAllRanks;
               const py::gil_scoped_release no_gil;
               export_weights(
                   state_of(model, nullptr, nullptr, buffers),
                   [&](const std::string& name, const at::Tensor& value) {
                     const py::gil_scoped_acquire gil;
                     on_tensor(name, value);
                   },
                   options);
             });
  module.def(
      "export_weight_files",
      [](ShardedModel& model, const Buffers& buffers, const std::string& directory,
         int64_t max_file_bytes, const std::string& model_config, bool overwrite,
         std::optional<at::ScalarType> dtype, bool is_main, int64_t chunk_bytes) {
        const ExportFiles files{.max_file_bytes = max_file_bytes,
                                .model_config = model_config,
                                .model_files = {},
                                .existing = overwrite ? ExportFiles::Existing::kReplace
                                                      : ExportFiles::Existing::kRefuse};
        export_weights(state_of(model, nullptr, nullptr, buffers), directory, files,
                       export_options(dtype, is_main, chunk_bytes));
      },
      WithoutGil());
  py::class_<ModelCheckpointer, std::shared_ptr<ModelCheckpointer>>(module, "Checkpointer")
      .def(py::init([](const std::string& directory, const std::shared_ptr<ShardedModel>& model,
                       const OptimizerHandle& optimizer, bool in_background, int64_t keep_last,
                       int64_t keep_every, std::optional<at::ScalarType> dtype,
                       const std::string& model_config) {
        const py::gil_scoped_release no_gil;
        return make_resource<ModelCheckpointer>(
            directory, model, optimizer,
            options_of(in_background, keep_last, keep_every, dtype, model_config));
      }))
      .def(
          "save",
          [](ModelCheckpointer& self, const OtherHandle& other, const Buffers& buffers,
             int64_t step, const std::string& schedule, const std::string& data,
             const std::string& settings) {
            self.get().save(state_of(*self.model, self.optimizer, other, buffers),
                            position_of(step, schedule, data, settings));
          },
          WithoutGil())
      .def(
          "load_latest",
          [](ModelCheckpointer& self, const OtherHandle& other, const Buffers& buffers,
             const std::vector<std::string>& allow_missing, bool allow_extra) {
            return self.get().load_latest(state_of(*self.model, self.optimizer, other, buffers),
                                          load_options(allow_missing, allow_extra));
          },
          WithoutGil())
      .def(
          "wait", [](ModelCheckpointer& self) { self.get().wait(); }, WithoutGil());
}

}  // namespace fsdp
