// Bytes transposed: every one is read and written once, 16 at a time.
#include "fsdp/base/kernel_launch.cuh"
#include "fsdp/nn/kernels/quantize_kernels.h"
#include "fsdp/nn/kernels/turned_tile.cuh"

namespace fsdp::nn {

namespace {

using namespace tile;

__global__ void __launch_bounds__(kThreads)
    transpose_bytes_kernel(TransposeMemory memory, int64_t padded_rows) {
  __shared__ alignas(kPackBytes) TurnedTile tile;
  const Place place = own_place(blockIdx.y, memory.rows, memory.columns);
  uint4 bytes[kRows] = {};
#pragma unroll
  for (int row = 0; row < kRows; ++row)
    if (row < place.num_rows)
      bytes[row] = *reinterpret_cast<const uint4*>(
          memory.from + (place.row + row) * memory.columns + place.column);
  const auto write = [&](int part, uint32_t uint4::*word) {
    tile.write(own_column() + part * 4,
               {bytes[0].*word, bytes[1].*word, bytes[2].*word, bytes[3].*word});
  };
  write(0, &uint4::x);
  write(1, &uint4::y);
  write(2, &uint4::z);
  write(3, &uint4::w);
  __syncthreads();
  tile.store(memory.to, memory.columns, padded_rows, memory.to_stride);
}

}  // namespace

void transpose_bytes_on_device(const TransposeMemory& memory, void* stream) {
  if (memory.rows == 0 || memory.columns == 0) return;
  transpose_bytes_kernel<<<tiles_of(memory.rows, memory.columns), kThreads, 0,
                           cuda_stream(stream)>>>(memory, padded(memory.rows));
  check_launch("transpose_bytes");
}

}  // namespace fsdp::nn
