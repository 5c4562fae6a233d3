// Files that survive: what is written is read back, and every failure is a sentence.
#include "fsdp/base/durable_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <stdexcept>
#include <thread>
#include <vector>

#include "fsdp/base/error.h"
#include "support/file_size_limit.h"
#include "support/temp_dir.h"

namespace fsdp::durable_file_test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;
using ::testing::ThrowsMessage;

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

void write_whole(const std::string& path, std::string_view text) {
  FileWriter writer(path);
  writer.write(bytes_of(text));
  writer.commit();
}

// One sentence: the path, the attempt, and the reason.
template <typename... Words>
auto fails_with(const std::string& path, const Words&... words) {
  return ThrowsMessage<Error>(AllOf(StartsWith(path + ": cannot "), HasSubstr(words)...));
}

// --- writing and reading -------------------------------------------------------------------------

TEST(FileWriter, WritesInOrderWhatIsReadBackAtAnyOffset) {
  const testing::TempDir dir;
  FileWriter writer(dir / "data");
  writer.write(bytes_of("one "));
  writer.write({});
  writer.write(bytes_of("two "));
  EXPECT_EQ(writer.bytes(), 8);
  writer.write(bytes_of("three"));
  writer.commit();
  EXPECT_EQ(writer.bytes(), 13);

  const FileReader reader(dir / "data");
  EXPECT_EQ(reader.bytes(), 13);
  std::string text(3, ' ');
  reader.read(4, std::as_writable_bytes(std::span(text)));
  EXPECT_EQ(text, "two");
  reader.read(13, {});
  EXPECT_EQ(read_text_file(dir / "data", 13), "one two three");
  EXPECT_THAT([&] { read_text_file(dir / "data", 12); },
              ThrowsMessage<Error>(AllOf(StartsWith(dir / "data"), HasSubstr("13 bytes"),
                                         HasSubstr("more than the 12"))));
  write_whole(dir / "data", "short");  // a file that is there is emptied
  EXPECT_EQ(read_text_file(dir / "data", 100), "short");
}

// More than one piece of early writeback.
TEST(FileWriter, WritesFilesOfManyMegabytes) {
  const testing::TempDir dir;
  std::vector<std::byte> piece(3 << 20);
  constexpr int64_t kPieces = 12;
  FileWriter writer(dir / "large");
  for (int64_t i = 0; i < kPieces; ++i) {
    std::fill(piece.begin(), piece.end(), static_cast<std::byte>(i));
    writer.write(piece);
  }
  writer.commit();
  const FileReader reader(dir / "large");
  ASSERT_EQ(reader.bytes(), kPieces * (3 << 20));
  for (int64_t i = 0; i < kPieces; ++i) {
    reader.read(i * (3 << 20), piece);
    EXPECT_EQ(std::count(piece.begin(), piece.end(), static_cast<std::byte>(i)), 3 << 20) << i;
  }
}

TEST(FileWriter, RemovesWhatIsNotFinished) {
  const testing::TempDir dir;
  try {
    FileWriter writer(dir / "data");
    writer.write(bytes_of("half"));
    EXPECT_THAT(names_in(dir.path()), ElementsAre("data"));
    throw std::runtime_error("elsewhere");
  } catch (const std::runtime_error&) {
  }
  EXPECT_THAT(names_in(dir.path()), IsEmpty());
}

TEST(FileReader, SaysHowLongAFileIsThatEndsEarly) {
  const testing::TempDir dir;
  write_whole(dir / "data", "0123456789");
  const FileReader reader(dir / "data");
  std::vector<std::byte> into(8);
  EXPECT_THAT([&] { reader.read(4, into); },
              ThrowsMessage<Error>(AllOf(StartsWith(dir / "data"), HasSubstr("has 10 bytes"),
                                         HasSubstr("12 were expected"))));
  EXPECT_THROW(reader.read(100, into), Error);
  // Cut after it was opened.
  fs::resize_file(dir / "data", 5);
  EXPECT_EQ(reader.bytes(), 10);
  EXPECT_THAT([&] { reader.read(0, into); }, ThrowsMessage<Error>(HasSubstr("has 5 bytes")));
}

