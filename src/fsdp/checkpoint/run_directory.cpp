#include "fsdp/checkpoint/run_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <set>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/log.h"
#include "fsdp/base/text.h"
#include "fsdp/checkpoint/format/tensor_catalog.h"

namespace fsdp {

namespace {

// A process that was killed holds its locks until its memory is freed.
constexpr std::chrono::seconds kPatienceForLock{2};
constexpr std::chrono::milliseconds kPause{20};

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "unknown";
}

// "process 4711 on HOST"
std::string text_in(const FileHandle& file) {
  std::array<char, 400> text{};
  const ssize_t count = ::pread(file.descriptor(), text.data(), text.size(), 0);
  std::string_view line(text.data(), static_cast<size_t>(count > 0 ? count : 0));
  return std::string(line.substr(0, line.find('\n')));
}

// The process that had the lock may have removed the file since it was opened.
bool is_at(const std::string& path, const FileHandle& file) {
  struct stat mine {};
  struct stat there {};
  return ::fstat(file.descriptor(), &mine) == 0 && ::stat(path.c_str(), &there) == 0 &&
         mine.st_ino == there.st_ino && mine.st_dev == there.st_dev;
}

// Opens and locks the file. Returns 0 or the reason for failing.
int lock_file(const std::string& path, FileHandle& file) {
  const auto deadline = std::chrono::steady_clock::now() + kPatienceForLock;
  for (;;) {
    file = FileHandle(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
    FSDP_CHECK(file.is_open(), path,
               ": cannot open the file: ", std::generic_category().message(errno),
               "; choose a directory that can be written");
    const int reason = ::flock(file.descriptor(), LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
    if (reason == 0 && is_at(path, file)) return 0;
    const bool may_change = reason == 0 || reason == EINTR || reason == EWOULDBLOCK;
    if (!may_change || std::chrono::steady_clock::now() >= deadline) return reason;
    std::this_thread::sleep_for(kPause);
  }
}

constexpr std::string_view kLatestName = "latest";
constexpr std::string_view kStepPrefix = "step-";
constexpr std::string_view kReplacedSuffix = ".replaced";
constexpr std::string_view kTemporarySuffix = ".tmp";
constexpr std::string_view kRemovedId = "removed";  // of a checkpoint that is being deleted

std::string without_slashes_at_end(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

std::string in(const std::string& directory, std::string_view name) {
  return concat(directory, "/", name);
}

bool is_complete(const std::string& checkpoint) {
  return path_exists(in(checkpoint, kManifestName));
}

// The step of "step-00000100" and "step-00000100.replaced".
std::optional<int64_t> visible_step_of(std::string_view name) {
  if (name.ends_with(kReplacedSuffix)) name.remove_suffix(kReplacedSuffix.size());
  return step_of(name);
}

// ".step-00000100.ID.tmp", and ".latest.ID.tmp" of an interrupted write_file_durably().
bool is_temporary(std::string_view name) {
  if (!name.starts_with('.') || !name.ends_with(kTemporarySuffix)) return false;
  name.remove_prefix(1);
  const std::string_view first = name.substr(0, name.find('.'));
  return first == kLatestName || step_of(first).has_value();
}

// Renames first, durably, so that a half-removed checkpoint is never taken for one.
void remove_checkpoint(const std::string& run, const std::string& name) {
  if (!path_exists(in(run, name))) return;
  const std::string removed = in(run, concat(".", name, ".", kRemovedId, kTemporarySuffix));
  remove_tree(removed);  // left by a crash at this point
  rename_durably(in(run, name), removed);
  remove_tree(removed);
}

// "RUN holds step-00000100 and step-00000200"
std::string contents(const std::string& run, std::span<const int64_t> steps) {
  constexpr size_t kMost = 20;
  if (steps.empty()) return concat(run, " holds no complete checkpoint");
  std::vector<std::string> names;
  for (const int64_t step : steps.last(std::min(steps.size(), kMost)))
    names.push_back(checkpoint_name(step));
  return concat(run, " holds ", join(names, ", "),
                steps.size() > kMost ? concat(" and ", steps.size() - kMost, " older ones") : "");
}

}  // namespace

FileHandle lock_directory(const std::string& path) {
  FileHandle handle(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  FSDP_CHECK(handle.is_open(), path,
             ": cannot open the directory: ", std::generic_category().message(errno));
  const bool is_taken =
      ::flock(handle.descriptor(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  return !is_taken && is_at(path, handle) ? std::move(handle) : FileHandle();
}

RunLock::RunLock(const std::string& directory, const Use& use)
    : directory_(directory), use_(use), path_(concat(directory, "/", use.file)) {
  lock();
}

void RunLock::confirm() {
  if (!file_.is_open() || is_at(path_, file_)) return;
  log(LogLevel::kWarning, path_,
      ": was removed while this run holds it; see to it that no other run writes there");
  lock();
}

void RunLock::lock() {
  FileHandle file;
  const int reason = lock_file(path_, file);
  const std::string before = text_in(file);
  FSDP_CHECK(reason != EWOULDBLOCK, directory_, ": another run ", use_.doing, " here",
             before.empty() ? "" : concat(" (", shown(before), ")"),
             "; stop that one, or give this one another directory (", use_.option, ")");
  if (reason != 0) {
    log(LogLevel::kWarning, directory_, ": its file system has no locks (",
        std::generic_category().message(reason), "), so see to it that no other run saves there");
    return;
  }
  // Locks that hosts do not share would not have found the other run.
  const std::string host = host_name();
  if (!before.empty() && !before.ends_with(concat(" on ", host)))
    log(LogLevel::kWarning, directory_, ": the run before (", shown(before),
        ") did not end by itself; see to it that it no longer runs");
  const std::string mine = concat("process ", ::getpid(), " on ", host, "\n");
  // On a full disk the text may be missing; then others get a shorter message.
  static_cast<void>(::ftruncate(file.descriptor(), 0) == 0 &&
                    ::pwrite(file.descriptor(), mine.data(), mine.size(), 0) > 0);
  file_ = std::move(file);
}

RunLock::~RunLock() {
  if (file_.is_open() && is_at(path_, file_)) ::unlink(path_.c_str());
}

std::string checkpoint_name(int64_t step) {
  FSDP_ASSERT(step >= 0, step);
  return concat(kStepPrefix, step_text(step));
}

std::optional<int64_t> step_of(std::string_view name) {
  if (!name.starts_with(kStepPrefix)) return {};
  const std::string_view digits = name.substr(kStepPrefix.size());
  int64_t step = -1;
  std::from_chars(digits.data(), digits.data() + digits.size(), step);
  // Each step has one name: neither "step-100" nor "step-00000100x".
  if (step < 0 || checkpoint_name(step) != name) return {};
  return step;
}

void validate(const Retention& retention) {
  const auto check = [](const char* field, int64_t value) {
    if (value < 0) throw UsageError(concat(field, " is ", value, ": use 0 or more"));
  };
  check("keep_last", retention.keep_last);
  check("keep_every", retention.keep_every);
}

RunDirectory::RunDirectory(std::string path) : path_(without_slashes_at_end(std::move(path))) {
  FSDP_CHECK(!path_.empty(), "the directory of the run has no name: give a path");
}

// --- looking -------------------------------------------------------------------------------------

std::vector<int64_t> RunDirectory::steps() const {
  std::set<int64_t> steps;
  for (const std::string& name : names_in(path_)) {
    const std::optional<int64_t> step = visible_step_of(name);
    if (step.has_value() && is_complete(in(path_, name))) steps.insert(*step);
  }
  return {steps.begin(), steps.end()};
}

std::string RunDirectory::path_of(int64_t step) const {
  std::string path = in(path_, checkpoint_name(step));
  if (is_complete(path)) return path;
  const std::string replaced = concat(path, kReplacedSuffix);
  FSDP_CHECK(is_complete(replaced), path, ": no complete checkpoint is there; ",
             contents(path_, steps()));
  return replaced;
}

std::optional<int64_t> RunDirectory::hint() const {
  const std::string file = in(path_, kLatestName);
  if (!path_exists(file)) return {};
  std::string name;
  try {
    constexpr int64_t kMaxBytes = 100;  // a name and a line break
    name = read_text_file(file, kMaxBytes);
  } catch (const Error& error) {
    log(LogLevel::kWarning, error.what(), "; the newest checkpoint counts");
    return {};
  }
  while (!name.empty() && (name.back() == '\n' || name.back() == '\r')) name.pop_back();
  const std::optional<int64_t> step = step_of(name);
  if (!step)
    log(LogLevel::kWarning, file, ": names '", shown(name),
        "', which is no name of a checkpoint such as ", checkpoint_name(100),
        ", so the newest one counts; ", contents(path_, steps()));
  return step;
}

std::vector<int64_t> RunDirectory::newest_first() const {
  std::vector<int64_t> found = steps();
  const auto end = std::upper_bound(found.begin(), found.end(), hint().value_or(INT64_MAX));
  // A hint that would hide everything names a checkpoint that somebody removed.
  if (end != found.begin()) found.erase(end, found.end());
  std::reverse(found.begin(), found.end());
  return found;
}

std::vector<int64_t> RunDirectory::undamaged_first() const {
  const std::vector<int64_t> found = newest_first();
  const auto first = std::find_if(found.begin(), found.end(), [&](int64_t step) {
    return !has_damaged_description(path_of(step));
  });
  if (first == found.end()) return found;  // whoever opens one says what is damaged
  for (auto step = found.begin(); step != first; ++step)
    log(LogLevel::kWarning, path_of(*step), ": is damaged (fsdp inspect --verify shows where), so ",
        checkpoint_name(*first), " counts");
  return {first, found.end()};
}

std::optional<int64_t> RunDirectory::latest() const {
  const std::vector<int64_t> found = newest_first();
  return found.empty() ? std::nullopt : std::optional(found.front());
}

void RunDirectory::refuse_remains() const {
  for (const std::string& name : names_in(path_))
    FSDP_CHECK(!step_of(name) || !steps().empty(), in(path_, name), ": has no ", kManifestName,
               ", so it is no complete checkpoint, and no other one is there; put back what is "
               "missing, or remove it to begin anew");
}

// --- changing ------------------------------------------------------------------------------------

std::string RunDirectory::temporary(int64_t step, std::string_view id) const {
  const auto is_plain = [](char c) {
    return ('a' <= c && c <= 'z') || ('A' <= c && c <= 'Z') || ('0' <= c && c <= '9') || c == '-' ||
           c == '_';
  };
  FSDP_CHECK(!id.empty() && std::all_of(id.begin(), id.end(), is_plain) && id != kRemovedId,
             "the id of the run is '", id, "': use letters, digits, '-' and '_', and not '",
             kRemovedId, "'");
  return in(path_, concat(".", checkpoint_name(step), ".", id, kTemporarySuffix));
}

// Crash instants, and what is found afterwards:
//   before 2: the old checkpoint; the new one is a temporary
//   before 4: the old checkpoint, of this step under its second name
//   before 5: the new checkpoint; the second name of the old one is ignored. In place of a hidden
//   one
//             the old checkpoint until `latest` is written
void RunDirectory::publish(int64_t step, std::string_view id) const {
  const std::string from = temporary(step, id);
  const std::string name = checkpoint_name(step);
  const std::string to = in(path_, name);
  const std::string replaced_name = concat(name, kReplacedSuffix);
  FSDP_ASSERT(is_complete(from), from, " has no ", kManifestName);
  // 1. Make all names inside durable.
  sync_tree(from);
  // An old one that is not the latest is of steps that the run went back from: `latest` must not
  // name this step before the new one is there. Else it must, or a crash would hide the new one.
  const bool replaces_hidden =
      latest() != step && (path_exists(to) || path_exists(in(path_, replaced_name)));
  // 2. Set the old one aside. Without an old one, one set aside by a crash stays until 5.
  if (path_exists(to)) {
    if (is_complete(to)) {
      remove_checkpoint(path_, replaced_name);
      rename_durably(to, in(path_, replaced_name));
    } else {
      remove_checkpoint(path_, name);  // made by others; the one aside may be the only one
    }
  }
  // 3. Let `latest` name the new one, which is not there yet: until then the older ones count.
  const auto write_latest = [&] { write_file_durably(in(path_, kLatestName), concat(name, "\n")); };
  if (!replaces_hidden) write_latest();
  // 4. Put the new one in its place.
  rename_durably(from, to);
  if (replaces_hidden) write_latest();
  // 5. Remove the old one.
  remove_checkpoint(path_, replaced_name);
}

void RunDirectory::remove_temporaries() const {
  for (const std::string& name : names_in(path_)) {
    if (is_temporary(name)) remove_tree(in(path_, name));
    const bool is_aside = name.ends_with(kReplacedSuffix) && visible_step_of(name).has_value();
    if (is_aside && is_complete(in(path_, checkpoint_name(*visible_step_of(name)))))
      remove_checkpoint(path_, name);
  }
}

void RunDirectory::remove_old(const Retention& retention, std::span<const int64_t> in_use) const {
  validate(retention);
  const std::optional<int64_t> newest = latest();
  if (retention.keep_last == 0 || !newest.has_value()) return;
  std::vector<int64_t> old = steps();
  old.erase(std::upper_bound(old.begin(), old.end(), *newest), old.end());
  // The latest is the last one in the list, hence always kept.
  const auto num_kept = std::min(retention.keep_last, static_cast<int64_t>(old.size()));
  old.resize(old.size() - static_cast<size_t>(num_kept));
  for (const int64_t step : old) {
    const bool stays_for_ever = retention.keep_every > 0 && step % retention.keep_every == 0;
    const bool is_used = std::find(in_use.begin(), in_use.end(), step) != in_use.end();
    if (stays_for_ever || is_used) continue;
    // In this order: without its first name, the one set aside would count again.
    remove_checkpoint(path_, concat(checkpoint_name(step), kReplacedSuffix));
    remove_checkpoint(path_, checkpoint_name(step));
  }
}

// --- what a user means ---------------------------------------------------------------------------

std::string resolve_checkpoint(const std::string& path) {
  const RunDirectory run(path);
  if (is_complete(run.path())) return run.path();
  const std::vector<int64_t> found = run.undamaged_first();
  if (!found.empty()) return run.path_of(found.front());
  // A checkpoint that a crash left set aside while it was being replaced.
  const std::string aside = concat(run.path(), kReplacedSuffix);
  if (step_of(file_name_of(run.path())).has_value() && is_complete(aside)) return aside;
  FSDP_CHECK(path_exists(path), path, ": there is no such directory: give a checkpoint, or the ",
             "directory of a run");
  throw Error(concat(path, ": is neither a checkpoint (it has no ", kManifestName,
                     ") nor the directory of a run (it has no complete checkpoint, such as ",
                     checkpoint_name(100), "): give one of the two"));
}

std::string checkpoint_or_files(const std::string& path) {
  FSDP_CHECK(
      !path_exists(path) || is_directory(path) || path.ends_with(".safetensors"), path,
      ": is a file, but neither a checkpoint nor a safetensors file; give the directory of a "
      "run or of a checkpoint, or such files");
  const RunDirectory run(path);
  // A missing one may have been set aside by a crash.
  const bool is_ours = !path_exists(path) || is_complete(run.path()) ||
                       path_exists(in(run.path(), kLatestName)) || !run.steps().empty();
  return is_ours ? resolve_checkpoint(path) : path;
}

// --- a directory that appears complete or not at all ---------------------------------------------

namespace {

// A path that has a name and a parent.
std::string normal_path(std::string path) {
  path = without_slashes_at_end(std::move(path));
  const std::string name = file_name_of(path);
  if (path.empty() || name.empty() || name == "." || name == "..")
    throw UsageError(
        concat("the directory to write is '", path, "'; give one with a name of its own"));
  return path;
}

bool is_ours_to_replace(const std::string& directory) {
  if (!is_directory(directory)) return false;
  const std::vector<std::string> names = names_in(directory);
  return names.empty() || std::any_of(names.begin(), names.end(), [](const std::string& name) {
           return name == kManifestName || name.ends_with(".safetensors");
         });
}

// True for a link to nothing, too.
bool is_anything_at(const std::string& path) {
  struct stat status {};
  return ::lstat(path.c_str(), &status) == 0;
}

}  // namespace

StagedDirectory::StagedDirectory(const std::string& target, Existing existing)
    : target_(normal_path(target)), existing_(existing), path_(beside(".tmp")) {
  check_target();
  make_directories(path_);
  lock_ = lock_directory(path_);
  FSDP_CHECK(lock_.is_open(), target_,
             " is being written by another process; wait for it, or choose another name");
  // Removes what a crash left.
  for (const std::string& name : names_in(path_)) remove_tree(concat(path_, "/", name));
}

StagedDirectory::~StagedDirectory() {
  if (!lock_.is_open()) return;
  try {
    remove_tree(path_);
  } catch (const std::exception& error) {
    log(LogLevel::kWarning, error.what());
  }
}

std::string StagedDirectory::beside(const char* suffix) const {
  return concat(directory_of(target_), "/.", file_name_of(target_), suffix);
}

void StagedDirectory::check_target() const {
  if (!is_anything_at(target_)) return;
  FSDP_CHECK(existing_ == Existing::kReplace, target_,
             " is there already; choose another name, or allow to overwrite it (--overwrite)");
  FSDP_CHECK(is_ours_to_replace(target_), target_,
             " is neither a checkpoint nor a directory with safetensors files, so it is not "
             "overwritten; choose another name");
}

void StagedDirectory::publish() {
  sync_tree(path_);
  check_target();  // another process may have been faster
  const std::string aside = beside(".replaced");
  const bool replaces = path_exists(target_);
  if (replaces) {
    remove_tree(aside);
    rename_durably(target_, aside);
  }
  try {
    rename_durably(path_, target_);
  } catch (...) {
    if (replaces && !path_exists(target_)) rename_durably(aside, target_);
    throw;
  }
  const FileHandle done(lock_.release());
  if (replaces) remove_tree(aside);
}

}  // namespace fsdp
