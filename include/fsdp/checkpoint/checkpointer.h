// Saves a run repeatedly, beside or between steps; a checkpoint appears complete or not at all.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/checkpoint/checkpoint_options.h"
#include "fsdp/checkpoint/checkpoint_state.h"
#include "fsdp/checkpoint/load.h"
#include "fsdp/comm/mesh.h"

namespace fsdp {

// --- where a run is ------------------------------------------------------------------------------

// A program's position when it saves. Its texts are free; JSON is a good choice.
struct TrainingPosition {
  int64_t step = 0;            // names the checkpoint
  std::string schedule = {};   // of the learning rate; the same text on all ranks
  std::string data = {};       // how far this rank has read its data
  std::string optimizer = {};  // numbers of the optimizer; the same text on all ranks
};

// --- saving --------------------------------------------------------------------------------------

enum class SaveMode : uint8_t {
  kBlocking,  // save() returns when the checkpoint is visible; needs one chunk of memory
  // save() returns when the state is copied; a thread writes the copy while training goes on.
  kBackground,
};

struct CheckpointerOptions {
  SaveMode mode = SaveMode::kBackground;
  Retention keep = {};  // which checkpoints stay when newer ones appear
  StoredForm form = {};
  WriteOptions write = {};
  // The text of the model's config.json, with which a checkpoint describes its model; "": none.
  // Rank 0 writes it, and the other files that the model is published with.
  std::string model_config = {};
  std::vector<ModelFile> model_files = {};
};

// A checkpoint that has become visible.
struct SavedCheckpoint {
  int64_t step = 0;
  std::string path;
  int64_t bytes = 0;   // of all ranks' files
  double seconds = 0;  // from save() until it was visible
};

// One per run and rank; ranks call everything in the same order. A save costs at most two barriers
// and no other collective (docs/checkpoints.md tells how a checkpoint becomes visible).
//
// A save that fails (a full disk, a missing directory) keeps the checkpoints before it, and throws
// on every rank: with kBlocking at once, with kBackground from the next save() or wait(). Training
// may go on, and the next save may succeed.
class Checkpointer {
 public:
  // Removes unfinished directories of crashed runs. Throws an Error if another run, or another
  // Checkpointer, saves to this directory. The mesh must be the model's and outlive this object.
  Checkpointer(const std::string& directory, const Mesh& mesh,
               const CheckpointerOptions& options = {});
  // Waits until this rank's files are written, and on rank 0 a minute for the others'. Logs errors;
  // call wait() before, which throws them.
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  // Throws an error of the save before, after this one has begun.
  void save(const CheckpointState& state, const TrainingPosition& position);

  // Waits until the last save is visible. Throws if it failed.
  void wait();

  // Loads the newest checkpoint into the state; nullopt if there is none yet. Takes the one before
  // it, with a warning, if its bytes are not what was written. Retention never deletes a loaded
  // checkpoint.
  std::optional<LoadedCheckpoint> load_latest(const CheckpointState& state,
                                              const LoadOptions& options = {});

  // On rank 0, the checkpoints that have become visible since the last call, in their order; empty
  // on other ranks. Never waits.
  std::vector<SavedCheckpoint> take_saved();

 private:
  class Impl;

  const std::unique_ptr<Impl> impl_;
};

// Saves once, and returns when the checkpoint is visible: RUN/step-NNNNNNNN.
void save_checkpoint(const std::string& directory, const CheckpointState& state,
                     const TrainingPosition& position, const CheckpointerOptions& options = {});

}  // namespace fsdp