TEST(FileReader, RefusesWhatIsNoFile) {
  const testing::TempDir dir;
  EXPECT_THAT([&] { FileReader(dir / "nothing"); },
              fails_with(dir / "nothing", "open the file", "No such file", "check the path"));
  EXPECT_THAT([&] { FileReader(dir.path()); },
              ThrowsMessage<Error>(AllOf(StartsWith(dir.path()), HasSubstr("a directory"))));
  // At once, though nobody writes to it.
  ASSERT_EQ(::mkfifo((dir / "pipe").c_str(), 0600), 0);
  EXPECT_THAT([&] { FileReader(dir / "pipe"); },
              ThrowsMessage<Error>(HasSubstr("pipe: cannot be read: it is not a file but a device "
                                             "or a pipe; write what comes from it to a file")));
}

// --- what can go wrong ---------------------------------------------------------------------------

TEST(FileWriter, SaysThatTheDiskIsFull) {
  const testing::TempDir dir;
  fs::create_symlink("/dev/full", dir / "full");
  EXPECT_THAT([&] { FileWriter(dir / "full").write(bytes_of("x")); },
              fails_with(dir / "full", "No space left", "free some space", "another directory"));
  EXPECT_TRUE(fs::exists("/dev/full"));
}

// A disk may fill up in the middle of a write: a part of it fits.
TEST(FileWriter, SaysWhereAWriteEndedEarlyAndRemovesThatFile) {
  const testing::TempDir dir;
  const testing::FileSizeLimit limit(1000);
  EXPECT_THAT(
      [&] {
        FileWriter writer(dir / "data");
        writer.write(std::vector<std::byte>(600));
        writer.write(std::vector<std::byte>(600));
      },
      fails_with(dir / "data", "first 1000 bytes", "File too large", "ulimit -f"));
  EXPECT_THAT(names_in(dir.path()), IsEmpty());
}

// Not by permissions, which the superuser does not have to obey.
TEST(FileWriter, SaysWhyAFileCannotBeCreated) {
  const testing::TempDir dir;
  write_whole(dir / "file", "");
  EXPECT_THAT([&] { FileWriter(dir / "file/data"); },
              fails_with(dir / "file/data", "create the file", "Not a directory", "is a file"));
  EXPECT_THAT([&] { FileWriter(dir / "gone/data"); },
              fails_with(dir / "gone/data", "No such file or directory", "was removed"));
  EXPECT_THAT([&] { FileWriter("/proc/data"); }, fails_with("/proc/data", "create the file"));
}

// --- replacing -----------------------------------------------------------------------------------

TEST(WriteFileDurably, CreatesAndReplacesAndLeavesNothingElse) {
  const testing::TempDir dir;
  write_file_durably(dir / "latest", "old");
  EXPECT_EQ(read_text_file(dir / "latest", 100), "old");
  write_file_durably(dir / "latest", "something new");
  EXPECT_EQ(read_text_file(dir / "latest", 100), "something new");
  EXPECT_THAT(names_in(dir.path()), ElementsAre("latest"));
}

TEST(WriteFileDurably, KeepsTheOldTextWhenTheDiskIsFull) {
  const testing::TempDir dir;
  write_file_durably(dir / "latest", "old");
  const testing::FileSizeLimit limit(1000);
  EXPECT_THROW(write_file_durably(dir / "latest", std::string(2000, 'x')), Error);
  EXPECT_EQ(read_text_file(dir / "latest", 100), "old");
  EXPECT_THAT(names_in(dir.path()), ElementsAre("latest"));
}

TEST(WriteFileDurably, LeavesNothingWhereTheFileCannotBeReplaced) {
  const testing::TempDir dir;
  fs::create_directories(dir / "latest/full");
  EXPECT_THROW(write_file_durably(dir / "latest", "text"), Error);
  EXPECT_THAT(names_in(dir.path()), ElementsAre("latest"));
  fs::create_directory(dir / "sub");
  fs::remove(dir / "sub");
  EXPECT_THAT([&] { write_file_durably(dir / "sub/latest", "text"); },
              ThrowsMessage<Error>(HasSubstr("No such file or directory")));
}

