#include "fsdp/checkpoint/format/verified_reads.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>

#include "fsdp/base/check.h"
#include "fsdp/base/crc32c.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/start_thread.h"

namespace fsdp {

namespace {

// One read: bytes [begin, end) of a file, and the runs that lie in it, at least in part.
struct Chunk {
  size_t file = 0;
  int64_t begin = 0;
  int64_t end = 0;
  std::vector<size_t> runs;
};

// Runs are sorted. Chunks begin and end with a block and do not overlap, so no byte is read twice.
std::vector<Chunk> chunks_of(std::span<const CheckedFile> files, std::span<const FileRun> runs,
                             int64_t chunk_bytes) {
  std::vector<Chunk> chunks;
  for (const FileRun& run : runs) {
    const CheckedFile& file = files[run.file];
    const int64_t block = std::max<int64_t>(file.block_bytes, 1);
    const int64_t most = round_up(chunk_bytes, block);
    const int64_t end = std::min(round_up(run.offset + run.bytes, block), file.bytes);
    int64_t begin = run.offset / block * block;
    if (!chunks.empty() && chunks.back().file == run.file && begin <= chunks.back().end) {
      Chunk& last = chunks.back();
      last.end = std::max(last.end, std::min(end, last.begin + most));
      begin = last.end;
    }
    for (; begin < end; begin += most)
      chunks.push_back({run.file, begin, std::min(end, begin + most), {}});
  }
  return chunks;
}

void assign_runs(std::span<const FileRun> runs, std::vector<Chunk>& chunks) {
  for (size_t i = 0; i < runs.size(); ++i) {
    const FileRun& run = runs[i];
    auto chunk = std::partition_point(chunks.begin(), chunks.end(), [&](const Chunk& each) {
      return std::pair(each.file, each.end) <= std::pair(run.file, run.offset);
    });
    for (;
         chunk != chunks.end() && chunk->file == run.file && chunk->begin < run.offset + run.bytes;
         ++chunk)
      chunk->runs.push_back(i);
  }
}

// Takes the bytes of a chunk part by part, and compares the checksum of every block.
class BlockCheck {
 public:
  BlockCheck(const CheckedFile& file, const Chunk& chunk)
      : file_(file), begin_(chunk.begin), position_(chunk.begin), end_(chunk.end) {}

  void add(std::span<const std::byte> bytes) {
    if (file_.block_bytes == 0) return;
    while (!bytes.empty()) {
      const int64_t block_end = std::min(begin_ + file_.block_bytes, end_);
      const std::span<const std::byte> part =
          bytes.first(std::min(bytes.size(), static_cast<size_t>(block_end - position_)));
      found_ = crc32c(part, found_);
      position_ += static_cast<int64_t>(part.size());
      bytes = bytes.subspan(part.size());
      if (position_ == block_end) compare();
    }
  }

 private:
  void compare() {
    const uint32_t written = file_.blocks[static_cast<size_t>(begin_ / file_.block_bytes)];
    FSDP_CHECK(found_ == written, file_.path, ": bytes ", begin_, " to ", position_,
               " are not what was written (CRC32C ", found_, " instead of ", written,
               "); the file is damaged, so use another checkpoint");
    begin_ = position_;
    found_ = 0;
  }

  const CheckedFile& file_;
  int64_t begin_;  // of the block
  int64_t position_;
  const int64_t end_;
  uint32_t found_ = 0;
};

// Whether a few consecutive runs make up the chunk: then each run is read to its own memory.
bool is_made_of_runs(const Chunk& chunk, std::span<const FileRun> runs) {
  constexpr size_t kFew = 4;  // one read of small parts is quicker than many
  if (chunk.runs.size() > kFew) return false;
  int64_t position = chunk.begin;
  for (const size_t index : chunk.runs) {
    const FileRun& run = runs[index];
    if (run.offset > position || (run.offset < position && position != chunk.begin)) return false;
    position = run.offset + run.bytes;
  }
  return position >= chunk.end;
}

void copy_out(const Chunk& chunk, std::span<const FileRun> runs, const std::byte* bytes) {
  for (const size_t index : chunk.runs) {
    const FileRun& run = runs[index];
    const int64_t begin = std::max(run.offset, chunk.begin);
    const int64_t end = std::min(run.offset + run.bytes, chunk.end);
    if (begin < end)
      std::memcpy(run.into + (begin - run.offset), bytes + (begin - chunk.begin),
                  static_cast<size_t>(end - begin));
  }
}

int threads_for(const ReadOptions& options, size_t num_chunks) {
  const int cores = std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, 2);
  const int wanted = options.threads > 0 ? options.threads : cores;
  return static_cast<int>(std::min(static_cast<size_t>(wanted), std::max<size_t>(num_chunks, 1)));
}

// Every thread reads a row of neighbouring chunks, file after file, which suits the system's
// read-ahead. The first error ends all threads.
class ChunkReads {
 public:
  ChunkReads(std::span<const CheckedFile> files, std::span<const FileRun> runs,
             std::span<const Chunk> chunks)
      : files_(files), runs_(runs), chunks_(chunks) {}

