// Small safetensors files and checkpoints made from numbers, without torch.
#pragma once

#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "fsdp/checkpoint/format/safetensors_file.h"
#include "fsdp/checkpoint/tools/converted_files.h"

namespace fsdp::testing {

// A tensor with all its bytes.
struct WholeTensor {
  std::string name;
  std::vector<int64_t> shape;
  DType dtype = DType::kFloat32;
  std::string bytes;
};

template <typename Value>
WholeTensor whole_tensor(const std::string& name, std::vector<int64_t> shape,
                         const std::vector<Value>& values, DType dtype) {
  WholeTensor tensor{name, std::move(shape), dtype, std::string(values.size() * sizeof(Value), 0)};
  if (!values.empty()) std::memcpy(tensor.bytes.data(), values.data(), tensor.bytes.size());
  return tensor;
}

// fp32.
inline WholeTensor floats(const std::string& name, std::vector<int64_t> shape,
                          const std::vector<float>& values) {
  return whole_tensor(name, std::move(shape), values, DType::kFloat32);
}

// fp32 with values first, first + 1, ...
inline WholeTensor counting(const std::string& name, std::vector<int64_t> shape,
                            float first = 0.0f) {
  int64_t numel = 1;
  for (const int64_t size : shape) numel *= size;
  std::vector<float> values;
  for (int64_t i = 0; i < numel; ++i) values.push_back(first + static_cast<float>(i));
  return floats(name, std::move(shape), values);
}

inline void write_text(const std::string& path, const std::string& text) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream(path, std::ios::binary) << text;
}

inline std::string read_text(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

// Changes the byte at `offset`; counts from the end if it is negative.
inline void change_byte(const std::string& path, int64_t offset) {
  std::string text = read_text(path);
  const auto at =
      static_cast<size_t>(offset < 0 ? static_cast<int64_t>(text.size()) + offset : offset);
  text[at] = static_cast<char>(text[at] ^ 0x10);
  write_text(path, text);
}

inline void write_plain_file(const std::string& path, const std::vector<WholeTensor>& tensors) {
  SafetensorsHeader header;
  for (const WholeTensor& tensor : tensors) {
    SafetensorsEntry& entry = header.tensors.emplace_back();
    entry.name = tensor.name;
    entry.dtype = tensor.dtype;
    entry.shape = tensor.shape;
  }
  std::string text = write_safetensors_header(header);
  for (const WholeTensor& tensor : tensors) text += tensor.bytes;
  write_text(path, text);
}

struct CheckpointParts {
  std::vector<WholeTensor> model = {};
  std::vector<WholeTensor> moments = {};
  Manifest manifest = {};
  std::vector<RankRecord> ranks = {};
  std::optional<std::string> config = std::nullopt;
  std::vector<ModelFile> model_files = {};
};

// A checkpoint of ours, cut for `options.ranks`.
inline void write_checkpoint(const std::string& directory, const CheckpointParts& parts,
                             const ShardedOptions& options = {}) {
  const std::string model_path = directory + ".model.safetensors";
  const std::string moments_path = directory + ".moments.safetensors";
  write_plain_file(model_path, parts.model);
  write_plain_file(moments_path, parts.moments);
  const TensorCatalog model(model_path);
  const TensorCatalog moments(moments_path);
  ShardedContent content{.model = {},
                         .moments = {},
                         .model_files = parts.model_files,
                         .manifest = parts.manifest,
                         .ranks = parts.ranks};
  if (parts.config) content.model_files.push_back({"config.json", *parts.config});
  for (const WholeTensor& tensor : parts.model)
    content.model.push_back(model.model().at(tensor.name));
  for (const WholeTensor& tensor : parts.moments)
    content.moments.push_back(moments.model().at(tensor.name));
  ConvertedReads model_reads(model.files(), std::nullopt);
  ConvertedReads moment_reads(moments.files(), std::nullopt);
  write_sharded_files(directory, content, model_reads, moment_reads, options);
  std::filesystem::remove(model_path);
  std::filesystem::remove(moments_path);
}

inline std::string bytes_of_stored(const TensorCatalog& catalog, const CatalogTensor& tensor) {
  std::string bytes(static_cast<size_t>(bytes_of(tensor.tensor)), '\0');
  read_elements(catalog.files(), tensor, {0, numel_of(tensor.tensor)},
                reinterpret_cast<std::byte*>(bytes.data()));
  return bytes;
}

}  // namespace fsdp::testing
