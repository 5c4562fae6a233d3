#include "fsdp/optim/kernels/change_marks.h"

#include <bit>

namespace fsdp {

void find_marked(const uint16_t* marks, int64_t begin, FlatRange flat,
                 std::vector<int64_t>& positions) {
  for (int64_t block = flat.begin / kScaleBlock * kScaleBlock; block < flat.end;
       block += kScaleBlock) {
    const uint16_t* lanes = marks + first_mark_lane(begin, block);
    uint32_t any = 0;
    for (int64_t k = 0; k < kMarkLanes; ++k) any |= lanes[k];
    for (; any != 0; any &= any - 1) {
      const int j = std::countr_zero(any);
      for (int64_t k = 0; k < kMarkLanes; ++k) {
        const int64_t position = block + kMarkLanes * j + k;
        if ((lanes[k] >> j & 1) != 0 && position >= flat.begin && position < flat.end)
          positions.push_back(position);
      }
    }
  }
}

}  // namespace fsdp
