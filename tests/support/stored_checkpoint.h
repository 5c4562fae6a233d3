// Small checkpoints on disk, written by the real writer from tensors in plain memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/base/durable_file.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/text.h"
#include "fsdp/checkpoint/format/manifest.h"
#include "fsdp/checkpoint/format/safetensors_file.h"
#include "fsdp/checkpoint/format/tensor_boxes.h"

namespace fsdp::testing {

// A tensor's elements, row by row.
struct TensorData {
  StoredTensor tensor;
  std::vector<std::byte> bytes;
};

inline Box whole_box(const std::vector<int64_t>& shape) {
  return {std::vector<int64_t>(shape.size(), 0), shape};
}

inline TensorData random_data(std::mt19937_64& random, std::string name, DType dtype,
                              std::vector<int64_t> shape) {
  TensorData data{{std::move(name), dtype, std::move(shape)}, {}};
  data.bytes.resize(
      static_cast<size_t>(whole_box(data.tensor.shape).numel() * element_bytes(dtype)));
  for (std::byte& byte : data.bytes) byte = static_cast<std::byte>(random());
  return data;
}

// A piece as a rank would write it; `data` must live until it is written.
inline Piece piece_of(const TensorData& data, const Box& box) {
  const int64_t width = element_bytes(data.tensor.dtype);
  const auto read = [&data, box, width](FlatRange range, std::byte* into) {
    const StridedBox whole = packed(whole_box(data.tensor.shape), 0);
    for (const Run& run : runs(whole, packed(box, 0))) {
      const FlatRange common = intersect(FlatRange{run.to, run.to + run.numel}, range);
      const std::byte* from = data.bytes.data() + (run.from + common.begin - run.to) * width;
      if (!common.empty())
        std::memcpy(into + (common.begin - range.begin) * width, from,
                    static_cast<size_t>(common.numel() * width));
    }
  };
  Piece piece{.name = data.tensor.name, .dtype = data.tensor.dtype, .box = box, .read = read};
  // Half of the contiguous boxes offer their address, so that both ways to the file are tested.
  const std::vector<Run> stretches = runs(packed(whole_box(data.tensor.shape), 0), packed(box, 0));
  const bool begins_even =
      std::accumulate(box.offsets.begin(), box.offsets.end(), int64_t{0}) % 2 == 0;
  if (stretches.size() == 1 && begins_even)
    piece.in_memory = [&data, from = stretches[0].from, width](FlatRange range) {
      return data.bytes.data() + (from + range.begin) * width;
    };
  return piece;
}

// A checkpoint whose parts can be changed and written again: a defect that no checksum reveals.
struct StoredCheckpoint {
  std::string path;
  Manifest manifest;
  std::vector<RankRecord> records;

  void write_manifest() const { write_file_durably(path + "/manifest.json", to_json(manifest)); }

  // Also adds it to the list of the manifest, so that write_manifest() must follow.
  void write_record(int64_t rank) {
    const std::string text = to_json(records[static_cast<size_t>(rank)]);
    write_file_durably(concat(path, "/", rank_record_path(rank)), text);
    list(described(rank_record_path(rank), text));
  }

  // Adds or replaces the manifest's entry of a file.
  void list(const StoredFile& file) {
    for (StoredFile& each : manifest.files)
      if (each.path == file.path) {
        each = file;
        return;
      }
    manifest.files.push_back(file);
  }
};

// Each rank's pieces.
struct RankPieces {
  std::vector<Piece> model;
  std::vector<Piece> moments;
};

inline std::vector<StoredTensor> descriptions(std::span<const TensorData> tensors) {
  std::vector<StoredTensor> list;
  for (const TensorData& data : tensors) list.push_back(data.tensor);
  return list;
}

inline Manifest manifest_of(std::span<const TensorData> model,
                            std::span<const TensorData> moments = {}) {
  Manifest manifest;
  manifest.model = descriptions(model);
  manifest.moments = descriptions(moments);
  return manifest;
}

inline StoredCheckpoint write_checkpoint(const std::string& path, Manifest manifest,
                                         std::span<const RankPieces> ranks,
                                         const WriteOptions& options) {
  StoredCheckpoint stored{path, std::move(manifest), {}};
  stored.manifest.mesh = {.outer = 1, .inner = static_cast<int64_t>(ranks.size())};
  make_directories(path + "/ranks");
  for (size_t i = 0; i < ranks.size(); ++i) {
    const auto rank = static_cast<int64_t>(i);
    RankRecord record;
    record.rank = rank;
    record.block_bytes = options.block_bytes;
    record.files = write_pieces(
        path, rank, {{"model", ranks[i].model}, {"optimizer", ranks[i].moments}}, options);
    for (const RankRecord::File& file : record.files)
      stored.list({file.path, file.bytes, crc32c_of(file, options.block_bytes)});
    stored.records.push_back(std::move(record));
    stored.write_record(rank);
  }
  stored.write_manifest();
  return stored;
}

// A tensor as `num_cuts` + 1 boxes, cut anywhere along any dim; some without elements.
inline std::vector<Box> random_boxes(std::mt19937_64& random, const std::vector<int64_t>& shape,
                                     int num_cuts) {
  const auto draw = [&](int64_t high) {
    return std::uniform_int_distribution<int64_t>(0, high)(random);
  };
  std::vector<Box> boxes = {whole_box(shape)};
  for (int i = 0; i < num_cuts && !shape.empty(); ++i) {
    Box& first = boxes[static_cast<size_t>(draw(static_cast<int64_t>(boxes.size()) - 1))];
    Box second = first;
    const auto dim = static_cast<size_t>(draw(static_cast<int64_t>(shape.size()) - 1));
    first.sizes[dim] = draw(second.sizes[dim]);
    second.offsets[dim] += first.sizes[dim];
    second.sizes[dim] -= first.sizes[dim];
    boxes.push_back(std::move(second));
  }
  return boxes;
}

}  // namespace fsdp::testing
