// fsdp_cpp._C: checkpoints, patches of weights, and tensors in files of other formats.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/torch_dtype.h"
#include "fsdp/checkpoint/checkpointer.h"
#include "fsdp/checkpoint/format/model_files.h"
#include "fsdp/checkpoint/load.h"
#include "fsdp/checkpoint/patches.h"
#include "fsdp/checkpoint/run_directory.h"
#include "fsdp/checkpoint/tools/converted_files.h"
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
  CheckpointState state{
      .sharded = model.sharded.get(), .optimizer = optimizer_in(optimizer), .other = other.get()};
  for (const auto& [name, value] : buffers) state.buffers.push_back({name, value});
  return state;
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

using ModelCheckpointer = OnModel<Checkpointer>;
using ModelPatches = OnModel<PatchStream>;

// Ranges as positions: a program that takes tensors wants one form.
at::Tensor positions_of(const PatchTensor& tensor) {
  if (tensor.positions.defined()) return tensor.positions;
  std::vector<at::Tensor> parts;
  for (const PatchRange& range : tensor.ranges)
    parts.push_back(at::arange(range.begin, range.end, tensor.values.options().dtype(at::kLong)));
  return at::cat(parts);
}

// A box of a tensor in a file of any format: the file's position in a list, the byte of the box's
// first element, offsets, sizes, and strides in elements.
using FileBox =
    std::tuple<size_t, int64_t, std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>>;
// Name, type, shape, and boxes that are together exactly the tensor.
using FileTensor =
    std::tuple<std::string, at::ScalarType, std::vector<int64_t>, std::vector<FileBox>>;

std::vector<CatalogTensor> catalog_tensors(const std::vector<FileTensor>& given) {
  std::vector<CatalogTensor> tensors;
  for (const auto& [name, type, shape, boxes] : given) {
    CatalogTensor& tensor = tensors.emplace_back();
    tensor.tensor = {.name = name, .dtype = dtype_of(type), .shape = shape};
    for (const auto& [file, begin, offsets, sizes, strides] : boxes)
      tensor.boxes.push_back({.place = {.box = {offsets, sizes}, .strides = strides, .begin = 0},
                              .file = file,
                              .data_begin = begin});
  }
  return tensors;
}

struct FilesToCheckpoint {
  std::vector<std::string> files;
  std::vector<FileTensor> model;
  std::vector<FileTensor>
      moments;  // "<parameter>.exp_avg" and "<parameter>.exp_avg_sq"; may be empty
  int64_t step = 0;
  int64_t ranks = 1;
  std::optional<at::ScalarType> dtype;
  std::string model_files;  // a directory with config.json and such; empty: none
};

// Writes a checkpoint of ours with one chunk in memory; `target` appears when it is complete.
void write_converted(const std::string& target, StagedDirectory::Existing existing,
                     const FilesToCheckpoint& given, const OnBytes& on_bytes) {
  std::vector<CheckedFile> files;
  for (const std::string& path : given.files)
    files.push_back({.path = path, .bytes = FileReader(path).bytes()});
  ShardedContent content{.model = catalog_tensors(given.model),
                         .moments = catalog_tensors(given.moments)};
  std::optional<DType> dtype;
  if (given.dtype) dtype = dtype_of(*given.dtype);
  ConvertedReads model(files, dtype, on_bytes);
  ConvertedReads moments(files, DType::kFloat32, on_bytes);  // as our own checkpoints have them
  content.manifest.step = given.step;
  content.manifest.precision = concat(content.moments.empty() ? "weights alone, " : "main weights ",
                                      name_of(main_dtype(content.model, model)));
  if (!content.moments.empty())
    content.manifest.optimizer = {
        .name = "AdamW", .moments = {"exp_avg", "exp_avg_sq"}, .step = given.step};
  if (!given.model_files.empty()) {
    content.model_files = stored_model_files(given.model_files);
    if (const std::optional<std::string> config = stored_model_config(given.model_files))
      content.model_files.push_back({std::string(kModelConfigName), *config});
  }
  StagedDirectory directory(target, existing);
  write_sharded_files(directory.path(), content, model, moments, {.ranks = given.ranks});
  directory.publish();
}

void bind_saves(py::module_& module) {
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
                        {.step = step, .schedule = schedule, .data = data, .optimizer = settings},
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
            model, optimizer,
            std::make_unique<Checkpointer>(
                directory, model->mesh->mesh.get(),
                options_of(in_background, keep_last, keep_every, dtype, model_config)));
      }))
      .def(
          "save",
          [](ModelCheckpointer& self, const OtherHandle& other, const Buffers& buffers,
             int64_t step, const std::string& schedule, const std::string& data,
             const std::string& settings) {
            self.get().save(
                state_of(*self.model, self.optimizer, other, buffers),
                {.step = step, .schedule = schedule, .data = data, .optimizer = settings});
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
      .def("wait", method_of<ModelCheckpointer>(&Checkpointer::wait), WithoutGil());
}

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
                       const std::shared_ptr<ModelOptimizer>& optimizer, const Buffers& buffers,
                       bool is_vllm) {
        const py::gil_scoped_release no_gil;
        const PatchOptions options{.names = is_vllm ? PatchNames::kVllm : PatchNames::kPublished};
        return make_resource<ModelPatches>(
            model, optimizer,
            std::make_unique<PatchStream>(state_of(*model, optimizer, nullptr, buffers), options));
      }))
      .def(
          "take",
          [](ModelPatches& self, int64_t step, const std::string& device) {
            return self.get().take(step, c10::Device(device));
          },
          WithoutGil())
      .def("write", method_of<ModelPatches>(&PatchStream::write), WithoutGil());
}

void bind_convert(py::module_& module) {
  module.def(
      "convert_files",
      [](const std::string& target, std::vector<std::string> files, std::vector<FileTensor> model,
         std::vector<FileTensor> moments, int64_t step, int64_t ranks,
         std::optional<at::ScalarType> dtype, std::string model_files, bool overwrite,
         const std::function<void(int64_t)>& on_bytes) {
        const py::gil_scoped_release no_gil;  // on_bytes takes it for its calls
        write_converted(
            target,
            overwrite ? StagedDirectory::Existing::kReplace : StagedDirectory::Existing::kRefuse,
            {.files = std::move(files),
             .model = std::move(model),
             .moments = std::move(moments),
             .step = step,
             .ranks = ranks,
             .dtype = dtype,
             .model_files = std::move(model_files)},
            on_bytes);
      },
      py::arg("target"), py::kw_only(), py::arg("files"), py::arg("model"), py::arg("moments"),
      py::arg("step"), py::arg("ranks"), py::arg("dtype"), py::arg("model_files"),
      py::arg("overwrite"), py::arg("on_bytes"));
}

}  // namespace

void bind_checkpoint(py::module_& module) {
  bind_saves(module);
  bind_patches(module);
  bind_convert(module);
}

}  // namespace fsdp
