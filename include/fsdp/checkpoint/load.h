// Loads a checkpoint of any layout or tool into a sharded model and its optimizer.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/checkpoint/checkpoint_options.h"
#include "fsdp/checkpoint/checkpoint_state.h"
#include "fsdp/checkpoint/names/name_rules.h"

namespace fsdp {

struct LoadOptions {
  // Applied to the names of the checkpoint and of the model, which must then be equal.
  NameRules names = {};
  // The parameters that are loaded, with their moments; nobody asks the checkpoint for the others,
  // which keep their values. Globs; none: all.
  std::vector<std::string> only = {};
  // Tensors of the model that the checkpoint may lack; they keep their values. Globs.
  std::vector<std::string> allow_missing = {};
  // Tensors of the checkpoint that the model is known to leave out. Globs.
  std::vector<std::string> ignored = {};
  // Whether the checkpoint may have other tensors that the model does not have.
  enum class Extra : uint8_t { kRefuse, kAllow };
  Extra extra = Extra::kRefuse;
  // Whether errors say how to set the two fields above; false where nobody can set them.
  bool is_tolerance_offered = true;
  // The most memory that loading takes beside the state itself.
  int64_t chunk_bytes = int64_t{64} << 20;
  ReadOptions read = {};
};

// The stored tensors are not what was written, or cannot be read.
class DamagedCheckpoint : public Error {
 public:
  using Error::Error;
};

// Facts that came with the state.
struct LoadedCheckpoint {
  std::string path;
  int64_t step = 0;
  std::string schedule;
  std::string optimizer;       // TrainingPosition::optimizer
  int64_t optimizer_step = 0;  // updates that were made
  // The text of the rank in this rank's place when it was saved; empty if the number of ranks was
  // another.
  std::string data;
  std::vector<std::string> data_of_ranks;  // of all ranks that wrote the checkpoint
  bool has_random_state = false;           // if so, it is set: the same number of ranks wrote it
  std::vector<std::string> missing;        // allowed; they kept their values
  std::vector<std::string> extra;          // allowed; ignored
  ReadStatistics statistics;               // of this rank
};

// `path` is a checkpoint, a run's directory (for its latest checkpoint), or safetensors files of
// other tools (for weights alone). All ranks call it, and all fail if one does. Errors about names,
// shapes, types and headers come before any change. After a DamagedCheckpoint the state is
// undefined, and must be loaded again from elsewhere.
LoadedCheckpoint load_checkpoint(const std::string& path, const CheckpointState& state,
                                 const LoadOptions& options = {});

}  // namespace fsdp
