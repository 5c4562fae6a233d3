// Weights that a run gives to others beside its checkpoints: patches of them (--patches), and all
// of them (--export-dir).
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>

#include "fsdp/checkpoint/checkpoint_state.h"
#include "fsdp/checkpoint/names/name_rules.h"
#include "fsdp/checkpoint/patches.h"
#include "fsdp/checkpoint/run_directory.h"
#include "fsdp/train/model/published_model.h"
#include "fsdp/train/settings/train_options.h"

namespace fsdp::train {

// A patch or an export that fails costs that one and not the run: the next one may succeed. All
// ranks call everything; rank 0 writes.
class WeightsOut {
 public:
  // Locks the directories and removes what runs that were killed have left in them. Writes the
  // patch of `step`, which has everything, so that receivers can begin. What is given must outlive
  // it; `published` is rank 0's.
  WeightsOut(const TrainOptions& options, const CheckpointState& state, const NameRules& names,
             const PublishedModel& published, int64_t step);

  // Once for each step; nothing without --patches.
  void write_patch(int64_t step);

  // EXPORT_DIR/step-NNNNNNNN, in place of an older one: a resumed run comes to steps again that it
  // has exported. Once for each step. Returns a line for the console, or nothing.
  std::string write_export(int64_t step);

  // Throws the error of the last export, which nothing makes up for.
  void end() const;

 private:
  void open(const std::string& directory, const RunLock::Use& use, std::unique_ptr<RunLock>& lock);
  void confirm(const std::unique_ptr<RunLock>& lock) const;

  const TrainOptions& options_;
  const CheckpointState state_;
  const NameRules names_;
  const PublishedModel& published_;
  std::unique_ptr<RunLock> patch_lock_;  // rank 0 only
  std::unique_ptr<RunLock> export_lock_;
  std::unique_ptr<PatchStream> patches_;  // with --patches
  int64_t patched_step_ = -1;
  int64_t exported_step_ = -1;
  std::exception_ptr export_error_;  // of the last one
};

}  // namespace fsdp::train