  // Uses one thread per buffer, this one included.
  void run(std::span<std::vector<std::byte>> buffers) {
    const size_t num_threads = buffers.size();
    const auto part = [&](size_t i) {
      const size_t begin = chunks_.size() * i / num_threads;
      return chunks_.subspan(begin, chunks_.size() * (i + 1) / num_threads - begin);
    };
    std::vector<std::jthread> others;
    for (size_t i = 1; i < num_threads; ++i)
      others.push_back(start_thread<std::jthread>(
          "reading a checkpoint",
          [this, chunks = part(i), &buffer = buffers[i]] { work(chunks, buffer); }));
    work(part(0), buffers.front());
    others.clear();
    if (error_) std::rethrow_exception(error_);
  }

 private:
  void work(std::span<const Chunk> chunks, std::vector<std::byte>& buffer) {
    try {
      std::optional<FileReader> reader;
      for (const Chunk& chunk : chunks) {
        if (failed_) return;
        const CheckedFile& file = files_[chunk.file];
        if (!reader || reader->path() != file.path) open(file, reader);
        read(chunk, *reader, buffer);
      }
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!failed_.exchange(true)) error_ = std::current_exception();
    }
  }

  static void open(const CheckedFile& file, std::optional<FileReader>& reader) {
    reader.reset();
    reader.emplace(file.path);
    FSDP_CHECK(reader->bytes() == file.bytes, file.path, " has ", reader->bytes(),
               " bytes, but had ", file.bytes,
               " when it was opened; somebody changes the checkpoint while it is read");
  }

  void read(const Chunk& chunk, const FileReader& reader, std::vector<std::byte>& buffer) {
    BlockCheck check(files_[chunk.file], chunk);
    if (is_made_of_runs(chunk, runs_)) {
      for (const size_t index : chunk.runs) {
        const FileRun& run = runs_[index];
        const int64_t begin = std::max(run.offset, chunk.begin);
        const int64_t end = std::min(run.offset + run.bytes, chunk.end);
        read_parts(reader, begin,
                   {run.into + (begin - run.offset), static_cast<size_t>(end - begin)}, check);
      }
      return;
    }
    const auto bytes = static_cast<size_t>(chunk.end - chunk.begin);
    if (buffer.size() < bytes) buffer.resize(bytes);
    read_parts(reader, chunk.begin, std::span(buffer).first(bytes), check);
    copy_out(chunk, runs_, buffer.data());
  }

  // Reads so few bytes at once that they are still in a core's cache for the checksum.
  static void read_parts(const FileReader& reader, int64_t offset, std::span<std::byte> into,
                         BlockCheck& check) {
    constexpr size_t kReadPartBytes = size_t{256} << 10;
    while (!into.empty()) {
      const std::span<std::byte> part = into.first(std::min(into.size(), kReadPartBytes));
      reader.read(offset, part);
      check.add(part);
      offset += static_cast<int64_t>(part.size());
      into = into.subspan(part.size());
    }
  }

  std::span<const CheckedFile> files_;
  std::span<const FileRun> runs_;
  std::span<const Chunk> chunks_;
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  std::exception_ptr error_;
};

}  // namespace

VerifiedReader::VerifiedReader(std::span<const CheckedFile> files, const ReadOptions& options)
    : files_(files), options_(options) {
  if (options.chunk_bytes < 1)
    throw UsageError(concat("chunk_bytes is ", options.chunk_bytes, "; it must be at least 1"));
}

void VerifiedReader::read(std::vector<FileRun> wanted) {
  std::erase_if(wanted, [](const FileRun& run) { return run.bytes == 0; });
  std::sort(wanted.begin(), wanted.end(), [](const FileRun& a, const FileRun& b) {
    return std::pair(a.file, a.offset) < std::pair(b.file, b.offset);
  });
  std::vector<Chunk> chunks = chunks_of(files_, wanted, options_.chunk_bytes);
  assign_runs(wanted, chunks);
  const auto threads = static_cast<size_t>(threads_for(options_, chunks.size()));
  if (buffers_.size() < threads) buffers_.resize(threads);
  ChunkReads(files_, wanted, chunks).run(std::span(buffers_).first(threads));
  statistics_.num_reads += static_cast<int64_t>(chunks.size());
  for (const Chunk& chunk : chunks) statistics_.bytes += chunk.end - chunk.begin;
}

ReadStatistics read_runs(std::span<const CheckedFile> files, std::vector<FileRun> wanted,
                         const ReadOptions& options) {
  VerifiedReader reader(files, options);
  reader.read(std::move(wanted));
  return reader.statistics();
}

void add_runs(const CatalogTensor& stored, const StridedBox& target, std::byte* into,
              std::vector<FileRun>& file_runs) {
  const int64_t width = element_bytes(stored.tensor.dtype);
  for (const StoredBox& box : stored.boxes)
    for (const Run& run : runs(box.place, target))
      file_runs.push_back(
          {box.file, box.data_begin + run.from * width, run.numel * width, into + run.to * width});
}

}  // namespace fsdp
