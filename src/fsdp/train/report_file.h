// Keeps the report's file up to date while a run goes on, without being felt.
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace fsdp::train {

// For one thread at a time.
class ReportFile {
 public:
  // `now` gives seconds on a clock that only goes forward; nothing: the steady one.
  explicit ReportFile(std::string path, std::function<double()> now = {});

  const std::string& path() const { return path_; }

  // Whether it is time for the next one: not before 5 s have passed, and after so much more time
  // than making and writing the last one took that all of them take a hundredth of the run.
  bool is_due() const;

  // Makes the page and replaces the file by it; whoever opens it finds a whole one. The first time,
  // an Error if it cannot be written; later a warning, once.
  void write(const std::function<std::string()>& page);

 private:
  std::string path_;
  std::function<double()> now_;
  double next_at_ = 0;
  bool was_written_ = false;
  bool is_failing_ = false;
};

}  // namespace fsdp::train
