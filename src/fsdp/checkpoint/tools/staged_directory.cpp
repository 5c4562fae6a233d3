#include "fsdp/checkpoint/tools/staged_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/log.h"
#include "fsdp/checkpoint/run_directory.h"

namespace fsdp {

namespace {

// Removes slashes at the end, so that the path has a name and a parent.
std::string normal_path(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
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
  lock();
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

void StagedDirectory::lock() {
  FileHandle handle(::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  FSDP_CHECK(handle.is_open(), path_,
             ": cannot open the directory: ", std::generic_category().message(errno));
  // A file system without locks goes unlocked.
  const bool is_taken =
      ::flock(handle.descriptor(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  // The holder of the lock may have published the directory since it was opened.
  struct stat mine {};
  struct stat there {};
  const bool is_same = ::fstat(handle.descriptor(), &mine) == 0 &&
                       ::stat(path_.c_str(), &there) == 0 && mine.st_ino == there.st_ino &&
                       mine.st_dev == there.st_dev;
  FSDP_CHECK(!is_taken && is_same, target_,
             " is being written by another process; wait for it, or choose another name");
  lock_ = std::move(handle);
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
