#include "fsdp/checkpoint/tools/converted_files.h"

#include <algorithm>

#include "fsdp/base/check.h"
#include "fsdp/base/crc32c.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/integer.h"
#include "fsdp/checkpoint/format/model_files.h"
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

DType main_dtype(std::span<const CatalogTensor> tensors, const ConvertedReads& reads) {
  return main_dtype(stored_as(tensors, reads));
}

std::vector<std::string> write_huggingface_files(const std::string& directory,
                                                 std::span<const CatalogTensor> tensors,
                                                 ConvertedReads& reads,
                                                 const HuggingFaceOptions& options) {
  HuggingFaceFiles files(directory, stored_as(tensors, reads), options);
  std::vector<std::byte> chunk;
  for (const CatalogTensor& tensor : tensors) {
    files.next();
    const int64_t width = element_bytes(reads.dtype_of(tensor.tensor));
    for_each_chunk(numel_of(tensor.tensor), width, [&](FlatRange range) {
      chunk.resize(static_cast<size_t>(range.numel() * width));
      reads.read(tensor, range, chunk.data());
      files.write(chunk);
    });
  }
  return files.finish();
}

}  // namespace fsdp
