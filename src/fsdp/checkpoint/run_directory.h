// The directory of a run: which checkpoints it holds, how one appears in it, and how one goes.
//
//   RUN/
//     latest                    "step-00000100\n": the newest complete checkpoint
//     step-00000100/            a complete checkpoint; it has a manifest.json
//     step-00000100.replaced/   the one before it, if a crash came while it was being replaced
//     .step-00000200.ID.tmp/    being written, or left by a crash
//     lock                      who writes here (run_lock.h)
//
// Note [Crash instants]: every change is a rename, made durable before the next one. So a
// checkpoint is there as a whole or not at all, whenever the power goes.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp {

// The file that makes a directory a checkpoint; written last.
inline constexpr std::string_view kManifestName = "manifest.json";

// "step-00000100"
std::string checkpoint_name(int64_t step);

// The other way round; none for every other name.
std::optional<int64_t> step_of(std::string_view name);

// Which checkpoints stay when newer ones come.
struct Retention {
  int64_t keep_last = 0;   // so many of the newest; 0: all
  int64_t keep_every = 0;  // steps that are multiples of this stay for ever; 0: none
};

// UsageError for what cannot be.
void validate(const Retention& retention);

// Names and renames only: what is inside a checkpoint is others' business. One process changes a
// run's directory at a time (rank 0 of the run); any number may look.
class RunDirectory {
 public:
  // Need not exist yet.
  explicit RunDirectory(std::string path);

  const std::string& path() const { return path_; }

  // Steps of complete checkpoints, ascending.
  std::vector<int64_t> steps() const;

  // Where the complete checkpoint of this step is. If there is none: an Error that lists those that
  // are there.
  std::string path_of(int64_t step) const;

  // What the file `latest` says; none where there is no such file. If it names something that is
  // not there: an Error that lists what is.
  std::optional<int64_t> latest() const;

  // Where a checkpoint is written before publish(). `id` is the same on all ranks of a run and
  // unique to it: letters, digits, '-' and '_'.
  std::string temporary(int64_t step, std::string_view id) const;

  // Makes the temporary directory the checkpoint of this step, in place of one that is there, and
  // the latest. The files in it are on the disk already (FileWriter::finish); their names, and
  // those of directories in it, are taken care of here.
  void publish(int64_t step, std::string_view id) const;

  // Removes what crashed runs left half done. For a run that begins: it removes what others write.
  void remove_temporaries() const;

  // Removes checkpoints older than the latest as `retention` says, but none that is `in_use` (that
  // the run was loaded from, or that is being read). Those newer than the latest stay: a run that
  // was resumed from an earlier step replaces them one by one.
  void remove_old(const Retention& retention, std::span<const int64_t> in_use = {}) const;

 private:
  std::string path_;
};

// The checkpoint a user means: `path` itself if it is one, or the latest if it is a run's
// directory. Otherwise an Error that says what was looked for.
std::string resolve_checkpoint(const std::string& path);

// The same for whoever also reads files of other tools: those stay what they are.
std::string checkpoint_or_files(const std::string& path);

}  // namespace fsdp
