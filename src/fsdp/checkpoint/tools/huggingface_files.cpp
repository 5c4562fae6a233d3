#include "fsdp/checkpoint/tools/huggingface_files.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/checkpoint/format/model_files.h"
#include "fsdp/checkpoint/format/safetensors_header.h"
#include "fsdp/checkpoint/format/tensor_catalog.h"
#include "fsdp/checkpoint/format/tensor_stream.h"

namespace fsdp {

namespace {

std::string file_name(size_t index, size_t count) {
  if (count == 1) return "model.safetensors";
  char name[64];
  std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", index + 1, count);
  return name;
}

std::string index_text(std::span<const StoredTensor> tensors, std::span<const FlatRange> files,
                       std::span<const std::string> names) {
  int64_t numel = 0;
  int64_t bytes = 0;
  std::map<std::string, std::string> places;
  for (size_t i = 0; i < files.size(); ++i)
    for (int64_t k = files[i].begin; k < files[i].end; ++k) {
      const StoredTensor& tensor = tensors[static_cast<size_t>(k)];
      numel += numel_of(tensor);
      bytes += bytes_of(tensor);
      places[tensor.name] = names[i];
    }
  const nlohmann::ordered_json index = {
      {"metadata", {{"total_parameters", numel}, {"total_size", bytes}}}, {"weight_map", places}};
  return index.dump(2) + "\n";
}

}  // namespace

std::vector<FlatRange> divide_into_files(std::span<const int64_t> tensor_bytes,
                                         int64_t max_file_bytes) {
  std::vector<FlatRange> files = {{0, 0}};
  int64_t used = 0;
  for (const int64_t bytes : tensor_bytes) {
    if (!files.back().empty() && used + bytes > max_file_bytes) {
      files.push_back({files.back().end, files.back().end});
      used = 0;
    }
    ++files.back().end;
    used += bytes;
  }
  return files;
}

DType main_dtype(std::span<const StoredTensor> tensors) {
  std::map<DType, int64_t> bytes;
  for (const StoredTensor& tensor : tensors)
    if (is_floating(tensor.dtype)) bytes[tensor.dtype] += bytes_of(tensor);
  const auto most = std::max_element(
      bytes.begin(), bytes.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  return most == bytes.end() ? DType::kFloat32 : most->first;
}

HuggingFaceFiles::HuggingFaceFiles(std::string directory, std::vector<StoredTensor> tensors,
                                   HuggingFaceOptions options)
    : directory_(std::move(directory)), tensors_(std::move(tensors)), options_(std::move(options)) {
  std::vector<int64_t> sizes;
  for (const StoredTensor& tensor : tensors_) sizes.push_back(bytes_of(tensor));
  files_ = divide_into_files(sizes, options_.max_file_bytes);
  for (size_t i = 0; i < files_.size(); ++i) names_.push_back(file_name(i, files_.size()));
}

void HuggingFaceFiles::open_file() {
  const auto index = static_cast<size_t>(num_opened_++);
  SafetensorsHeader header;
  header.metadata["format"] = "pt";  // loaders ask for it
  for (int64_t k = files_[index].begin; k < files_[index].end; ++k) {
    const StoredTensor& tensor = tensors_[static_cast<size_t>(k)];
    SafetensorsEntry& entry = header.tensors.emplace_back();
    entry.name = tensor.name;
    entry.dtype = tensor.dtype;
    entry.shape = tensor.shape;
  }
  const std::string text = write_safetensors_header(header);
  writer_.emplace(concat(directory_, "/", names_[index]));
  writer_->write(std::as_bytes(std::span(text)));
}

void HuggingFaceFiles::close_file() {
  if (writer_) writer_->commit();
  writer_.reset();
}

void HuggingFaceFiles::next() {
  FSDP_ASSERT(left_bytes_ == 0 && num_begun_ < std::ssize(tensors_), left_bytes_, " bytes left");
  if (!writer_ || num_begun_ == files_[static_cast<size_t>(num_opened_ - 1)].end) {
    close_file();
    open_file();
  }
  left_bytes_ = bytes_of(tensors_[static_cast<size_t>(num_begun_++)]);
}

void HuggingFaceFiles::write(std::span<const std::byte> bytes) {
  left_bytes_ -= std::ssize(bytes);
  FSDP_ASSERT(left_bytes_ >= 0, -left_bytes_, " bytes too many");
  writer_->write(bytes);
}

std::vector<std::string> HuggingFaceFiles::finish() {
  FSDP_ASSERT(left_bytes_ == 0 && num_begun_ == std::ssize(tensors_), num_begun_, " tensors");
  if (tensors_.empty()) open_file();
  close_file();
  if (files_.size() > 1)
    write_file_durably(directory_ + "/model.safetensors.index.json",
                       index_text(tensors_, files_, names_));
  if (options_.config)
    write_file_durably(
        concat(directory_, "/", kModelConfigName),
        with_stored_dtype(*options_.config, std::string(kModelConfigName), main_dtype(tensors_)));
  write_model_files(directory_, options_.model_files);
  return names_;
}

}  // namespace fsdp
