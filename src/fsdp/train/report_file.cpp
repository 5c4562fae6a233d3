#include "fsdp/train/report_file.h"

#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "fsdp/base/durable_file.h"
#include "fsdp/base/error.h"
#include "fsdp/base/log.h"

namespace fsdp::train {

namespace {

constexpr double kLeastPause = 5;        // in s
constexpr double kPausePerWriting = 99;  // 1 % of the time

double steady_seconds() {
  using Seconds = std::chrono::duration<double>;
  return Seconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

ReportFile::ReportFile(std::string path, std::function<double()> now)
    : path_(std::move(path)), now_(now ? std::move(now) : steady_seconds) {
  make_directories(directory_of(path_));
  // A page replaces the one before: what is no file, such as /dev/null, would be gone.
  struct stat status {};
  FSDP_CHECK(::stat(path_.c_str(), &status) != 0 || S_ISREG(status.st_mode), path_,
             ": is not a file, so no report can replace it; choose another place with --report, or "
             "--report none");
}

bool ReportFile::is_due() const { return now_() >= next_at_; }

void ReportFile::write(const std::function<std::string()>& page) {
  const double begin = now_();
  try {
    write_file_durably(path_, page());
    was_written_ = true;
    is_failing_ = false;
  } catch (const Error& error) {
    if (!was_written_) throw;
    if (!std::exchange(is_failing_, true))
      log(LogLevel::kWarning, "the report cannot be written: ", error.what(),
          "; training goes on without it");
  }
  const double end = now_();
  next_at_ = end + std::max(kLeastPause, kPausePerWriting * (end - begin));
}

}  // namespace fsdp::train
