// Saves a run again and again: beside the training or before it goes on, all or nothing.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/checkpoint/checkpoint_state.h"
#include "fsdp/checkpoint/load.h"
#include "fsdp/checkpoint/model_files.h"
#include "fsdp/checkpoint/run_directory.h"
#include "fsdp/checkpoint/run_lock.h"
#include "fsdp/checkpoint/training_position.h"

namespace fsdp {

enum class SaveMode : uint8_t {
  kBlocking,  // save() returns when the checkpoint is there; one chunk of memory
  // save() returns when the state is copied; a thread writes the copy while training goes on.
  kBackground,
};

struct CheckpointerOptions {
  SaveMode mode = SaveMode::kBackground;
  Retention keep = {};  // which ones stay when a newer one is there
  StoredForm form = {};
  WriteOptions write = {};
  // The text of the model's config.json, which makes a checkpoint one that says what it is of; "":
  // none. Rank 0's is written, as are the other files the model is published with.
  std::string model_config = {};
  std::vector<ModelFile> model_files = {};
};

// A checkpoint that is there.
struct SavedCheckpoint {
  int64_t step = 0;
  std::string path;
  int64_t bytes = 0;   // of all ranks' files
  double seconds = 0;  // from save() until it was visible
};

class Snapshot;

// One per run and rank; ranks call everything in the same order. At most two barriers per save, and
// no other collective (docs/checkpoints.md tells how a checkpoint becomes visible).
//
// A save that fails (a full disk, a directory that is gone) leaves what was there before, and says
// so on every rank: with kBlocking at once, with kBackground when the next save() or wait() is
// called. Training may go on, and the next save may succeed.
class Checkpointer {
 public:
  // Removes what crashed runs left unfinished. Error if another run, or another Checkpointer, saves
  // to this directory. The mesh must be the model's and outlive this.
  Checkpointer(const std::string& directory, const Mesh& mesh,
               const CheckpointerOptions& options = {});
  // Waits until this rank's files are written, and on rank 0 a minute for the others'; errors are
  // logged. Call wait() before, where errors are thrown.
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  // An error of the save before it is thrown after this one has begun.
  void save(const CheckpointState& state, const TrainingPosition& position);

  // Until the last save is visible. Throws if it failed.
  void wait();

  // The latest checkpoint into the state; nullopt when there is none yet. Retention never deletes
  // what was loaded.
  std::optional<LoadedCheckpoint> load_latest(const CheckpointState& state,
                                              const LoadOptions& options = {});

  // On rank 0, those that have become visible since the last call, in their order; nothing on other
  // ranks. Never waits.
  std::vector<SavedCheckpoint> take_saved();

  // Bytes of host memory for copies of the state.
  int64_t snapshot_bytes() const;

 private:
  class Attempt;

  // Ends the attempt that is under way, on all ranks; returns what went wrong.
  std::exception_ptr end_attempt();
  void remove_leftover() noexcept;

  std::optional<RunLock> lock_;  // rank 0 only; until nothing is written any more
  const RunDirectory directory_;
  const Mesh& mesh_;
  const CheckpointerOptions options_;
  const std::string id_;         // of this run, the same on all ranks
  int64_t num_attempts_ = 0;     // the same on all ranks, too
  std::vector<int64_t> in_use_;  // steps
  std::string leftover_;         // of a save that failed; rank 0 only
  mutable std::mutex saved_mutex_;
  mutable std::vector<SavedCheckpoint> saved_;  // guarded by saved_mutex_
  std::unique_ptr<Snapshot> snapshot_;
  std::unique_ptr<Attempt> attempt_;
};

// Saves once, and returns when the checkpoint is there: RUN/step-NNNNNNNN.
void save_checkpoint(const std::string& directory, const CheckpointState& state,
                     const TrainingPosition& position, const CheckpointerOptions& options = {});

}  // namespace fsdp
