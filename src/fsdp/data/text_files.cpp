#include "fsdp/data/text_files.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <system_error>
#include <utility>

#include "fsdp/base/durable_file.h"
#include "fsdp/base/error.h"
#include "fsdp/base/text.h"
#include "fsdp/data/file_content.h"

namespace fsdp {
namespace {

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
    } else {
      take_text(path, status.st_size);
    }
  }

  void take_text(const std::string& path, int64_t file_bytes) {
    switch (judge_file(path, file_bytes).content) {
      case FileContent::kText:
        files_.paths.push_back(path);
        files_.bytes += file_bytes;
        return;
      case FileContent::kNotUtf8:
        ++files_.left_out.num_not_utf8;
        return;
      case FileContent::kJsonLines:
        ++files_.left_out.num_json_lines;
        return;
      case FileContent::kBinary:
        ++files_.left_out.num_binary;
        return;
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

TextFiles find_text_files(std::span<const std::string> paths, NamedFiles named) {
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
    if (named == NamedFiles::kText) {
      const JudgedFile judged = judge_file(path, status.st_size);
      FSDP_CHECK(judged.content == FileContent::kText, path, ": ", judged.problem,
                 ", or pack its bytes as they are with fsdp data pack --any-bytes");
    }
    append(files, {.paths = {path}, .bytes = status.st_size});
  }
  return files;
}

LeftOut& LeftOut::operator+=(const LeftOut& more) {
  num_hidden += more.num_hidden;
  num_binary += more.num_binary;
  num_not_utf8 += more.num_not_utf8;
  num_json_lines += more.num_json_lines;
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
  add(left_out.num_not_utf8, "not UTF-8");
  add(left_out.num_json_lines, "of JSON lines");
  add(left_out.num_empty, "empty");
  add(left_out.num_other, "other than files");
  return join(parts, ", ");
}

}  // namespace fsdp
