#include "fsdp/train/weights_out.h"

#include <chrono>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/log.h"
#include "fsdp/base/text.h"
#include "fsdp/checkpoint/patches/patch_files.h"
#include "fsdp/checkpoint/rank_agreement.h"
#include "fsdp/checkpoint/weight_export.h"
#include "fsdp/comm/comm_error.h"
#include "fsdp/shard/engine/engine_views.h"

namespace fsdp::train {

namespace {

// Patches may lie beside checkpoints, exports have the names of checkpoints.
constexpr RunLock::Use kPatchLock{"patches.lock", "writes its patches", "--patches"};
constexpr RunLock::Use kExportLock{"lock", "writes here", "--export-dir"};

}  // namespace

WeightsOut::WeightsOut(const TrainOptions& options, const CheckpointState& state,
                       const NameRules& names, const PublishedModel& published, int64_t step)
    : options_(options), state_(state), names_(names), published_(published) {
  open(options.export_dir, kExportLock, export_lock_);
  open(options.patches, kPatchLock, patch_lock_);
  if (options.patches.empty()) return;
  PatchOptions patching = options.patching;
  patching.rules = names_;
  patches_ = std::make_unique<PatchStream>(state_, patching);
  write_patch(step);
}

void WeightsOut::open(const std::string& directory, const RunLock::Use& use,
                      std::unique_ptr<RunLock>& lock) {
  if (directory.empty()) return;
  const StateView view(state_.sharded);
  const Mesh& mesh = view.mesh();
  on_all_ranks(mesh, concat("opening ", directory), [&] {
    if (rank_in(mesh) != 0) return;
    make_directories(directory);
    lock = std::make_unique<RunLock>(directory, use);
    RunDirectory(directory).remove_temporaries();
    remove_patch_leftovers(directory);
  });
}

void WeightsOut::confirm(const std::unique_ptr<RunLock>& lock) const {
  on_all_ranks(StateView(state_.sharded).mesh(), "holding the lock", [&] {
    if (lock) lock->confirm();
  });
}

void WeightsOut::write_patch(int64_t step) {
  if (!patches_ || patched_step_ == step) return;
  patched_step_ = step;
  try {
    confirm(patch_lock_);
    patches_->write(options_.patches, step);
  } catch (const RemoteError&) {
    // The rank that failed says why. If it has left, the next collective throws.
  } catch (const Error& error) {
    log(LogLevel::kWarning, "the patch of step ", step,
        " was not written, and the next one is full: ", error.what());
  }
}

std::string WeightsOut::write_export(int64_t step) {
  if (options_.export_dir.empty() || exported_step_ == step) return "";
  exported_step_ = step;
  export_error_ = nullptr;
  const auto begin = std::chrono::steady_clock::now();
  const std::string directory = concat(options_.export_dir, "/", checkpoint_name(step));
  ExportedFiles exported;
  try {
    confirm(export_lock_);
    exported = fsdp::export_weights(
        state_, directory,
        {.model_config = published_.config,
         .model_files = published_.files,
         .existing = ExportFiles::Existing::kReplace},
        {.form = {.names = names_}, .chunk_bytes = options_.saving.write.chunk_bytes});
  } catch (const RemoteError&) {
    export_error_ = std::current_exception();
    return "";
  } catch (const Error& error) {
    log(LogLevel::kError, "the weights of step ", step, " were not exported: ", error.what());
    export_error_ = std::current_exception();
    return "";
  }
  const auto passed = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::steady_clock::now() - begin);
  return concat("weights of step ", step, ": ", directory, ", ", bytes_text(exported.bytes), " in ",
                passed.count(), " ms");
}

void WeightsOut::end() const {
  if (export_error_) std::rethrow_exception(export_error_);
}

}  // namespace fsdp::train
