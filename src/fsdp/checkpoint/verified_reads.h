// Reads parts of a checkpoint's files into memory, and nothing that does not match its checksum.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "fsdp/checkpoint/tensor_catalog.h"

namespace fsdp {

// Bytes [offset, offset + bytes) of a file go to `into`.
struct FileRun {
  size_t file = 0;
  int64_t offset = 0;
  int64_t bytes = 0;
  std::byte* into = nullptr;
};

struct ReadOptions {
  // What is read at once, by each thread; rounded up to a block.
  int64_t chunk_bytes = int64_t{1} << 20;
  // 0: two, so that one reads while the other computes checksums; more where disks are many.
  int threads = 0;
};

struct ReadStatistics {
  int64_t num_reads = 0;
  int64_t bytes = 0;  // from files: whole blocks, since only whole ones can be verified
};

// Reads again and again, with memory that it keeps.
class VerifiedReader {
 public:
  // `files` must outlive it.
  explicit VerifiedReader(std::span<const CheckedFile> files, const ReadOptions& options = {});

  // Neighbouring runs share reads, and threads share the work. Error naming file and block where a
  // checksum does not match; then what `into` holds is undefined.
  void read(std::vector<FileRun> wanted);

  // Of all reads so far.
  const ReadStatistics& statistics() const { return statistics_; }

 private:
  const std::span<const CheckedFile> files_;
  const ReadOptions options_;
  std::vector<std::vector<std::byte>> buffers_;  // one per thread
  ReadStatistics statistics_;
};

// Once.
ReadStatistics read_runs(std::span<const CheckedFile> files, std::vector<FileRun> wanted,
                         const ReadOptions& options = {});

// What of a stored tensor falls into `target`, whose elements lie at `into`.
void add_runs(const CatalogTensor& stored, const StridedBox& target, std::byte* into,
              std::vector<FileRun>& runs);

}  // namespace fsdp
