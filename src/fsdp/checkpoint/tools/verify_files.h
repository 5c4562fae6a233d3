// Reads every byte of a checkpoint and reports everything that differs from what was written.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace fsdp {

struct DamagedPart {
  std::string path;  // below the checkpoint
  std::string what;  // "bytes 0 to 1048576 are not what was written", "is missing"

  friend bool operator==(const DamagedPart&, const DamagedPart&) = default;
};

struct Verification {
  // False for files of other tools: then only readable bytes and correct headers are confirmed.
  bool has_checksums = false;
  // Whether manifest.json has a checksum, too; version 1 had none.
  bool has_manifest_checksum = false;
  int64_t num_files = 0;
  int64_t bytes = 0;
  std::vector<DamagedPart> damaged;
};

// `path` is a checkpoint, or plain safetensors files. Continues after a fault, so that the list is
// complete; throws an Error only if nothing can be said (no such path, an unreadable manifest).
// `on_progress` gets the bytes done and the bytes in all.
Verification verify_files(const std::string& path,
                          const std::function<void(int64_t done, int64_t total)>& on_progress = {});

}  // namespace fsdp
