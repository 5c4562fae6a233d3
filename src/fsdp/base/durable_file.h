// File operations that last: what they report as done survives a crash.
//
// Each one fails with an Error of one sentence: the path, what was tried, why it failed, and what
// to do where that is known.
//
// Note [No std::filesystem]: libtorch exports functions of that name from the standard library it
// was built with. A program that links it calls those, and they crash on paths and iterators of
// another version; so nobody here uses it, and tools/check_rooms.py looks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fsdp {

// An open file; closed at the end of its life.
class FileHandle {
 public:
  FileHandle() = default;
  explicit FileHandle(int descriptor) : descriptor_(descriptor) {}
  FileHandle(FileHandle&& other) noexcept : descriptor_(other.release()) {}
  FileHandle& operator=(FileHandle&& other) noexcept;
  ~FileHandle();

  bool is_open() const { return descriptor_ >= 0; }
  int descriptor() const { return descriptor_; }
  int release() { return std::exchange(descriptor_, -1); }

 private:
  int descriptor_ = -1;
};

// Writes a new file from its first byte to its last. One that is not committed, because of an error
// or of another one elsewhere, is removed at the end of the writer's life. For one thread at a
// time.
class FileWriter {
 public:
  // Creates the file; one that is there is emptied.
  explicit FileWriter(std::string path);
  FileWriter(FileWriter&&) = default;
  ~FileWriter();

  void write(std::span<const std::byte> bytes);

  // Replaces bytes that were written: a header that says what came after it.
  void rewrite(int64_t offset, std::span<const std::byte> bytes);

  // Written so far.
  int64_t bytes() const { return bytes_; }

  // Returns when the disk has everything; nothing can be written afterwards. The file's name is in
  // its directory for good only after sync_directory().
  void commit();

 private:
  void start_writeback();

  std::string path_;
  FileHandle file_;  // closed: committed, moved from, or close() failed
  int64_t bytes_ = 0;
  int64_t writeback_bytes_ = 0;  // on their way to the disk
};

// Reads a file that nobody changes. Any number of threads may read at a time.
class FileReader {
 public:
  explicit FileReader(std::string path);

  const std::string& path() const { return path_; }

  // When it was opened.
  int64_t bytes() const { return bytes_; }

  // For what reads in another way, such as mmap().
  int descriptor() const { return file_.descriptor(); }

  // Fills `into` from `offset` on. A file that ends before is an Error that says how long it is.
  void read(int64_t offset, std::span<std::byte> into) const;

 private:
  std::string path_;
  FileHandle file_;
  int64_t bytes_ = 0;
};

// A name beside `path` and hidden, ".NAME.*.tmp", that no other thread or process uses.
std::string temporary_name_for(const std::string& path);

// Replaces the whole file, or creates it. A reader finds the old text or the new, never a mix, even
// after a crash. A crash may leave a hidden file ".NAME.*.tmp" beside it.
void write_file_durably(const std::string& path, std::string_view text);

// The whole file; an Error if it has more than `max_bytes`.
std::string read_text_file(const std::string& path, int64_t max_bytes);

// Makes created, renamed and removed names in the directory survive a crash.
void sync_directory(const std::string& path);

// sync_directory() for the directory and all directories below it.
void sync_tree(const std::string& path);

// The names in a directory, in no order; none where there is no such directory.
std::vector<std::string> names_in(const std::string& directory);

// Creates the directory and the ones above it as needed; existing is fine. Whether it was not
// there.
bool make_directories(const std::string& path);

// Survives a crash when it returns. A file at `to` is replaced, a directory there must be empty.
void rename_durably(const std::string& from, const std::string& to);

// Removes a file, or a directory and all below it; fine if there is none.
void remove_tree(const std::string& path);

// Whether a directory is there, or a link to one.
bool is_directory(const std::string& path);

// Whether a file with an end is there, or a link to one: a pipe may never end, nor may open() of
// it.
bool is_regular_file(const std::string& path);

// "a/b" of "a/b/c", "." of a name alone; and "c".
std::string directory_of(const std::string& path);
std::string file_name_of(const std::string& path);

// The absolute path, links followed; `path` itself where there is nothing.
std::string real_path(const std::string& path);

// False where there is nothing, or a link to nothing. An Error where one cannot tell.
bool path_exists(const std::string& path);

}  // namespace fsdp
