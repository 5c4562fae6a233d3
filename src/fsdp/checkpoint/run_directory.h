// The directory of a run: its checkpoints, how they appear, and how they are removed.
//
//   RUN/
//     latest                    "step-00000100\n": a hint; none newer counts (Note [Newest])
//     step-00000100/            a complete checkpoint; it has a manifest.json
//     step-00000100.replaced/   the one before it, if a crash came while it was being replaced
//     .step-00000200.ID.tmp/    being written, or left by a crash
//     lock                      who writes here (RunLock)
//
// Note [Crash instants]: every change is a rename, made durable before the next one. So a
// checkpoint is there as a whole or not at all, whenever the power goes.
//
// Note [Newest]: the directories are the truth. A run goes on from the newest complete checkpoint,
// whatever happened to `latest`. That file is written before a checkpoint appears, so it never
// hides one; it hides later steps that a run went back from, until that run replaces them.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/base/durable_file.h"
#include "fsdp/checkpoint/checkpoint_options.h"

namespace fsdp {

// --- locks ---------------------------------------------------------------------------------------

// Opens a directory and locks it for the life of the handle; not open: another process has it, or
// it was renamed meanwhile. A file system without locks goes unlocked.
FileHandle lock_directory(const std::string& path);

// --- one run at a time ---------------------------------------------------------------------------

// Holds RUN/lock, which contains the host and the process number, for its lifetime. The kernel
// releases the lock however the process ends, so a file left by a crash is no obstacle. Readers
// need no lock.
class RunLock {
 public:
  // The purpose of a lock.
  struct Use {
    const char* file = "lock";
    const char* doing = "saves its checkpoints";
    const char* option = "--checkpoint-dir";
  };

  // The directory must exist. Error that names the run that holds the lock. Only warns if the file
  // system has no locks; docs/checkpoints.md lists those with locks per host only.
  explicit RunLock(const std::string& directory, const Use& use);
  explicit RunLock(const std::string& directory) : RunLock(directory, Use()) {}
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

  // To be called before something is changed: if the file was removed, locks anew and warns. Error
  // if another run has taken the lock by then.
  void confirm();

 private:
  void lock();

  const std::string directory_;
  const Use use_;
  const std::string path_;
  FileHandle file_;
};

// --- the checkpoints of a run --------------------------------------------------------------------

// The file that makes a directory a checkpoint; written last.
inline constexpr std::string_view kManifestName = "manifest.json";

// "step-00000100"
std::string checkpoint_name(int64_t step);

// The inverse; nullopt for every other name.
std::optional<int64_t> step_of(std::string_view name);

// Throws a UsageError for impossible values.
void validate(const Retention& retention);

// Handles names and renames only, not the content of checkpoints. One process changes a run's
// directory at a time (rank 0 of the run); any number may read it.
class RunDirectory {
 public:
  // The directory need not exist yet.
  explicit RunDirectory(std::string path);

  const std::string& path() const { return path_; }

  // Steps of complete checkpoints, ascending.
  std::vector<int64_t> steps() const;

  // The path of the complete checkpoint of this step. If there is none: an Error that lists the
  // existing ones.
  std::string path_of(int64_t step) const;

  // Steps of complete checkpoints without those that `latest` hides, the newest first.
  std::vector<int64_t> newest_first() const;

  // From the first of them on whose manifest and config.json are what was written, with a warning
  // for those before it; all of them if none is such.
  std::vector<int64_t> undamaged_first() const;

  // The first of newest_first(); nullopt if there is none.
  std::optional<int64_t> latest() const;

  // Error if directories of steps are there and none is complete: no crash leaves that, and a run
  // that began anew would replace them.
  void refuse_remains() const;

  // The directory in which a checkpoint is written before publish(). `id` is the same on all ranks
  // of a run and unique to it: letters, digits, '-' and '_'.
  std::string temporary(int64_t step, std::string_view id) const;

  // Makes the temporary directory the checkpoint of this step, in place of an older one, and the
  // latest. Its files must be on the disk already (FileWriter::commit); publish() makes their names
  // and directories durable.
  void publish(int64_t step, std::string_view id) const;

  // Removes the temporaries of crashed runs. Only at the start: a running save has one, too.
  void remove_temporaries() const;

  // Removes checkpoints older than the latest as `retention` says, except those `in_use` (loaded by
  // the run, or being read). Newer ones than the latest stay: a run that was resumed from an
  // earlier step replaces them one by one.
  void remove_old(const Retention& retention, std::span<const int64_t> in_use = {}) const;

 private:
  // The step that `latest` names; nullopt without the file, and with a warning for other text.
  std::optional<int64_t> hint() const;

  std::string path_;
};

// The checkpoint that a user names: `path` itself if it is one, or the first of
// undamaged_first() if it is a run's directory. Otherwise an Error that says what was looked for.
std::string resolve_checkpoint(const std::string& path);

// resolve_checkpoint() for callers that also read files of other tools, whose paths stay as they
// are.
std::string checkpoint_or_files(const std::string& path);

// --- a directory that appears complete or not at all ---------------------------------------------

// Files are written to path(), a hidden directory beside the target; publish() renames it to the
// target. The destructor removes a directory that was not published, and the next object for the
// same target removes one that a crash left. A second writer of the same target, in any process, is
// refused.
class StagedDirectory {
 public:
  enum class Existing : uint8_t {
    kRefuse,
    // Replaces a target that is empty, a checkpoint, or holds safetensors files; refuses any other,
    // which the user cannot have meant.
    kReplace,
  };

  // Throws an Error if the target exists and must not be replaced.
  StagedDirectory(const std::string& target, Existing existing);
  ~StagedDirectory();
  StagedDirectory(const StagedDirectory&) = delete;
  StagedDirectory& operator=(const StagedDirectory&) = delete;

  const std::string& path() const { return path_; }

  // Files must be on the disk already (FileWriter::commit). There is an instant between the old
  // directory and the new one; a crash then leaves the old one as .NAME.replaced.
  void publish();

 private:
  void check_target() const;
  std::string beside(const char* suffix) const;

  std::string target_;
  Existing existing_;
  std::string path_;
  FileHandle lock_;  // of the directory at path_
};

}  // namespace fsdp
