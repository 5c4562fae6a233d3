#include "fsdp/checkpoint/huggingface_files.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "fsdp/base/durable_file.h"
#include "fsdp/base/error.h"
#include "fsdp/checkpoint/model_config.h"
#include "fsdp/checkpoint/safetensors_header.h"

namespace fsdp {

namespace {

std::string file_name(size_t index, size_t count) {
  if (count == 1) return "model.safetensors";
  char name[64];
  std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", index + 1, count);
  return name;
}

void write_file(const std::string& path, std::span<const CatalogTensor> tensors,
                ConvertedReads& reads, std::vector<std::byte>& chunk) {
  SafetensorsHeader header;
  header.metadata["format"] = "pt";  // loaders ask for it
  for (const CatalogTensor& tensor : tensors) {
    SafetensorsEntry& entry = header.tensors.emplace_back();
    entry.name = tensor.tensor.name;
    entry.dtype = reads.dtype_of(tensor.tensor);
    entry.shape = tensor.tensor.shape;
  }
  const std::string text = write_safetensors_header(header);
  FileWriter file(path);
  file.write(std::as_bytes(std::span(text)));
  for (const CatalogTensor& tensor : tensors) {
    const int64_t width = element_bytes(reads.dtype_of(tensor.tensor));
    for_each_chunk(numel_of(tensor.tensor), width, [&](FlatRange range) {
      chunk.resize(static_cast<size_t>(range.numel() * width));
      reads.read(tensor, range, chunk.data());
      file.write(chunk);
    });
  }
  file.finish();
}

std::string index_text(std::span<const CatalogTensor> tensors, std::span<const FlatRange> files,
                       const ConvertedReads& reads) {
  int64_t numel = 0;
  int64_t bytes = 0;
  std::map<std::string, std::string> places;
  for (size_t i = 0; i < files.size(); ++i)
    for (int64_t k = files[i].begin; k < files[i].end; ++k) {
      const StoredTensor& tensor = tensors[static_cast<size_t>(k)].tensor;
      numel += numel_of(tensor);
      bytes += reads.bytes_of(tensor);
      places[tensor.name] = file_name(i, files.size());
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

DType main_dtype(std::span<const CatalogTensor> tensors, const ConvertedReads& reads) {
  std::map<DType, int64_t> bytes;
  for (const CatalogTensor& tensor : tensors)
    if (const DType dtype = reads.dtype_of(tensor.tensor); is_floating(dtype))
      bytes[dtype] += reads.bytes_of(tensor.tensor);
  const auto most = std::max_element(
      bytes.begin(), bytes.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  return most == bytes.end() ? DType::kFloat32 : most->first;
}

std::vector<std::string> write_huggingface_files(const std::string& directory,
                                                 std::span<const CatalogTensor> tensors,
                                                 ConvertedReads& reads,
                                                 const HuggingFaceOptions& options) {
  std::vector<int64_t> sizes;
  for (const CatalogTensor& tensor : tensors) sizes.push_back(reads.bytes_of(tensor.tensor));
  const std::vector<FlatRange> files = divide_into_files(sizes, options.max_file_bytes);
  std::vector<std::byte> chunk;
  std::vector<std::string> names;
  for (size_t i = 0; i < files.size(); ++i) {
    names.push_back(file_name(i, files.size()));
    write_file(
        concat(directory, "/", names.back()),
        tensors.subspan(static_cast<size_t>(files[i].begin), static_cast<size_t>(files[i].numel())),
        reads, chunk);
  }
  if (files.size() > 1)
    write_file_durably(directory + "/model.safetensors.index.json",
                       index_text(tensors, files, reads));
  if (options.config)
    write_file_durably(concat(directory, "/", kModelConfigName),
                       with_stored_dtype(*options.config, std::string(kModelConfigName),
                                         main_dtype(tensors, reads)));
  write_model_files(directory, options.model_files);
  return names;
}

}  // namespace fsdp
