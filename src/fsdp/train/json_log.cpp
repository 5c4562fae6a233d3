#include "fsdp/train/json_log.h"

#include <sys/stat.h>

#include <algorithm>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "fsdp/base/durable_file.h"
#include "fsdp/base/text.h"

namespace fsdp::train {

namespace {

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

// Makes what is there ready to be appended to.
const std::string& prepared(const std::string& path, int64_t resumed_step,
                            const LogRecordSink& restored) {
  if (!is_regular_file(path)) return path;
  if (resumed_step > 0)
    resume(path, resumed_step, restored);
  else
    rename_durably(path, concat(path, ".previous"));
  return path;
}

}  // namespace

JsonLog::JsonLog(const std::string& path, int64_t resumed_step, const LogRecordSink& restored)
    : file_(prepared(path, resumed_step, restored), "--log") {}

void JsonLog::write(std::string line) {
  line += '\n';
  file_.append(line);
}

}  // namespace fsdp::train
