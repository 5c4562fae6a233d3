// Reads parts of a checkpoint's files into memory, and refuses bytes with a wrong checksum.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "fsdp/checkpoint/checkpoint_options.h"
#include "fsdp/checkpoint/format/tensor_catalog.h"

namespace fsdp {

// Bytes [offset, offset + bytes) of a file go to `into`.
struct FileRun {
  size_t file = 0;
  int64_t offset = 0;
  int64_t bytes = 0;
  std::byte* into = nullptr;
};

// Keeps its memory from read to read.
class VerifiedReader {
 public:
  // `files` must outlive the reader.
  explicit VerifiedReader(std::span<const CheckedFile> files, const ReadOptions& options = {});

  // Neighbouring runs share reads, and threads share the work. Throws an Error that names file and
  // block if a checksum does not match; the content of `into` is then undefined.
  void read(std::vector<FileRun> wanted);

  // Of all reads so far.
  const ReadStatistics& statistics() const { return statistics_; }

 private:
  const std::span<const CheckedFile> files_;
  const ReadOptions options_;
  std::vector<std::vector<std::byte>> buffers_;  // one per thread
  ReadStatistics statistics_;
};

// For a single read.
ReadStatistics read_runs(std::span<const CheckedFile> files, std::vector<FileRun> wanted,
                         const ReadOptions& options = {});

// Adds the part of a stored tensor that falls into `target`, whose elements lie at `into`.
void add_runs(const CatalogTensor& stored, const StridedBox& target, std::byte* into,
              std::vector<FileRun>& runs);

}  // namespace fsdp
