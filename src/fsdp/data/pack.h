// Text and token files into one packed token file, a piece in memory at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "fsdp/data/documents.h"
#include "fsdp/data/text_files.h"
#include "fsdp/data/token_file.h"
#include "fsdp/data/tokenizer.h"

namespace fsdp {

struct PackOptions {
  enum class Existing : uint8_t { kRefuse, kReplace };
  Existing existing = Existing::kRefuse;  // a file that is where the new one goes
  TextFileOptions text = {};
  std::shared_ptr<const Tokenizer> tokenizer = nullptr;  // of text; null: bytes
  // Told how many bytes of how many have been read, after every piece.
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress = {};
};

struct PackSummary {
  TokenHeader header;        // of the file that was written
  int64_t num_files = 0;     // that were read
  int64_t source_bytes = 0;  // of them
  LeftOut left_out;
  DocumentFindings findings;
};

// Packs what Corpus::open() would read from these paths, in the same order, into the file `output`.
// It appears when it is complete, and not at all when something fails.
PackSummary pack_tokens(std::span<const std::string> paths, const std::string& output,
                        const PackOptions& options = {});

}  // namespace fsdp
