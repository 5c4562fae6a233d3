// A shuffled order of the numbers 0 to size - 1 that takes no memory, whatever the size.
#pragma once

#include <cstdint>

namespace fsdp {

// A Feistel network over the next power of two, walked until it is below `size` again. The same
// numbers on every machine and in every version: runs are resumed by them.
class Permutation {
 public:
  // `size` >= 1. Another seed or round is another order.
  Permutation(int64_t size, uint64_t seed, uint64_t round);

  int64_t size() const { return size_; }

  // Where `index` (0 to size - 1) goes.
  int64_t operator()(int64_t index) const;

 private:
  uint64_t permuted(uint64_t value) const;  // of the power of two

  int64_t size_;
  uint64_t key_;
  int lower_bits_;  // of the two halves that the bits are cut in
  int upper_bits_;  // the same, or one less
};

}  // namespace fsdp
