// Writes a rank's part of a checkpoint as safetensors files that others can read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "fsdp/base/dtype.h"
#include "fsdp/checkpoint/checkpoint_options.h"
#include "fsdp/checkpoint/format/manifest.h"
#include "fsdp/layout/box.h"

namespace fsdp {

// A box of a stored tensor, and functions that give its elements.
struct Piece {
  std::string name;  // of the whole stored tensor
  DType dtype = DType::kFloat32;
  Box box;
  // Copies elements [range) of the box, counted row by row, to `into`.
  std::function<void(FlatRange range, std::byte* into)> read;
  // The address of these elements, if they are contiguous in memory; else nullptr.
  std::function<const std::byte*(FlatRange range)> in_memory = {};
};

// The pieces that one rank writes to one folder: "model", "optimizer".
struct FolderPieces {
  std::string folder;
  std::span<const Piece> pieces;
};

// Writes `directory`/`folder`/NNNNN-K.safetensors for this rank; the files are on the disk when it
// returns. Readers expect one tensor per name and file, so the second box of a tensor goes to file
// K = 1, the third to K = 2, ...
std::vector<RankRecord::File> write_pieces(const std::string& directory, int64_t rank,
                                           std::span<const FolderPieces> folders,
                                           const WriteOptions& options);
// The same for one folder.
std::vector<RankRecord::File> write_pieces(const std::string& directory, const std::string& folder,
                                           int64_t rank, std::span<const Piece> pieces,
                                           const WriteOptions& options);

}  // namespace fsdp
