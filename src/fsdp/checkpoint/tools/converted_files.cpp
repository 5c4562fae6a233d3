#include "fsdp/checkpoint/tools/converted_files.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "fsdp/base/check.h"
#include "fsdp/base/crc32c.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/integer.h"
#include "fsdp/checkpoint/format/model_files.h"
#include "fsdp/checkpoint/format/safetensors_header.h"
#include "fsdp/checkpoint/run_directory.h"

namespace fsdp {

namespace {

StoredFile described(const std::string& path, std::string_view text) {
  return {path, static_cast<int64_t>(text.size()), crc32c(std::as_bytes(std::span(text)))};
}

std::vector<StoredTensor> stored_as(std::span<const CatalogTensor> tensors,
                                    const ConvertedReads& reads) {
  std::vector<StoredTensor> list;
  for (const CatalogTensor& tensor : tensors) {
    list.push_back(tensor.tensor);
    list.back().dtype = reads.dtype_of(tensor.tensor);
  }
  return list;
}

std::vector<Piece> pieces_of(std::span<const CatalogTensor> tensors, ConvertedReads& reads,
                             int64_t rank, int64_t ranks) {
  std::vector<Piece> pieces;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const CatalogTensor& tensor = tensors[i];
    const std::vector<int64_t>& shape = tensor.tensor.shape;
    const FlatRange share = share_of_rows(tensor.tensor, static_cast<int64_t>(i), rank, ranks);
    std::vector<Box> parts = boxes(shape, share);
    // Gives a tensor without elements an empty box, or no file would mention it.
    if (numel_of(tensor.tensor) == 0 && rank == 0)
      parts.push_back({std::vector<int64_t>(shape.size(), 0), shape});
    if (parts.empty()) continue;
    FSDP_ASSERT(parts.size() == 1, tensor.tensor.name, " has ", parts.size(), " boxes");
    pieces.push_back(
        {.name = tensor.tensor.name,
         .dtype = reads.dtype_of(tensor.tensor),
         .box = std::move(parts.front()),
         .read = [&tensor, &reads, share](FlatRange range, std::byte* into) {
           reads.read(tensor, {share.begin + range.begin, share.begin + range.end}, into);
         }});
  }
  return pieces;
}

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
  file.commit();
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

FlatRange share_of_rows(const StoredTensor& tensor, int64_t index, int64_t rank, int64_t ranks) {
  const int64_t numel = numel_of(tensor);
  if (numel == 0) return {};
  // Deals small tensors to the ranks in turn.
  if (tensor.shape.size() < 2) return index % ranks == rank ? FlatRange{0, numel} : FlatRange{};
  const int64_t num_rows = tensor.shape.front();
  const int64_t row_numel = numel / num_rows;
  const int64_t share = ceil_div(num_rows, ranks);
  const auto cut = [&](int64_t i) {
    return std::min(i < num_rows ? i * share : num_rows, num_rows) * row_numel;
  };
  const FlatRange range{cut(rank), cut(rank + 1)};
  return range.empty() ? FlatRange{} : range;
}

void write_sharded_files(const std::string& directory, const ShardedContent& content,
                         ConvertedReads& model, ConvertedReads& moments,
                         const ShardedOptions& options) {
  Manifest manifest = content.manifest;
  manifest.files.clear();
  const bool has_same_ranks = static_cast<int64_t>(content.ranks.size()) == options.ranks;
  if (!has_same_ranks) manifest.mesh = {.outer = 1, .inner = options.ranks};
  manifest.model = stored_as(content.model, model);
  manifest.moments = stored_as(content.moments, moments);
  make_directories(directory + "/ranks");
  for (int64_t rank = 0; rank < options.ranks; ++rank) {
    RankRecord record;
    if (has_same_ranks) record = content.ranks[static_cast<size_t>(rank)];
    record.rank = rank;
    record.block_bytes = options.write.block_bytes;
    const std::vector<Piece> model_pieces = pieces_of(content.model, model, rank, options.ranks);
    const std::vector<Piece> moment_pieces =
        pieces_of(content.moments, moments, rank, options.ranks);
    std::vector<FolderPieces> folders = {{"model", model_pieces}};
    if (!moment_pieces.empty()) folders.push_back({"optimizer", moment_pieces});
    record.files = write_pieces(directory, rank, folders, options.write);
    const std::string text = to_json(record);
    write_file_durably(concat(directory, "/", rank_record_path(rank)), text);
    manifest.files.push_back(described(rank_record_path(rank), text));
    for (const RankRecord::File& file : record.files)
      manifest.files.push_back({file.path, file.bytes, crc32c_of(file, record.block_bytes)});
  }
  for (StoredFile& file : write_model_files(directory, content.model_files))
    manifest.files.push_back(std::move(file));
  write_file_durably(concat(directory, "/", kManifestName), to_json(manifest));
}

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
