// Brings a checkpoint into a sharded model and its optimizer, whoever wrote it and however cut.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/checkpoint/checkpoint_state.h"
#include "fsdp/checkpoint/verified_reads.h"

namespace fsdp {

struct LoadOptions {
  // Names in the checkpoint and in the model meet in what these rules make of both.
  NameRules names = {};
  // Tensors of the model that the checkpoint may lack; they keep their values. Globs.
  std::vector<std::string> allow_missing = {};
  // Whether it may have tensors the model does not have.
  enum class Extra : uint8_t { kRefuse, kAllow };
  Extra extra = Extra::kRefuse;
  // Whether errors say how to allow more; not where nobody can set these two.
  bool is_tolerance_offered = true;
  // What is in memory beside the state itself, at most.
  int64_t chunk_bytes = int64_t{64} << 20;
  ReadOptions read = {};
};

// What came with the state.
struct LoadedCheckpoint {
  std::string path;
  int64_t step = 0;
  std::string schedule;
  // Of the rank that had this rank's place when it was saved; empty if another number of ranks did.
  std::string data;
  std::vector<std::string> data_of_ranks;  // of all that wrote it
  bool has_random_state = false;           // and it is set: the same number of ranks wrote it
  std::vector<std::string> missing;        // allowed; kept their values
  std::vector<std::string> extra;          // allowed; ignored
  ReadStatistics statistics;               // of this rank
};

// `path` is a checkpoint, a run's directory (then its latest one), or safetensors files of other
// tools (then weights alone). All ranks call it, and all fail if one does. Errors about names,
// shapes, types and headers come before anything is changed; after one about data the state is
// undefined, and must be loaded again from elsewhere.
LoadedCheckpoint load_checkpoint(const std::string& path, const CheckpointState& state,
                                 const LoadOptions& options = {});

}  // namespace fsdp
