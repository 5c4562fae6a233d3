#include "fsdp/checkpoint/piece_writer.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>

#include "fsdp/base/error.h"
#include "fsdp/base/integer.h"
#include "fsdp/checkpoint/crc32c.h"
#include "fsdp/checkpoint/durable_file.h"
#include "fsdp/checkpoint/safetensors_header.h"

namespace fsdp {

namespace {

// Collects small pieces into large writes, and checksums of blocks on the way.
class ChunkedFile {
 public:
  ChunkedFile(const std::string& path, const WriteOptions& options, std::vector<std::byte>& chunk)
      : file_(path), block_bytes_(options.block_bytes), chunk_(chunk) {}

  // Room for some of `numel` elements, at least one; the caller fills all of what it gets.
  std::span<std::byte> room(int64_t numel, int64_t width) {
    const auto bytes = static_cast<size_t>(width);
    if (chunk_.size() - used_ < bytes) flush();
    const size_t fits =
        std::min((chunk_.size() - used_) / bytes, static_cast<size_t>(numel)) * bytes;
    used_ += fits;
    return std::span(chunk_).subspan(used_ - fits, fits);
  }

  RankRecord::File finish(std::string name) {
    flush();
    if (block_filled_ > 0) blocks_.push_back(block_);
    const int64_t bytes = file_.bytes();
    file_.finish();
    return {.path = std::move(name), .bytes = bytes, .blocks = std::move(blocks_)};
  }

 private:
  void flush() {
    std::span<const std::byte> bytes = std::span<const std::byte>(chunk_).first(used_);
    file_.write(bytes);
    while (!bytes.empty()) {
      const auto part = std::min(bytes.size(), static_cast<size_t>(block_bytes_ - block_filled_));
      block_ = crc32c(bytes.first(part), block_);
      block_filled_ += static_cast<int64_t>(part);
      bytes = bytes.subspan(part);
      if (block_filled_ < block_bytes_) continue;
      blocks_.push_back(block_);
      block_ = 0;
      block_filled_ = 0;
    }
    used_ = 0;
  }

  FileWriter file_;
  const int64_t block_bytes_;
  std::vector<std::byte>& chunk_;
  size_t used_ = 0;
  uint32_t block_ = 0;
  int64_t block_filled_ = 0;
  std::vector<uint32_t> blocks_;
};

std::string header_of(std::span<const Piece* const> pieces) {
  SafetensorsHeader header;
  nlohmann::json offsets = nlohmann::json::object();
  for (const Piece* piece : pieces) {
    SafetensorsEntry& entry = header.tensors.emplace_back();
    entry.name = piece->name;
    entry.dtype = piece->dtype;
    entry.shape = piece->box.sizes;
    offsets[piece->name] = {{"saved_offsets", piece->box.offsets}};
  }
  header.metadata["format"] = "pt";  // what loaders of other libraries ask for
  header.metadata["DCP_SHARDING_INFO"] = offsets.dump();
  return write_safetensors_header(header);
}

RankRecord::File write_file(const std::string& directory, std::string name,
                            std::span<const Piece* const> pieces, const WriteOptions& options,
                            std::vector<std::byte>& chunk) {
  ChunkedFile file(concat(directory, "/", name), options, chunk);
  const std::string header = header_of(pieces);
  for (size_t begin = 0; begin < header.size();) {
    const std::span<std::byte> room = file.room(static_cast<int64_t>(header.size() - begin), 1);
    std::memcpy(room.data(), header.data() + begin, room.size());
    begin += room.size();
  }
  for (const Piece* piece : pieces) {
    const int64_t width = element_bytes(piece->dtype);
    const int64_t numel = piece->box.numel();
    for (int64_t begin = 0; begin < numel;) {
      const std::span<std::byte> room = file.room(numel - begin, width);
      const auto end = begin + static_cast<int64_t>(room.size()) / width;
      piece->read({begin, end}, room.data());
      begin = end;
    }
  }
  RankRecord::File written = file.finish(std::move(name));
  written.header_bytes = static_cast<int64_t>(header.size());
  written.header_crc32c = crc32c(std::as_bytes(std::span(header)));
  return written;
}

}  // namespace

void WriteOptions::validate() const {
  if (chunk_bytes < 1)
    throw UsageError(concat("chunk_bytes is ", chunk_bytes, "; it must be at least 1"));
  if (block_bytes < 1 || block_bytes > kMaxBlockBytes)
    throw UsageError(
        concat("block_bytes is ", block_bytes, "; it must be from 1 to ", kMaxBlockBytes));
}

std::vector<RankRecord::File> write_pieces(const std::string& directory, const std::string& folder,
                                           int64_t rank, std::span<const Piece> pieces,
                                           const WriteOptions& options) {
  options.validate();
  std::map<std::string, size_t> boxes_of;  // of each tensor so far
  std::vector<std::vector<const Piece*>> files;
  for (const Piece& piece : pieces) {
    const size_t file = boxes_of[piece.name]++;
    if (file == files.size()) files.emplace_back();
    files[file].push_back(&piece);
  }
  // A multiple of the widest element: also after a part of the header elements are aligned.
  std::vector<std::byte> chunk(static_cast<size_t>(round_up(options.chunk_bytes, 8)));
  make_directories(concat(directory, "/", folder));
  std::vector<RankRecord::File> written;
  for (size_t i = 0; i < files.size(); ++i) {
    // Wide elements first: then every one is aligned, in the file and in the chunk.
    std::stable_sort(files[i].begin(), files[i].end(), [](const Piece* a, const Piece* b) {
      return element_bytes(a->dtype) > element_bytes(b->dtype);
    });
    written.push_back(write_file(directory,
                                 concat(folder, "/", rank_text(rank), "-", i, ".safetensors"),
                                 files[i], options, chunk));
  }
  return written;
}

}  // namespace fsdp
