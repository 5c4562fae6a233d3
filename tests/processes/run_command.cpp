#include "processes/run_command.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <wordexp.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <vector>

#include "fsdp/cli/command.h"

namespace fsdp::test {

namespace {

std::vector<std::string> shell_words(const std::string& line) {
  wordexp_t found{};
  if (::wordexp(line.c_str(), &found, WRDE_NOCMD | WRDE_UNDEF) != 0)
    throw std::runtime_error("these are no shell words: " + line);
  std::vector<std::string> words(found.we_wordv, found.we_wordv + found.we_wordc);
  ::wordfree(&found);
  return words;
}

void change_environment(const std::vector<std::string>& words) {
  for (size_t i = 0; i < words.size(); ++i) {
    const size_t equals = words[i].find('=');
    if (words[i] == "-u") {
      ::unsetenv(words.at(++i).c_str());
    } else {
      ::setenv(words[i].substr(0, equals).c_str(), words[i].substr(equals + 1).c_str(), 1);
    }
  }
}

int run_words(std::vector<std::string> words) {
  words.insert(words.begin(), "fsdp");
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  return cli::run(static_cast<int>(words.size()), argv.data());
}

// A file in memory that takes what a process writes.
class Output {
 public:
  Output() : descriptor_(::memfd_create("output", 0)) {
    if (descriptor_ < 0) throw std::runtime_error("no file in memory");
  }
  ~Output() { ::close(descriptor_); }
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;

  void replace(int standard_descriptor) const { ::dup2(descriptor_, standard_descriptor); }

  std::string text() const {
    std::string text(static_cast<size_t>(::lseek(descriptor_, 0, SEEK_END)), '\0');
    if (::pread(descriptor_, text.data(), text.size(), 0) != static_cast<ssize_t>(text.size()))
      throw std::runtime_error("a command's output cannot be read");
    return text;
  }

 private:
  int descriptor_;
};

// `action` in a copy of this process, which ends with the code that it returns.
CommandResult run_in_copy(const std::function<int()>& action) {
  const Output out;
  const Output err;
  std::fflush(nullptr);  // else the copy would write what is still in the buffers, too
  const pid_t copy = ::fork();
  if (copy < 0) throw std::runtime_error("no further process");
  if (copy == 0) {
    out.replace(STDOUT_FILENO);
    err.replace(STDERR_FILENO);
    const int code = action();
    std::fflush(nullptr);
    ::_exit(code);
  }
  int status = 0;
  ::waitpid(copy, &status, 0);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status), out.text(), err.text()};
}

}  // namespace

CommandResult run_fsdp(const std::string& arguments, const std::string& environment) {
  const std::vector<std::string> words = shell_words(arguments);
  const std::vector<std::string> variables = shell_words(environment);
  return run_in_copy([&] {
    change_environment(variables);
    return run_words(words);
  });
}

CommandResult run_fsdp_in(const std::string& directory, const std::vector<std::string>& words,
                          const std::vector<std::string>& environment) {
  return run_in_copy([&] {
    if (std::freopen("/dev/null", "r", stdin) == nullptr)
      throw std::runtime_error("/dev/null cannot be read");
    if (::chdir(directory.c_str()) != 0) throw std::runtime_error("no directory " + directory);
    ::clearenv();
    change_environment(environment);
    return run_words(words);
  });
}

CommandResult start_fsdp(const std::string& arguments) {
  return run_in_copy([&] {
    const std::string line = "exec '" FSDP_BINARY "' " + arguments;
    return ::execl("/bin/sh", "sh", "-c", line.c_str(), nullptr);
  });
}

}  // namespace fsdp::test
