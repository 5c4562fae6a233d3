#include "fsdp/checkpoint/snapshot.h"

#include <ATen/ATen.h>

#include <cstring>

#include "fsdp/base/integer.h"

namespace fsdp {

namespace {

constexpr int64_t kAlignBytes = 64;

int64_t bytes_of(const Piece& piece) { return piece.box.numel() * element_bytes(piece.dtype); }

}  // namespace

void Snapshot::take(StatePieces& pieces) {
  int64_t total = 0;
  for (const auto* list : {&pieces.model_pieces, &pieces.moment_pieces})
    for (const Piece& piece : *list) total += round_up(bytes_of(piece), kAlignBytes);
  if (total > bytes()) {
    memory_ = at::Tensor();  // before the new one: both at once might not fit
    memory_ = at::empty({total}, at::TensorOptions(at::kByte).pinned_memory(!device_.is_cpu()));
  }
  auto* next = total > 0 ? static_cast<std::byte*>(memory_.mutable_data_ptr()) : nullptr;
  for (auto* list : {&pieces.model_pieces, &pieces.moment_pieces})
    for (Piece& piece : *list) {
      const int64_t bytes = bytes_of(piece);
      if (bytes == 0) continue;
      piece.read({0, piece.box.numel()}, next);
      const int64_t width = element_bytes(piece.dtype);
      piece.in_memory = [from = next, width](FlatRange range) -> const std::byte* {
        return from + range.begin * width;
      };
      piece.read = [from = next, width](FlatRange range, std::byte* into) {
        std::memcpy(into, from + range.begin * width, static_cast<size_t>(range.numel() * width));
      };
      next += round_up(bytes, kAlignBytes);
    }
}

}  // namespace fsdp
