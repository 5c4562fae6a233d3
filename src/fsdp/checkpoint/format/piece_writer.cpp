#include "fsdp/checkpoint/format/piece_writer.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/crc32c.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/integer.h"
#include "fsdp/checkpoint/format/safetensors_header.h"

namespace fsdp {

namespace {

// Smaller pieces are collected into one write; larger ones are written from their memory.
constexpr int64_t kLargeBytes = int64_t{1} << 20;

// A larger chunk gains nothing.
constexpr int64_t kMaxChunkBytes = int64_t{1} << 30;

// Bytes per write: few enough to be still in a core's cache for the checksum.
constexpr int64_t kPartBytes = int64_t{256} << 10;

class ChunkedFile {
 public:
  ChunkedFile(const std::string& directory, std::string name, const WriteOptions& options,
              std::span<std::byte> chunk)
      : file_(concat(directory, "/", name)), chunk_(chunk), block_bytes_(options.block_bytes) {
    record_.path = std::move(name);
  }

  void append_header(std::string_view header) {
    record_.header_bytes = static_cast<int64_t>(header.size());
    record_.header_crc32c = crc32c(std::as_bytes(std::span(header)));
    write(std::as_bytes(std::span(header)));
  }

  void append(const Piece& piece) {
    const int64_t width = element_bytes(piece.dtype);
    const int64_t numel = piece.box.numel();
    if (numel * width >= kLargeBytes && append_in_place(piece)) return;
    for (int64_t begin = 0; begin < numel;) {
      if (static_cast<int64_t>(chunk_.size() - used_) < width) flush();
      const int64_t fits = static_cast<int64_t>(chunk_.size() - used_) / width;
      const int64_t end = std::min(begin + fits, numel);
      piece.read({begin, end}, chunk_.data() + used_);
      used_ += static_cast<size_t>((end - begin) * width);
      begin = end;
    }
  }

  // Gives everything to the system; close() waits for the disk.
  void flush() { write(chunk_.first(std::exchange(used_, 0))); }

  RankRecord::File close() {
    if (block_filled_ > 0) record_.blocks.push_back(block_);
    record_.bytes = file_.bytes();
    file_.commit();
    return std::move(record_);
  }

 private:
  bool append_in_place(const Piece& piece) {
    const FlatRange all{0, piece.box.numel()};
    const std::byte* const bytes = piece.in_memory ? piece.in_memory(all) : nullptr;
    if (bytes == nullptr) return false;
    flush();
    write({bytes, static_cast<size_t>(all.numel() * element_bytes(piece.dtype))});
    return true;
  }

  void write(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const int64_t most = std::min(block_bytes_ - block_filled_, kPartBytes);
      const std::span<const std::byte> part =
          bytes.first(std::min(bytes.size(), static_cast<size_t>(most)));
      file_.write(part);
      block_ = crc32c(part, block_);
      block_filled_ += static_cast<int64_t>(part.size());
      bytes = bytes.subspan(part.size());
      if (block_filled_ < block_bytes_) continue;
      record_.blocks.push_back(block_);
      block_ = 0;
      block_filled_ = 0;
    }
  }

  FileWriter file_;
  std::span<std::byte> chunk_;
  size_t used_ = 0;
  const int64_t block_bytes_;
  uint32_t block_ = 0;
  int64_t block_filled_ = 0;
  RankRecord::File record_;
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
  header.metadata["format"] = "pt";  // loaders of other libraries ask for it
  header.metadata["DCP_SHARDING_INFO"] = offsets.dump();
  return write_safetensors_header(header);
}

// The pieces of each file, wide elements first, so that all are aligned in the file and in the
// chunk.
std::vector<std::vector<const Piece*>> files_of(std::span<const Piece> pieces) {
  std::map<std::string, size_t> boxes_of;  // how many of each tensor so far
  std::vector<std::vector<const Piece*>> files;
  for (const Piece& piece : pieces) {
    const size_t file = boxes_of[piece.name]++;
    if (file == files.size()) files.emplace_back();
    files[file].push_back(&piece);
  }
  for (std::vector<const Piece*>& file : files)
    std::stable_sort(file.begin(), file.end(), [](const Piece* a, const Piece* b) {
      return element_bytes(a->dtype) > element_bytes(b->dtype);
    });
  return files;
}

}  // namespace

void WriteOptions::validate() const {
  if (chunk_bytes < 1)
    throw UsageError(concat("chunk_bytes is ", chunk_bytes, "; it must be at least 1"));
  if (block_bytes < 1 || block_bytes > kMaxBlockBytes)
    throw UsageError(
        concat("block_bytes is ", block_bytes, "; it must be from 1 to ", kMaxBlockBytes));
}

std::vector<RankRecord::File> write_pieces(const std::string& directory, int64_t rank,
                                           std::span<const FolderPieces> folders,
                                           const WriteOptions& options) {
  options.validate();
  // A multiple of the widest element, so that all elements are aligned in it.
  const auto chunk_bytes =
      static_cast<size_t>(round_up(std::min(options.chunk_bytes, kMaxChunkBytes), 8));
  const std::unique_ptr<std::byte[]> chunk(new std::byte[chunk_bytes]);
  std::deque<ChunkedFile> files;
  for (const FolderPieces& folder : folders) {
    make_directories(concat(directory, "/", folder.folder));
    const std::vector<std::vector<const Piece*>> contents = files_of(folder.pieces);
    for (size_t i = 0; i < contents.size(); ++i) {
      files.emplace_back(directory,
                         concat(folder.folder, "/", rank_text(rank), "-", i, ".safetensors"),
                         options, std::span(chunk.get(), chunk_bytes));
      files.back().append_header(header_of(contents[i]));
      for (const Piece* piece : contents[i]) files.back().append(*piece);
      files.back().flush();
    }
  }
  // Waits once at the end instead of once per file: the disk has worked since the first write.
  std::vector<RankRecord::File> written;
  for (ChunkedFile& file : files) written.push_back(file.close());
  return written;
}

std::vector<RankRecord::File> write_pieces(const std::string& directory, const std::string& folder,
                                           int64_t rank, std::span<const Piece> pieces,
                                           const WriteOptions& options) {
  const FolderPieces one{folder, pieces};
  return write_pieces(directory, rank, {&one, 1}, options);
}

}  // namespace fsdp
