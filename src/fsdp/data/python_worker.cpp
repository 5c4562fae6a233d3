#include "fsdp/data/python_worker.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/env.h"
#include "fsdp/base/text.h"
#include "fsdp/data/python_worker_script.h"

extern char** environ;

namespace fsdp {
namespace {

constexpr int kAnswerSeconds = 600;
// No answer to the pieces of text that are sent is longer.
constexpr uint64_t kMaxAnswerBytes = uint64_t{1} << 32;

// Where Python may be, in order of precedence.
std::vector<std::string> possible_pythons() {
  if (const std::optional<std::string> given = env_text("FSDP_PYTHON")) return {*given};
  std::vector<std::string> found;
  const auto take = [&](const std::string& directory) {
    const std::string python = concat(directory, "/.venv/bin/python");
    if (path_exists(python)) found.push_back(python);
  };
  take(".");
  std::array<char, 4096> program;
  const ssize_t length = ::readlink("/proc/self/exe", program.data(), program.size());
  std::string directory(program.data(), static_cast<size_t>(std::max<ssize_t>(length, 0)));
  while (directory.size() > 1) {
    directory = directory_of(directory);
    if (directory == ".") break;  // no absolute path
    take(directory);
  }
  found.emplace_back("python3");
  return found;
}

// The arguments and settings of a process that is to be started.
class SpawnSettings {
 public:
  explicit SpawnSettings(int socket) {
    ::posix_spawn_file_actions_init(&actions_);
    ::posix_spawn_file_actions_adddup2(&actions_, socket, STDIN_FILENO);
    ::posix_spawn_file_actions_adddup2(&actions_, socket, STDOUT_FILENO);
    // Packages warn there of what no user of fsdp can change.
    ::posix_spawn_file_actions_addopen(&actions_, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
    ::posix_spawnattr_init(&attributes_);
    // A thread may have blocked signals, or ignore some; Python inherits neither.
    sigset_t none;
    sigset_t all;
    ::sigemptyset(&none);
    ::sigfillset(&all);
    ::posix_spawnattr_setsigmask(&attributes_, &none);
    ::posix_spawnattr_setsigdefault(&attributes_, &all);
    ::posix_spawnattr_setflags(&attributes_, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  }
  ~SpawnSettings() {
    ::posix_spawn_file_actions_destroy(&actions_);
    ::posix_spawnattr_destroy(&attributes_);
  }
  SpawnSettings(const SpawnSettings&) = delete;
  SpawnSettings& operator=(const SpawnSettings&) = delete;

  // 0, or the number of an error. posix_spawn and not fork: other threads may hold locks.
  int spawn(pid_t& process, std::vector<std::string> words) const {
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    return ::posix_spawnp(&process, arguments[0], &actions_, &attributes_, arguments.data(),
                          environ);
  }

 private:
  posix_spawn_file_actions_t actions_;
  posix_spawnattr_t attributes_;
};

// After a call on a socket with a time limit failed.
bool is_late() { return errno == EAGAIN || errno == EWOULDBLOCK; }

std::string ending_text(int status) {
  if (WIFSIGNALED(status))
    return concat("was ended by signal ", WTERMSIG(status),
                  WTERMSIG(status) == SIGKILL ? " (out of memory, perhaps)" : "");
  return concat("ended with exit code ", WEXITSTATUS(status));
}

}  // namespace

PythonWorker::PythonWorker(const std::string& module, const std::string& purpose) {
  std::vector<std::string> reasons;
  for (const std::string& python : possible_pythons()) {
    const std::string reason = start(python, module);
    if (reason.empty()) return;
    stop();
    reasons.push_back(concat(python, " ", reason));
  }
  throw Error(concat(purpose, " needs the Python package ", module, ", which was not found (",
                     join(reasons, "; "), "); install it, e.g. python3 -m pip install ", module,
                     ", or name a Python that has it with FSDP_PYTHON"));
}

PythonWorker::~PythonWorker() { stop(); }

std::string PythonWorker::start(const std::string& python, const std::string& module) {
  int ends[2];
  FSDP_CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0,
             "no socket for a Python process: ", std::generic_category().message(errno),
             "; allow more open files (ulimit -n)");
  socket_ = FileHandle(ends[0]);
  const timeval limit{.tv_sec = kAnswerSeconds, .tv_usec = 0};
  for (const int option : {SO_RCVTIMEO, SO_SNDTIMEO})
    ::setsockopt(socket_.descriptor(), SOL_SOCKET, option, &limit, sizeof limit);
  FileHandle theirs(ends[1]);
  python_ = python;
  const std::string script = kPythonWorkerScript;
  const int error = SpawnSettings(theirs.descriptor())
                        .spawn(process_, {python, "-c",
                                          "import sys; "
                                          "exec(sys.stdin.buffer.read(int(sys.argv[1])))",
                                          concat(script.size()), "worker of fsdp"});
  theirs = FileHandle();  // or the end of the process would not end what is read
  if (error != 0) {
    process_ = -1;
    return concat("cannot be started: ", std::generic_category().message(error));
  }
  try {
    send(script);
    const Message answer = exchange({{"action", "start"}, {"module", module}}, {});
    const auto missing = answer.head.find("missing");
    return missing == answer.head.end() ? "" : "says: " + missing->get<std::string>();
  } catch (const Error&) {
    return "does not run";  // no Python, or one that is too old
  }
}

// Its status if it ends within a second.
std::optional<int> PythonWorker::reap() const {
  for (int i = 0; i < 100 && process_ >= 0; ++i) {
    int status = 0;
    const pid_t ended = ::waitpid(process_, &status, WNOHANG);
    if (ended != 0) process_ = -1;
    if (ended > 0) return status;
    if (ended == 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return std::nullopt;
}

void PythonWorker::stop() {
  socket_ = FileHandle();  // the end of its input ends it
  static_cast<void>(reap());
  if (process_ < 0) return;
  ::kill(process_, SIGKILL);
  ::waitpid(process_, nullptr, 0);
  process_ = -1;
}

PythonWorker::Message PythonWorker::ask(const nlohmann::json& head,
                                        std::string_view payload) const {
  const std::lock_guard lock(mutex_);
  Message answer = exchange(head, payload);
  const auto error = answer.head.find("error");
  if (error == answer.head.end()) return answer;
  const nlohmann::json document = answer.head.value("document", nlohmann::json());
  throw WorkerError(error->get<std::string>(),
                    document.is_number_integer() ? document.get<int64_t>() : -1);
}

void PythonWorker::tell(const nlohmann::json& head, std::string_view payload) const {
  const std::lock_guard lock(mutex_);
  send_frame(head, payload);
}

void PythonWorker::send_frame(const nlohmann::json& head, std::string_view payload) const {
  const std::string text = head.dump();
  const std::array<uint64_t, 2> lengths = {text.size(), payload.size()};
  std::string frame(sizeof lengths, '\0');
  std::memcpy(frame.data(), lengths.data(), sizeof lengths);
  send(frame + text);
  send(payload);
}

PythonWorker::Message PythonWorker::exchange(const nlohmann::json& head,
                                             std::string_view payload) const {
  send_frame(head, payload);
  std::array<uint64_t, 2> theirs{};
  receive(reinterpret_cast<char*>(theirs.data()), sizeof theirs);
  if (theirs[0] > kMaxAnswerBytes || theirs[1] > kMaxAnswerBytes)
    fail("gave an answer that is none");
  std::string answer(theirs[0], '\0');
  receive(answer.data(), answer.size());
  Message message{.head = nlohmann::json::parse(answer, nullptr, false),
                  .payload = std::string(theirs[1], '\0')};
  receive(message.payload.data(), message.payload.size());
  if (!message.head.is_object()) fail("gave an answer that is none");
  return message;
}

void PythonWorker::send(std::string_view bytes) const {
  while (!bytes.empty()) {
    // No SIGPIPE, which would end this process without a word.
    const ssize_t sent = ::send(socket_.descriptor(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && is_late()) fail(concat("did not read within ", kAnswerSeconds, " s"));
    if (sent < 0) fail("closed its end");
    bytes.remove_prefix(static_cast<size_t>(sent));
  }
}

void PythonWorker::receive(char* into, size_t count) const {
  while (count > 0) {
    const ssize_t received = ::recv(socket_.descriptor(), into, count, 0);
    if (received < 0 && errno == EINTR) continue;
    if (received < 0 && is_late()) fail(concat("did not answer within ", kAnswerSeconds, " s"));
    if (received <= 0) fail("closed its end");
    into += received;
    count -= static_cast<size_t>(received);
  }
}

void PythonWorker::fail(const std::string& what) const {
  const std::optional<int> status = reap();  // one that has closed its end is about to end
  throw Error(concat("the Python process of ", python_, " ", status ? ending_text(*status) : what,
                     "; run it again, with more memory if that was short"));
}

}  // namespace fsdp
