#include "fsdp/train/log/append_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/log.h"

namespace fsdp::train {

namespace {

constexpr int64_t kCannotBeCut = -1;

// Returns 0 or the error; `rest` keeps the bytes that were not written.
int write_all(int descriptor, std::string_view& rest) {
  while (!rest.empty()) {
    const ssize_t written = ::write(descriptor, rest.data(), rest.size());
    if (written >= 0)
      rest.remove_prefix(static_cast<size_t>(written));
    else if (errno != EINTR)
      return errno;
  }
  return 0;
}

}  // namespace

AppendFile::AppendFile(std::string path, const std::string& option) : path_(std::move(path)) {
  make_directories(directory_of(path_));
  constexpr mode_t kMode = 0666;  // narrowed by the user's umask
  // Opening a pipe that nobody reads would wait forever; writing may wait.
  constexpr int kFlags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOCTTY;
  file_ = FileHandle(::open(path_.c_str(), kFlags | O_NONBLOCK, kMode));
  FSDP_CHECK(file_.is_open() && ::fcntl(file_.descriptor(), F_SETFL, O_APPEND) == 0, path_,
             ": cannot be opened for writing: ",
             errno == ENXIO ? "nobody reads from it" : std::generic_category().message(errno),
             "; choose another place with ", option);
  struct stat status {};
  const bool is_file = ::fstat(file_.descriptor(), &status) == 0 && S_ISREG(status.st_mode);
  bytes_ = is_file ? status.st_size : kCannotBeCut;
}

void AppendFile::append(std::string_view record) {
  std::string_view rest = record;
  const int reason = write_all(file_.descriptor(), rest);
  const bool can_be_cut = bytes_ != kCannotBeCut;
  if (reason == 0) {
    if (can_be_cut) bytes_ += static_cast<int64_t>(record.size());
    is_failing_ = false;
    return;
  }
  // The next record must not begin in the middle of this one.
  if (can_be_cut && rest.size() < record.size() && ::ftruncate(file_.descriptor(), bytes_) != 0)
    bytes_ = kCannotBeCut;
  if (std::exchange(is_failing_, true)) return;
  log(LogLevel::kWarning, path_, ": cannot be written: ", std::generic_category().message(reason),
      "; training goes on without it");
}

}  // namespace fsdp::train
