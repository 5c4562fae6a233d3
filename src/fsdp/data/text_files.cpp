#include "fsdp/data/text_files.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <set>
#include <system_error>
#include <utility>

#include "fsdp/base/durable_file.h"
#include "fsdp/base/error.h"
#include "fsdp/base/text.h"

namespace fsdp {
namespace {

// As git and grep decide it.
bool is_binary(const std::string& path, int64_t file_bytes) {
  constexpr int64_t kLookedAtBytes = 8192;
  std::array<std::byte, kLookedAtBytes> buffer;
  const std::span<std::byte> first =
      std::span(buffer).first(static_cast<size_t>(std::min(file_bytes, kLookedAtBytes)));
  FileReader(path).read(0, first);
  return std::find(first.begin(), first.end(), std::byte{0}) != first.end();
}

// Goes through one directory that was named.
class DirectoryWalk {
 public:
  explicit DirectoryWalk(TextFiles& files) : files_(files) {}

  void enter(const std::string& directory, const struct stat& status) {
    // Links can lead back to a directory above.
    if (!entered_.insert({status.st_dev, status.st_ino}).second) return;
    std::vector<std::string> names = names_in(directory);
    std::sort(names.begin(), names.end());
    for (const std::string& name : names)
      take(directory.ends_with('/') ? directory + name : concat(directory, "/", name), name);
  }

 private:
  void take(const std::string& path, const std::string& name) {
    struct stat status {};
    if (name.starts_with('.')) {
      ++files_.left_out.num_hidden;
    } else if (::stat(path.c_str(), &status) != 0) {
      ++files_.left_out.num_other;
    } else if (S_ISDIR(status.st_mode)) {
      enter(path, status);
    } else if (!S_ISREG(status.st_mode)) {
      ++files_.left_out.num_other;
    } else if (status.st_size == 0) {
      ++files_.left_out.num_empty;
    } else if (is_binary(path, status.st_size)) {
      ++files_.left_out.num_binary;
    } else {
      files_.paths.push_back(path);
      files_.bytes += status.st_size;
    }
  }

  TextFiles& files_;
  std::set<std::pair<dev_t, ino_t>> entered_;
};

TextFiles in_directory(const std::string& path, const struct stat& status) {
  TextFiles files;
  DirectoryWalk(files).enter(path, status);
  FSDP_CHECK(!files.paths.empty(), path, ": no text files in this directory",
             files.left_out.total() == 0 ? std::string()
                                         : concat(" (left out: ", to_text(files.left_out), ")"),
             "; name one with text, or packed token files by their own names");
  std::sort(files.paths.begin(), files.paths.end());
  return files;
}

void append(TextFiles& files, const TextFiles& more) {
  files.paths.insert(files.paths.end(), more.paths.begin(), more.paths.end());
  files.bytes += more.bytes;
  files.left_out += more.left_out;
}

}  // namespace

TextFiles find_text_files(std::span<const std::string> paths) {
  TextFiles files;
  for (const std::string& path : paths) {
    struct stat status {};
    FSDP_CHECK(::stat(path.c_str(), &status) == 0, path,
               ": cannot be read: ", std::generic_category().message(errno), "; check the path");
    if (S_ISDIR(status.st_mode)) {
      append(files, in_directory(path, status));
      continue;
    }
    FSDP_CHECK(S_ISREG(status.st_mode), path, ": is a device or a pipe; name files or directories");
    FSDP_CHECK(status.st_size > 0, path, ": is empty; name a file with text");
    append(files, {.paths = {path}, .bytes = status.st_size});
  }
  return files;
}

LeftOut& LeftOut::operator+=(const LeftOut& more) {
  num_hidden += more.num_hidden;
  num_binary += more.num_binary;
  num_empty += more.num_empty;
  num_other += more.num_other;
  return *this;
}

std::string to_text(const LeftOut& left_out) {
  std::vector<std::string> parts;
  const auto add = [&](int64_t count, const char* kind) {
    if (count > 0) parts.push_back(concat(grouped_text(count), " ", kind));
  };
  add(left_out.num_hidden, "hidden");
  add(left_out.num_binary, "binary");
  add(left_out.num_empty, "empty");
  add(left_out.num_other, "other than files");
  return join(parts, ", ");
}

}  // namespace fsdp
