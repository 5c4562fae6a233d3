#include "fsdp/checkpoint/tensor_stream.h"

#include <algorithm>
#include <vector>

#include "fsdp/checkpoint/verified_reads.h"

namespace fsdp {

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
  const std::vector<int64_t> strides = strides_of(tensor.tensor.shape);
  std::vector<FileRun> runs;
  for (const Box& box : boxes(tensor.tensor.shape, range)) {
    StridedBox target{box, strides, -range.begin};
    for (size_t i = 0; i < strides.size(); ++i) target.begin += box.offsets[i] * strides[i];
    add_runs(tensor, target, into, runs);
  }
  read_runs(files, std::move(runs));
}

void for_each_chunk(int64_t numel, int64_t width, const std::function<void(FlatRange)>& body) {
  const int64_t step = std::max<int64_t>(kStreamBytes / width, 1);
  for (int64_t begin = 0; begin < numel; begin += step)
    body({begin, std::min(begin + step, numel)});
}

}  // namespace fsdp
