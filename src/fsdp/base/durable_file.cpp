#include "fsdp/base/durable_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <system_error>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/text.h"

namespace fsdp {
namespace {

// The advice to a person; "" where the reason says it all.
std::string_view fix_for(int reason) {
  switch (reason) {
    case ENOSPC:
    case EDQUOT:
      return ": free some space there, or choose another directory";
    case EFBIG:
      return ": raise the limit for the size of files (ulimit -f), or choose another directory";
    case EROFS:
      return ": choose a directory on a disk that can be written";
    case EACCES:
    case EPERM:
      return ": change its permissions, or choose another directory";
    case ENOENT:
      return ": check the path, and whether its directory was removed or its disk unmounted";
    case ENOTDIR:
      return ": a directory in this path is a file; check the path";
    case EMFILE:
    case ENFILE:
      return ": raise the limit for open files (ulimit -n)";
    case EIO:
      return ": the disk failed, see the kernel's log (dmesg)";
    default:
      return "";
  }
}

[[noreturn]] void fail(const std::string& path, const std::string& tried, int reason) {
  throw Error(concat(path, ": cannot ", tried, ": ", std::generic_category().message(reason),
                     fix_for(reason)));
}

// Repeats a system call that a signal interrupted.
template <typename Call>
auto without_interruption(const Call& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

FileHandle open_file(const std::string& path, int flags, const char* tried) {
  constexpr mode_t kMode = 0666;  // narrowed by the user's umask
  FileHandle file(without_interruption([&] { return ::open(path.c_str(), flags, kMode); }));
  if (!file.is_open()) fail(path, tried, errno);
  return file;
}

void check_regular(const struct stat& status, const std::string& path) {
  FSDP_CHECK(S_ISREG(status.st_mode), path, ": cannot be read: it is not a file but ",
             S_ISDIR(status.st_mode)
                 ? "a directory; name a file in it"
                 : "a device or a pipe; write what comes from it to a file, and name that");
}

int64_t length_of(const FileHandle& file, const std::string& path) {
  struct stat status {};
  if (::fstat(file.descriptor(), &status) != 0) fail(path, "tell its length", errno);
  check_regular(status, path);
  return status.st_size;
}

// Looks at the file's kind before it opens the file: opening a pipe would wait for a writer.
FileHandle open_to_read(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) == 0) check_regular(status, path);
  return open_file(path, O_RDONLY | O_CLOEXEC, "open the file");
}

void sync_file(const FileHandle& file, const std::string& path) {
  if (without_interruption([&] { return ::fsync(file.descriptor()); }) != 0)
    fail(path, "store it on its disk", errno);
}

// The status of what lies at a path; of a link itself, not of the file it leads to.
mode_t kind_at(const std::string& path) {
  struct stat status {};
  return ::lstat(path.c_str(), &status) == 0 ? status.st_mode & S_IFMT : 0;
}

// Closes what fdopendir() gave.
struct CloseDirectory {
  void operator()(DIR* directory) const { ::closedir(directory); }
};
using DirectoryStream = std::unique_ptr<DIR, CloseDirectory>;

// All but "." and "..". 0, or why it stopped.
int read_names(DIR* directory, std::vector<std::string>& names) {
  for (;;) {
    errno = 0;
    const dirent* const entry = ::readdir(directory);
    if (entry == nullptr) return errno;
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
}

// Without following links: a directory that is replaced by a link meanwhile is not gone through.
int remove_at(int parent, const std::string& name) {
  if (::unlinkat(parent, name.c_str(), 0) == 0 || errno == ENOENT) return 0;
  if (errno != EISDIR && errno != EPERM) return errno;
  const int reason = errno;
  const int opened =
      ::openat(parent, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (opened < 0) return errno == ENOTDIR ? reason : errno;
  const DirectoryStream directory(::fdopendir(opened));
  std::vector<std::string> names;
  if (const int failed = read_names(directory.get(), names)) return failed;
  for (const std::string& each : names)
    if (const int failed = remove_at(opened, each)) return failed;
  return ::unlinkat(parent, name.c_str(), AT_REMOVEDIR) == 0 ? 0 : errno;
}

}  // namespace

FileHandle& FileHandle::operator=(FileHandle&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

FileHandle::~FileHandle() {
  if (is_open()) ::close(descriptor_);
}

// --- writing -------------------------------------------------------------------------------------

FileWriter::FileWriter(std::string path)
    : path_(std::move(path)),
      file_(open_file(path_, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, "create the file")) {}

FileWriter::~FileWriter() {
  if (!file_.is_open()) return;
  // The path may name a device, which must not be removed.
  if (kind_at(path_) == S_IFREG) ::unlink(path_.c_str());
}

void FileWriter::write(std::span<const std::byte> bytes) {
  FSDP_ASSERT(file_.is_open(), path_, " is finished");
  while (!bytes.empty()) {
    const ssize_t written = without_interruption(
        [&] { return ::write(file_.descriptor(), bytes.data(), bytes.size()); });
    if (written < 0) fail(path_, concat("write more than its first ", bytes_, " bytes"), errno);
    bytes_ += written;
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
  start_writeback();
}

// Begins to write to the disk early. Left to itself the kernel begins late, and commit() would wait
// for most of the file while the caller has nothing else to do.
void FileWriter::start_writeback() {
  constexpr int64_t kPieceBytes = int64_t{32} << 20;
  const int64_t waiting = bytes_ - writeback_bytes_;
  if (waiting < kPieceBytes) return;
  // Only a hint: commit() writes what is left and reports what failed.
  static_cast<void>(
      ::sync_file_range(file_.descriptor(), writeback_bytes_, waiting, SYNC_FILE_RANGE_WRITE));
  writeback_bytes_ = bytes_;
}

void FileWriter::commit() {
  FSDP_ASSERT(file_.is_open(), path_, " is finished");
  sync_file(file_, path_);
  // Network file systems report the last errors here. The handle is gone even then.
  if (::close(file_.release()) != 0 && errno != EINTR) {
    const int reason = errno;
    ::unlink(path_.c_str());
    fail(path_, "close it", reason);
  }
}

void FileWriter::rewrite(int64_t offset, std::span<const std::byte> bytes) {
  FSDP_ASSERT(file_.is_open() && offset >= 0, path_, " at ", offset);
  FSDP_ASSERT(checked_add(offset, static_cast<int64_t>(bytes.size())) <= bytes_, path_);
  while (!bytes.empty()) {
    const ssize_t written = without_interruption(
        [&] { return ::pwrite(file_.descriptor(), bytes.data(), bytes.size(), offset); });
    if (written < 0) fail(path_, concat("rewrite ", bytes.size(), " bytes at ", offset), errno);
    offset += written;
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
}

std::string temporary_name_for(const std::string& path) {
  std::random_device random;
  char id[17];
  std::snprintf(id, sizeof id, "%08x%08x", random(), random());
  return concat(directory_of(path), "/.", file_name_of(path), ".", id, ".tmp");
}

void write_file_durably(const std::string& path, std::string_view text) {
  const std::string temporary = temporary_name_for(path);
  FileWriter writer(temporary);
  writer.write(std::as_bytes(std::span(text)));
  writer.commit();
  try {
    rename_durably(temporary, path);
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
}

// --- reading -------------------------------------------------------------------------------------

FileReader::FileReader(std::string path)
    : path_(std::move(path)), file_(open_to_read(path_)), bytes_(length_of(file_, path_)) {}

void FileReader::read(int64_t offset, std::span<std::byte> into) const {
  FSDP_ASSERT(offset >= 0, path_, " at ", offset);
  const int64_t end = checked_add(offset, static_cast<int64_t>(into.size()));
  while (!into.empty()) {
    const ssize_t count = without_interruption(
        [&] { return ::pread(file_.descriptor(), into.data(), into.size(), offset); });
    if (count < 0) fail(path_, concat("read ", into.size(), " bytes at ", offset), errno);
    FSDP_CHECK(count > 0, path_, ": has ", length_of(file_, path_), " bytes where ", end,
               " were expected: it was cut short; use another copy");
    offset += count;
    into = into.subspan(static_cast<size_t>(count));
  }
}

std::string read_text_file(const std::string& path, int64_t max_bytes) {
  const FileReader reader(path);
  FSDP_CHECK(reader.bytes() <= max_bytes, path, ": has ", reader.bytes(), " bytes, more than the ",
             max_bytes, " that such a file may have: check the path");
  std::string text(static_cast<size_t>(reader.bytes()), '\0');
  reader.read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

// --- directories ---------------------------------------------------------------------------------

void sync_directory(const std::string& path) {
  const FileHandle directory =
      open_file(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC, "open the directory");
  if (without_interruption([&] { return ::fsync(directory.descriptor()); }) == 0) return;
  // Some network file systems have no such operation on directories, since they need none.
  if (errno != EINVAL && errno != ENOTSUP)
    fail(path, "store the directory's names on its disk", errno);
}

std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names;
  const DirectoryStream stream(::opendir(directory.c_str()));
  int reason = errno;
  if (stream) reason = read_names(stream.get(), names);
  FSDP_CHECK((stream && reason == 0) || reason == ENOENT || reason == ENOTDIR, directory,
             ": cannot list the directory: ", std::strerror(reason));
  return names;
}

void sync_tree(const std::string& path) {
  for (const std::string& name : names_in(path))
    if (is_directory(concat(path, "/", name))) sync_tree(concat(path, "/", name));
  sync_directory(path);
}

bool make_directories(const std::string& path) {
  FSDP_CHECK(!path.empty(), "a directory without a name cannot be created: check the path");
  constexpr mode_t kMode = 0777;  // narrowed by the user's umask
  const auto make = [&] { return ::mkdir(path.c_str(), kMode) == 0 ? 0 : errno; };
  int reason = make();
  if (reason == ENOENT) {
    make_directories(directory_of(path));
    reason = make();
  }
  if (reason == EEXIST) {  // perhaps another rank was faster
    FSDP_CHECK(is_directory(path), path,
               ": cannot create the directory: there is a file of that name; choose another one");
    return false;
  }
  if (reason != 0) fail(path, "create the directory", reason);
  sync_directory(directory_of(path));
  return true;
}

void rename_durably(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) fail(from, concat("rename it to ", to), errno);
  const std::string from_directory = directory_of(from);
  const std::string to_directory = directory_of(to);
  // First where it must not get lost.
  sync_directory(to_directory);
  if (from_directory != to_directory) sync_directory(from_directory);
}

void remove_tree(const std::string& path) {
  if (const int reason = remove_at(AT_FDCWD, path)) fail(path, "remove it", reason);
}

bool is_directory(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

bool is_regular_file(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode);
}

std::string directory_of(const std::string& path) {
  const size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::string file_name_of(const std::string& path) {
  return path.substr(path.find_last_of('/') + 1);
}

std::string real_path(const std::string& path) {
  char* const found = ::realpath(path.c_str(), nullptr);
  if (found == nullptr) return path;
  std::string result = found;
  std::free(found);
  return result;
}

bool path_exists(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) == 0) return true;
  if (errno != ENOENT && errno != ENOTDIR) fail(path, "look for it", errno);
  return false;
}

}  // namespace fsdp
