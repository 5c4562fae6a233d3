// fsdp_cpp._C: tensors in files of other formats, written as a checkpoint of ours.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/torch_dtype.h"
#include "fsdp/checkpoint/format/model_files.h"
#include "fsdp/checkpoint/tools/converted_files.h"
#include "fsdp/checkpoint/tools/staged_directory.h"
#include "fsdp/python/bindings.h"

namespace fsdp {

namespace py = pybind11;

namespace {

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

}  // namespace

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

}  // namespace fsdp
