// Writes a rank's part of a checkpoint as safetensors files that others can read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "fsdp/base/dtype.h"
#include "fsdp/checkpoint/manifest.h"
#include "fsdp/layout/box.h"

namespace fsdp {

// A box of a stored tensor, and who knows its elements.
struct Piece {
  std::string name;  // of the whole stored tensor
  DType dtype = DType::kFloat32;
  Box box;
  // Puts elements [range) of the box, counted row by row, to `into`.
  std::function<void(FlatRange range, std::byte* into)> read;
  // Where they lie one after the other in memory anyway; nullptr: nowhere, and nobody knows.
  std::function<const std::byte*(FlatRange range)> in_memory = {};
};

// What one rank puts into one folder: "model", "optimizer".
struct FolderPieces {
  std::string folder;
  std::span<const Piece> pieces;
};

struct WriteOptions {
  // What is in memory beside the state itself.
  int64_t chunk_bytes = int64_t{16} << 20;
  // How much of a file has a checksum of its own: what a reader must read at least.
  int64_t block_bytes = int64_t{1} << 20;

  // UsageError for sizes below 1, and for blocks that no reader would accept.
  void validate() const;
};

// Writes `directory`/`folder`/NNNNN-K.safetensors for this rank; they are on the disk when it
// returns. Readers take a name for one tensor per file, so the second box of a tensor goes to file
// K = 1, the third to K = 2, ...
std::vector<RankRecord::File> write_pieces(const std::string& directory, int64_t rank,
                                           std::span<const FolderPieces> folders,
                                           const WriteOptions& options);
// The same for one folder.
std::vector<RankRecord::File> write_pieces(const std::string& directory, const std::string& folder,
                                           int64_t rank, std::span<const Piece> pieces,
                                           const WriteOptions& options);

}  // namespace fsdp
