// A Python process that does what only packages of Python can: see python_worker.py.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "fsdp/base/durable_file.h"
#include "fsdp/base/error.h"

namespace fsdp {

// A worker's sentence about what it cannot do, for one document of a request or about all of it
// (-1).
class WorkerError : public Error {
 public:
  WorkerError(const std::string& sentence, int64_t document)
      : Error(sentence), document_(document) {}
  int64_t document() const { return document_; }

 private:
  int64_t document_;
};

// Owns the process: it ends with this object, and by itself if this process ends. Any thread may
// ask; one question is under way at a time. A process that ends early or does not answer in ten
// minutes is an Error, never a wait without end.
class PythonWorker {
 public:
  struct Message {
    nlohmann::json head;
    std::string payload;
  };

  // Starts the first Python that has the module: that of FSDP_PYTHON, or else .venv/bin/python of
  // the working directory and of those above the program, then python3 of PATH. Error that says
  // that `purpose` needs the package.
  PythonWorker(const std::string& module, const std::string& purpose);
  ~PythonWorker();
  PythonWorker(const PythonWorker&) = delete;
  PythonWorker& operator=(const PythonWorker&) = delete;

  // WorkerError if the worker says so.
  Message ask(const nlohmann::json& head, std::string_view payload = {}) const;

  // For actions that have no answer; an Error where the process has ended.
  void tell(const nlohmann::json& head, std::string_view payload) const;

 private:
  // Empty, or why this Python does not do.
  std::string start(const std::string& python, const std::string& module);
  Message exchange(const nlohmann::json& head, std::string_view payload) const;
  void send_frame(const nlohmann::json& head, std::string_view payload) const;
  void send(std::string_view bytes) const;
  void receive(char* into, size_t count) const;
  [[noreturn]] void fail(const std::string& what) const;
  std::optional<int> reap() const;
  void stop();

  mutable std::mutex mutex_;
  std::string python_;
  FileHandle socket_;
  mutable pid_t process_ = -1;  // -1: none, or it has ended
};

}  // namespace fsdp
