// How far a run has read its data, as a text that a checkpoint keeps.
#pragma once

#include <cstdint>
#include <string>

#include "fsdp/data/token_windows.h"

namespace fsdp {

// The same for every rank, and it does not know of ranks, batch or microbatches: another number of
// each goes on with the window after the last one that was used.
struct DataPosition {
  int64_t windows_used = 0;  // of the endless order, epoch after epoch
  uint64_t seed = 0;         // of the order
  int64_t sequence = 0;      // tokens that a window predicts
  int64_t num_windows = 0;   // for training: of an epoch
  uint64_t fingerprint = 0;  // of the corpus

  bool operator==(const DataPosition&) const = default;
};

// One line of JSON.
std::string to_json(const DataPosition& position);

// UsageError that begins with `source` for whatever to_json() does not write.
DataPosition parse_data_position(const std::string& text, const std::string& source);

// Where a run begins.
DataPosition first_position(const TokenWindows& windows, uint64_t seed);

// UsageError where `position` is one in another order than that of `windows` and `seed`: other
// tokens, sequence length, share for validation or seed. Whoever wants to go on all the same begins
// with first_position().
void check_same_order(const DataPosition& position, const TokenWindows& windows, uint64_t seed);

}  // namespace fsdp
