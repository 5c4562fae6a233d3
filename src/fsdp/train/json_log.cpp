#include "fsdp/train/json_log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <span>
#include <system_error>
#include <utility>
#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/base/log.h"
#include "fsdp/base/text.h"

namespace fsdp::train {

namespace {

constexpr int64_t kNotAFile = -1;

bool is_regular_file(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode);
}

// Calls `use(line, is_whole)` for each line; the last one may lack its line break.
template <typename Use>
void for_each_line(const std::string& path, const Use& use) {
  constexpr int64_t kPieceBytes = int64_t{1} << 20;
  const FileReader reader(path);
  std::string pending;
  std::vector<std::byte> piece;
  for (int64_t offset = 0; offset < reader.bytes(); offset += kPieceBytes) {
    piece.resize(static_cast<size_t>(std::min(kPieceBytes, reader.bytes() - offset)));
    reader.read(offset, piece);
    pending.append(reinterpret_cast<const char*>(piece.data()), piece.size());
    size_t begin = 0;
    for (size_t end = pending.find('\n'); end != std::string::npos;
         end = pending.find('\n', begin)) {
      use(std::string_view(pending).substr(begin, end - begin), true);
      begin = end + 1;
    }
    pending.erase(0, begin);
  }
  if (!pending.empty()) use(std::string_view(pending), false);
}

// Of a step that is done again, or no line of a log: an interrupted run leaves such.
bool is_superseded(const std::optional<LogRecord>& record, int64_t resumed_step) {
  return !record || step_of(*record) > resumed_step;
}

// The kept lines beside the old file, then in its place: a crash leaves one of the two.
void rewrite(const std::string& path, int64_t resumed_step) {
  const std::string temporary = concat(path, ".tmp");
  FileWriter writer(temporary);
  std::string kept;
  for_each_line(path, [&](std::string_view line, bool) {
    if (is_superseded(parse_log_line(line), resumed_step)) return;
    kept.assign(line);
    kept += '\n';
    writer.write(std::as_bytes(std::span(kept)));
  });
  writer.finish();
  rename_durably(temporary, path);
}

void resume(const std::string& path, int64_t resumed_step, const LogRecordSink& restored) {
  bool is_intact = true;
  for_each_line(path, [&](std::string_view line, bool is_whole) {
    const std::optional<LogRecord> record = parse_log_line(line);
    const bool is_kept = !is_superseded(record, resumed_step);
    if (is_kept && restored) restored(*record);
    is_intact = is_intact && is_kept && is_whole;
  });
  if (!is_intact) rewrite(path, resumed_step);
}

}  // namespace

JsonLog::JsonLog(std::string path, int64_t resumed_step, const LogRecordSink& restored)
    : path_(std::move(path)) {
  make_directories(directory_of(path_));
  if (is_regular_file(path_)) {
    if (resumed_step > 0)
      resume(path_, resumed_step, restored);
    else
      rename_durably(path_, concat(path_, ".previous"));
  }
  open();
}

void JsonLog::open() {
  constexpr mode_t kMode = 0666;  // narrowed by the user's umask
  file_ = FileHandle(
      ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOCTTY, kMode));
  FSDP_CHECK(file_.is_open(), path_,
             ": cannot open the log: ", std::generic_category().message(errno),
             "; choose another file with --log");
  struct stat status {};
  const bool is_file = ::fstat(file_.descriptor(), &status) == 0 && S_ISREG(status.st_mode);
  bytes_ = is_file ? status.st_size : kNotAFile;
}

void JsonLog::write(std::string line) {
  line += '\n';
  std::string_view rest = line;
  int reason = 0;
  while (!rest.empty() && reason == 0) {
    const ssize_t written = ::write(file_.descriptor(), rest.data(), rest.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0)
      reason = errno;
    else
      rest.remove_prefix(static_cast<size_t>(written));
  }
  if (reason == 0) {
    if (bytes_ != kNotAFile) bytes_ += static_cast<int64_t>(line.size());
    is_failing_ = false;
    return;
  }
  // The next line must not begin in the middle of this one.
  if (bytes_ != kNotAFile && rest.size() < line.size() &&
      ::ftruncate(file_.descriptor(), bytes_) != 0)
    bytes_ = kNotAFile;
  if (std::exchange(is_failing_, true)) return;
  log(LogLevel::kWarning, path_,
      ": the log cannot be written: ", std::generic_category().message(reason),
      "; training goes on without it");
}

}  // namespace fsdp::train
