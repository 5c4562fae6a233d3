#include "fsdp/checkpoint/format/tensor_stream.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <exception>
#include <limits>
#include <mutex>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/crc32c.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/integer.h"
#include "fsdp/base/narrow_float.h"
#include "fsdp/base/start_thread.h"
#include "fsdp/base/text.h"

namespace fsdp {

namespace {

// Bytes of a file may lie at any address.
template <typename Value>
Value load(const std::byte* from) {
  Value value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// Calls body(read), where read(address) gives the number there, as it is or widened to fp32.
template <typename Body>
void with_reader(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat64:
      return body([](const std::byte* at) { return load<double>(at); });
    case DType::kFloat32:
      return body([](const std::byte* at) { return load<float>(at); });
    case DType::kFloat16:
      return body([](const std::byte* at) { return Fp16::widened(load<Fp16::Code>(at)); });
    case DType::kBFloat16:
      return body([](const std::byte* at) { return Bf16::widened(load<Bf16::Code>(at)); });
    case DType::kFloat8E4M3:
      return body([](const std::byte* at) { return Fp8E4M3::widened(load<Fp8E4M3::Code>(at)); });
    case DType::kFloat8E5M2:
      return body([](const std::byte* at) { return Fp8E5M2::widened(load<Fp8E5M2::Code>(at)); });
    case DType::kInt64:
      return body([](const std::byte* at) { return load<int64_t>(at); });
    case DType::kInt32:
      return body([](const std::byte* at) { return load<int32_t>(at); });
    case DType::kUInt8:
      return body([](const std::byte* at) { return load<uint8_t>(at); });
  }
}

// Cuts fp64 to fp32 and sets the last bit if anything was cut, for callers that round again.
// Rounding the result to a type of at most 22 bits is then the same as rounding the fp64 number;
// rounding to fp32 first could make a tie where there is none.
float rounded_to_odd(double value) {
  auto nearest = static_cast<float>(value);
  if (std::isnan(nearest) || static_cast<double>(nearest) == value) return nearest;
  auto bits = std::bit_cast<uint32_t>(nearest);
  const bool is_too_far = std::abs(static_cast<double>(nearest)) > std::abs(value);
  if (is_too_far) --bits;  // also from Inf to the largest number
  return std::bit_cast<float>(bits | 1u);
}
float rounded_to_odd(float value) { return value; }

// Calls body(write, too_large): write(address, number) stores a number, and finite ones from
// too_large on become Inf.
template <typename Body>
void with_writer(DType dtype, const Body& body) {
  const auto store = [](std::byte* to, auto value) { std::memcpy(to, &value, sizeof value); };
  switch (dtype) {
    case DType::kFloat64:
      return body([&](std::byte* to, auto value) { store(to, static_cast<double>(value)); },
                  std::numeric_limits<double>::infinity());
    case DType::kFloat32:
      return body([&](std::byte* to, auto value) { store(to, static_cast<float>(value)); },
                  0x1.FFFFFFp127);
    case DType::kFloat16:  // between the largest, 65504, and the next number
      return body(
          [&](std::byte* to, auto value) { store(to, Fp16::nearest(rounded_to_odd(value))); },
          65520.0);
    case DType::kBFloat16:
      return body(
          [&](std::byte* to, auto value) { store(to, Bf16::nearest(rounded_to_odd(value))); },
          0x1.FFp127);
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
    case DType::kInt64:
    case DType::kInt32:
    case DType::kUInt8:
      break;
  }
  FSDP_ASSERT(false, "no conversion to ", name_of(dtype));
}

}  // namespace

void read_values(DType dtype, std::span<const std::byte> bytes, std::span<double> values) {
  const auto width = static_cast<size_t>(element_bytes(dtype));
  FSDP_ASSERT(bytes.size() == values.size() * width, bytes.size(), " bytes");
  with_reader(dtype, [&](auto read) {
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<double>(read(bytes.data() + i * width));
  });
}

int64_t convert_values(DType from, std::span<const std::byte> bytes, DType to,
                       std::span<std::byte> into) {
  FSDP_ASSERT(is_floating(from), "no conversion from ", name_of(from));
  const auto from_width = static_cast<size_t>(element_bytes(from));
  const auto to_width = static_cast<size_t>(element_bytes(to));
  const size_t numel = bytes.size() / from_width;
  FSDP_ASSERT(into.size() == numel * to_width, into.size(), " bytes");
  int64_t num_overflows = 0;
  with_reader(from, [&](auto read) {
    using Value = decltype(read(bytes.data()));
    if constexpr (std::is_floating_point_v<Value>) {
      with_writer(to, [&](auto write, double too_large) {
        for (size_t i = 0; i < numel; ++i) {
          const Value value = read(bytes.data() + i * from_width);
          const double magnitude = std::abs(static_cast<double>(value));
          num_overflows += magnitude >= too_large && !std::isinf(magnitude) ? 1 : 0;
          write(into.data() + i * to_width, value);
        }
      });
    }
  });
  return num_overflows;
}

int64_t numel_of(const StoredTensor& tensor) {
  int64_t numel = 1;
  for (const int64_t size : tensor.shape) numel *= size;
  return numel;
}

int64_t bytes_of(const StoredTensor& tensor) {
  return numel_of(tensor) * element_bytes(tensor.dtype);
}

void read_elements(std::span<const CheckedFile> files, const CatalogTensor& tensor, FlatRange range,
                   std::byte* into) {
  const StridedBox target = flattened(tensor.tensor.shape, range.begin);
  std::vector<FileRun> runs;
  for (const Box& box : boxes(tensor.tensor.shape, range))
    add_runs(tensor, part_of(target, box), into, runs);
  read_runs(files, std::move(runs));
}

void for_each_chunk(int64_t numel, int64_t width, const std::function<void(FlatRange)>& body) {
  const int64_t step = std::max<int64_t>(kStreamBytes / width, 1);
  for (int64_t begin = 0; begin < numel; begin += step)
    body({begin, std::min(begin + step, numel)});
}

ConvertedReads::ConvertedReads(std::span<const CheckedFile> files, std::optional<DType> dtype,
                               OnBytes on_bytes, std::set<std::string> kept)
    : files_(files), dtype_(dtype), on_bytes_(std::move(on_bytes)), kept_(std::move(kept)) {}

DType ConvertedReads::dtype_of(const StoredTensor& tensor) const {
  const bool is_converted = is_floating(tensor.dtype) && !kept_.contains(tensor.name);
  return is_converted ? dtype_.value_or(tensor.dtype) : tensor.dtype;
}

int64_t ConvertedReads::bytes_of(const StoredTensor& tensor) const {
  return numel_of(tensor) * element_bytes(dtype_of(tensor));
}

void ConvertedReads::read(const CatalogTensor& tensor, FlatRange range, std::byte* into) {
  const DType from = tensor.tensor.dtype;
  const DType to = dtype_of(tensor.tensor);
  const int64_t bytes = range.numel() * element_bytes(to);
  const bool is_changed = change_.is_of && change_.is_of(tensor.tensor.name);
  if (from == to && !is_changed) {
    read_elements(files_, tensor, range, into);
  } else {
    stored_.resize(static_cast<size_t>(range.numel() * element_bytes(from)));
    read_elements(files_, tensor, range, stored_.data());
    std::span<const std::byte> values = stored_;
    if (is_changed) {
      changed_.resize(static_cast<size_t>(range.numel()));
      convert_values(from, stored_, DType::kFloat32, std::as_writable_bytes(std::span(changed_)));
      change_.apply(tensor, range, changed_);
      values = std::as_bytes(std::span(changed_));
    }
    const int64_t num_overflows = convert_values(is_changed ? DType::kFloat32 : from, values, to,
                                                 {into, static_cast<size_t>(bytes)});
    FSDP_CHECK(num_overflows == 0, "tensor '", shown(tensor.tensor.name), "' has ", num_overflows,
               " numbers that are too large for ", name_of(to), "; keep ", name_of(from),
               ", or choose a type with a larger range");
  }
  if (on_bytes_) on_bytes_(bytes);
}

// --- verified reads ------------------------------------------------------------------------------

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
