#include "fsdp/checkpoint/run_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <string_view>
#include <system_error>
#include <thread>

#include "fsdp/base/error.h"
#include "fsdp/base/log.h"
#include "fsdp/base/shown_text.h"

namespace fsdp {

namespace {

// A process that was killed holds its locks until its memory is freed.
constexpr std::chrono::seconds kPatience{2};
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

// Whoever had the lock may have removed the file since it was opened.
bool is_at(const std::string& path, const FileHandle& file) {
  struct stat mine {};
  struct stat there {};
  return ::fstat(file.descriptor(), &mine) == 0 && ::stat(path.c_str(), &there) == 0 &&
         mine.st_ino == there.st_ino && mine.st_dev == there.st_dev;
}

// Opens and locks. 0, or why it is not locked.
int lock(const std::string& path, FileHandle& file) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
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

}  // namespace

RunLock::RunLock(const std::string& directory) : path_(directory + "/lock") {
  FileHandle file;
  const int reason = lock(path_, file);
  const std::string before = text_in(file);
  FSDP_CHECK(reason != EWOULDBLOCK, directory, ": another run saves its checkpoints here",
             before.empty() ? "" : concat(" (", shown(before), ")"),
             "; stop that one, or give this one another directory (--checkpoint-dir)");
  if (reason != 0) {
    log(LogLevel::kWarning, directory, ": its file system has no locks (",
        std::generic_category().message(reason), "), so see to it that no other run saves there");
    return;
  }
  // Locks that hosts do not share would not have told.
  const std::string host = host_name();
  if (!before.empty() && !before.ends_with(concat(" on ", host)))
    log(LogLevel::kWarning, directory, ": the run before (", shown(before),
        ") did not end by itself; see to it that it no longer runs");
  const std::string mine = concat("process ", ::getpid(), " on ", host, "\n");
  // Without the text, on a full disk, others are refused in fewer words.
  static_cast<void>(::ftruncate(file.descriptor(), 0) == 0 &&
                    ::pwrite(file.descriptor(), mine.data(), mine.size(), 0) > 0);
  file_ = std::move(file);
}

RunLock::~RunLock() {
  if (file_.is_open() && is_at(path_, file_)) ::unlink(path_.c_str());
}

}  // namespace fsdp
