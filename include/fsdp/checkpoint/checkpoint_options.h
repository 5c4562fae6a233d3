// The options of files that are saved and loaded, which checkpoints stay, and what reading took.
#pragma once

#include <cstdint>
#include <string>

namespace fsdp {

// Which checkpoints stay when newer ones come.
struct Retention {
  int64_t keep_last = 0;   // this many of the newest; 0: all
  int64_t keep_every = 0;  // multiples of this step stay forever; 0: none
};

// A file that a model is published with beside its weights.
struct ModelFile {
  std::string name;  // "tokenizer.json"
  std::string text;

  friend bool operator==(const ModelFile&, const ModelFile&) = default;
};

struct WriteOptions {
  // Memory that writing takes beside the state itself.
  int64_t chunk_bytes = int64_t{16} << 20;
  // Bytes of a file that share a checksum: the least that a reader must read.
  int64_t block_bytes = int64_t{1} << 20;

  // UsageError for sizes below 1, and for blocks larger than readers accept.
  void validate() const;
};

struct ReadOptions {
  // Bytes per read of each thread; rounded up to a block.
  int64_t chunk_bytes = int64_t{1} << 20;
  // 0: two, so that one reads while the other computes checksums; more help with many disks.
  int threads = 0;
};

struct ReadStatistics {
  int64_t num_reads = 0;
  int64_t bytes = 0;  // whole blocks, since only whole ones can be verified
};

}  // namespace fsdp
