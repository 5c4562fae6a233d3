#include "fsdp/layout/brick.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <vector>

#include "fsdp/base/integer.h"

namespace fsdp {

namespace {

// Every a gives a true bound; these numbers of tries find the best one for all models we know.
constexpr size_t kMaxSizes = 48;
constexpr int64_t kMaxDivisor = 24;

struct Piece {
  int64_t numel = 0;
  int64_t count = 0;
};

std::vector<Piece> pieces_by_volume(std::span<const BrickedTensor> tensors) {
  std::map<int64_t, int64_t> count_by_size;
  for (const BrickedTensor& tensor : tensors) {
    count_by_size[tensor.brick_numel] += tensor.numel / tensor.brick_numel;
    const int64_t rest = tensor.numel % tensor.brick_numel;
    if (rest > 0) ++count_by_size[rest];
  }
  std::vector<Piece> pieces;
  for (const auto& [numel, count] : count_by_size) pieces.push_back({numel, count});
  std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    return a.numel * a.count > b.numel * b.count;
  });
  return pieces;
}

// The bound of the header for a = size / divisor.
int64_t bound_for(std::span<const Piece> pieces, int64_t size, int64_t divisor, int64_t num_ranks) {
  using Wide = unsigned __int128;  // a size times a divisor or a count may need more than 64 bits
  const auto wide_divisor = static_cast<Wide>(divisor);
  const auto wide_size = static_cast<Wide>(size);
  Wide sum = 0;
  for (const Piece& piece : pieces) {
    sum +=
        static_cast<Wide>(piece.numel) * wide_divisor / wide_size * static_cast<Wide>(piece.count);
  }
  const auto ranks = static_cast<Wide>(num_ranks);
  const Wide per_rank = (sum + ranks - 1) / ranks;
  return static_cast<int64_t>((per_rank * wide_size + wide_divisor - 1) / wide_divisor);
}

}  // namespace

BrickedTensor bricked(int64_t tensor, int64_t numel, int64_t indivisible_numel,
                      int64_t align_numel) {
  const int64_t padded = round_up(numel, align_numel);
  int64_t brick = 0;
  const bool overflows = __builtin_mul_overflow(
      indivisible_numel / std::gcd(indivisible_numel, align_numel), align_numel, &brick);
  return {.tensor = tensor,
          .numel = padded,
          .brick_numel = overflows ? padded : std::min(brick, padded)};
}

int64_t min_shard_numel(std::span<const BrickedTensor> tensors, int64_t align_numel,
                        int64_t num_ranks) {
  const std::vector<Piece> pieces = pieces_by_volume(tensors);
  if (pieces.empty()) return 0;
  // a = align_numel is the plain volume; a = the largest piece says that it must fit.
  int64_t bound = bound_for(pieces, align_numel, 1, num_ranks);
  for (const Piece& piece : pieces) bound = std::max(bound, piece.numel);
  for (size_t i = 0; i < std::min(pieces.size(), kMaxSizes); ++i) {
    for (int64_t divisor = 1; divisor <= kMaxDivisor; ++divisor) {
      bound = std::max(bound, bound_for(pieces, pieces[i].numel, divisor, num_ranks));
    }
  }
  return round_up(bound, align_numel);
}

}  // namespace fsdp
