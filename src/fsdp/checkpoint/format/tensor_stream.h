// Reads a stored tensor in the order of its elements, a chunk at a time, however it was cut: as
// bytes, as numbers, or converted to another type.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/base/dtype.h"
#include "fsdp/checkpoint/checkpoint_options.h"
#include "fsdp/checkpoint/format/tensor_catalog.h"
#include "fsdp/layout/segment.h"

namespace fsdp {

// --- numbers -------------------------------------------------------------------------------------

// Reads every number as a double: exact, except for integers beyond 2^53.
void read_values(DType dtype, std::span<const std::byte> bytes, std::span<double> values);

// Converts floating-point numbers to fp64, fp32, fp16 or bf16, rounded once: to nearest, ties to
// even. Returns how many finite numbers became Inf because the type cannot hold them.
int64_t convert_values(DType from, std::span<const std::byte> bytes, DType to,
                       std::span<std::byte> into);

// --- chunks --------------------------------------------------------------------------------------

// Bytes in memory at a time while whole tensors are read. 16 blocks of 1 MiB, so that the two at
// the ends, which may be read twice, weigh little.
inline constexpr int64_t kStreamBytes = int64_t{16} << 20;

// Called with the number of bytes since the last call.
using OnBytes = std::function<void(int64_t bytes)>;

int64_t numel_of(const StoredTensor& tensor);
int64_t bytes_of(const StoredTensor& tensor);

// Reads elements [range) of the flattened tensor to `into`, and verifies them.
void read_elements(std::span<const CheckedFile> files, const CatalogTensor& tensor, FlatRange range,
                   std::byte* into);

// Calls body(range) with neighbouring ranges of at most kStreamBytes of elements of `width` bytes;
// never for a tensor without elements.
void for_each_chunk(int64_t numel, int64_t width, const std::function<void(FlatRange)>& body);

// --- another type --------------------------------------------------------------------------------

// Changes some tensors between their reading and their rounding, in fp32.
struct WeightChange {
  std::function<bool(const std::string& name)> is_of;
  std::function<void(const CatalogTensor& tensor, FlatRange range, std::span<float> values)> apply;
};

// Refers to `files`, which must outlive it. For one thread at a time.
class ConvertedReads {
 public:
  // `dtype` is for floating-point tensors: fp32, bf16, fp16 or fp64. nullopt: the stored type.
  // `on_bytes` hears of every byte read. Tensors of `kept` names keep their types.
  ConvertedReads(std::span<const CheckedFile> files, std::optional<DType> dtype,
                 OnBytes on_bytes = {}, std::set<std::string> kept = {});

  void set_change(WeightChange change) { change_ = std::move(change); }

  DType dtype_of(const StoredTensor& tensor) const;
  int64_t bytes_of(const StoredTensor& tensor) const;

  // Reads elements [range) of the flattened tensor to `into`, in dtype_of(tensor). Error for finite
  // numbers that this type cannot hold.
  void read(const CatalogTensor& tensor, FlatRange range, std::byte* into);

 private:
  std::span<const CheckedFile> files_;
  std::optional<DType> dtype_;
  OnBytes on_bytes_;
  std::set<std::string> kept_;
  WeightChange change_;
  std::vector<std::byte> stored_;  // before conversion
  std::vector<float> changed_;
};

// --- verified reads ------------------------------------------------------------------------------

// Reads parts of a checkpoint's files into memory, and refuses bytes with a wrong checksum.

// Bytes [offset, offset + bytes) of a file go to `into`.
struct FileRun {
  size_t file = 0;
  int64_t offset = 0;
  int64_t bytes = 0;
  std::byte* into = nullptr;
};

// Keeps its memory from read to read.
class VerifiedReader {
 public:
  // `files` must outlive the reader.
  explicit VerifiedReader(std::span<const CheckedFile> files, const ReadOptions& options = {});

  // Neighbouring runs share reads, and threads share the work. Throws an Error that names file and
  // block if a checksum does not match; the content of `into` is then undefined.
  void read(std::vector<FileRun> wanted);

  // Sums over all reads so far.
  const ReadStatistics& statistics() const { return statistics_; }

 private:
  const std::span<const CheckedFile> files_;
  const ReadOptions options_;
  std::vector<std::vector<std::byte>> buffers_;  // one per thread
  ReadStatistics statistics_;
};

// For a single read.
ReadStatistics read_runs(std::span<const CheckedFile> files, std::vector<FileRun> wanted,
                         const ReadOptions& options = {});

// Adds the part of a stored tensor that falls into `target`, whose elements lie at `into`.
void add_runs(const CatalogTensor& stored, const StridedBox& target, std::byte* into,
              std::vector<FileRun>& runs);

}  // namespace fsdp