TEST(WriteFileDurably, ReadersNeverSeeAMix) {
  const testing::TempDir dir;
  // The lengths differ, and are longer than what a kernel writes at once.
  const std::vector<std::string> texts = {std::string(20'000, 'a'), std::string(30'000, 'b')};
  write_file_durably(dir / "text", texts[0]);
  std::atomic<bool> done = false;
  std::thread writer([&] {
    for (size_t i = 0; i < 100; ++i) write_file_durably(dir / "text", texts[i % 2]);
    done = true;
  });
  while (!done) {
    const std::string text = read_text_file(dir / "text", 100'000);
    EXPECT_TRUE(text == texts[0] || text == texts[1]) << text.size();
  }
  writer.join();
}

TEST(WriteFileDurably, WritersAtTheSameTimeDoNotMixTheirTexts) {
  const testing::TempDir dir;
  std::vector<std::thread> writers;
  for (const char letter : {'a', 'b', 'c', 'd'}) {
    writers.emplace_back([&dir, letter] {
      for (int i = 0; i < 10; ++i) write_file_durably(dir / "text", std::string(5000, letter));
    });
  }
  for (std::thread& writer : writers) writer.join();
  const std::string text = read_text_file(dir / "text", 10'000);
  EXPECT_EQ(text, std::string(5000, text.at(0)));
  EXPECT_THAT(names_in(dir.path()), ElementsAre("text"));
}

// --- directories ---------------------------------------------------------------------------------

TEST(MakeDirectories, CreatesAllOfAPathAndAcceptsWhatIsThere) {
  const testing::TempDir dir;
  make_directories(dir / "a/b/c/");
  make_directories(dir / "a/b/c");
  EXPECT_TRUE(fs::is_directory(dir / "a/b/c"));
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 4; ++rank)
    ranks.emplace_back([&dir] { make_directories(dir / "x/y/z"); });
  for (std::thread& rank : ranks) rank.join();
  EXPECT_TRUE(fs::is_directory(dir / "x/y/z"));
}

TEST(MakeDirectories, SaysWhatIsInTheWay) {
  const testing::TempDir dir;
  write_whole(dir / "file", "");
  fs::create_symlink("nowhere", dir / "link");
  EXPECT_THAT([&] { make_directories(dir / "file"); },
              fails_with(dir / "file", "there is a file of that name"));
  EXPECT_THAT([&] { make_directories(dir / "link"); }, fails_with(dir / "link"));
  EXPECT_THAT([&] { make_directories(dir / "file/a/b"); },
              fails_with(dir / "file/a/b", "Not a directory"));
  EXPECT_THAT([&] { make_directories("/proc/a/b"); }, fails_with("/proc/a", "create"));
  EXPECT_THROW(make_directories(""), Error);
}

TEST(RenameDurably, MovesDirectoriesButOntoNoneThatIsFull) {
  const testing::TempDir dir;
  make_directories(dir / "a/sub");
  make_directories(dir / "other");
  rename_durably(dir / "a", dir / "other/b");
  EXPECT_THAT(names_in(dir / "other"), ElementsAre("b"));
  make_directories(dir / "c");
  EXPECT_THAT([&] { rename_durably(dir / "c", dir / "other/b"); },
              fails_with(dir / "c", "rename it to " + dir / "other/b", "not empty"));
  EXPECT_THAT([&] { rename_durably(dir / "gone", dir / "d"); },
              fails_with(dir / "gone", "No such file or directory"));
}

TEST(SyncDirectory, SaysThatItIsNoneOrGone) {
  const testing::TempDir dir;
  write_whole(dir / "file", "");
  EXPECT_NO_THROW(sync_directory(dir.path()));
  EXPECT_THAT([&] { sync_directory(dir / "file"); },
              fails_with(dir / "file", "open the directory", "Not a directory"));
  EXPECT_THAT([&] { sync_directory(dir / "gone"); }, fails_with(dir / "gone", "No such file"));
}

TEST(RemoveTree, RemovesAllOfItAndAcceptsNothing) {
  const testing::TempDir dir;
  make_directories(dir / "a/b");
  write_whole(dir / "a/b/file", "x");
  fs::create_directory_symlink(dir.path(), dir / "a/link");  // itself, not what it leads to
  remove_tree(dir / "a");
  EXPECT_TRUE(fs::exists(dir.path()));
  EXPECT_THAT(names_in(dir.path()), IsEmpty());
  EXPECT_NO_THROW(remove_tree(dir / "a"));
}

TEST(PathExists, TellsNothingFromSomething) {
  const testing::TempDir dir;
  write_whole(dir / "file", "");
  EXPECT_TRUE(path_exists(dir.path()));
  EXPECT_TRUE(path_exists(dir / "file"));
  EXPECT_FALSE(path_exists(dir / "nothing"));
  EXPECT_FALSE(path_exists(dir / "file/below"));
  EXPECT_THAT([&] { path_exists(dir / std::string(5000, 'x')); },
              ThrowsMessage<Error>(HasSubstr("cannot look for it")));
}

}  // namespace
}  // namespace fsdp::durable_file_test
