#include "fsdp/comm/operation.h"

#include <algorithm>

#include "fsdp/base/check.h"
#include "fsdp/base/integer.h"
#include "fsdp/comm/enqueued_operation.h"

namespace fsdp {

const char* name_of(OpKind kind) {
  switch (kind) {
    case OpKind::kAllGather:
      return "all_gather";
    case OpKind::kReduceScatter:
      return "reduce_scatter";
    case OpKind::kAllReduce:
      return "all_reduce";
    case OpKind::kAllToAll:
      return "all_to_all";
    case OpKind::kBroadcast:
      return "broadcast";
    case OpKind::kBarrier:
      return "barrier";
    case OpKind::kCopy:
      return "copy";
  }
  return "unknown operation";  // a fingerprint from another rank may hold any byte
}

const char* name_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kAvg:
      return "avg";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kMin:
      return "min";
  }
  return "unknown reduction";
}

const char* name_of(Store store) {
  switch (store) {
    case Store::kWrite:
      return "write";
    case Store::kAdd:
      return "add";
  }
  return "unknown store";
}

Tag::Tag(std::string_view text) {
  std::copy_n(text.begin(), std::min(text.size(), kMaxLength), text_.begin());
}

std::string Fingerprint::text() const {
  std::string words = concat("operation ", sequence, ": ", name_of(kind));
  const bool reduces = kind == OpKind::kReduceScatter || kind == OpKind::kAllReduce;
  if (reduces) words += concat(" (", name_of(reduce), ")");
  if (!tag.text().empty()) words += concat(" '", tag.text(), "'");
  if (kind == OpKind::kBarrier) return words;
  if (bytes >= 0) words += concat(" of ", bytes, " bytes");
  words += concat(" of ", c10::toString(wire));
  if (device != at::kCPU) words += concat(" on ", c10::DeviceTypeName(device, /*lower_case=*/true));
  if (reduces && result != wire) words += concat(" into ", c10::toString(result));
  if (reduces && store != Store::kWrite) words += concat(", stored by ", name_of(store));
  if (reduces && scale != 1.0) words += concat(" scaled by ", scale);
  if (kind == OpKind::kBroadcast) words += concat(" from rank ", root);
  return words;
}

Shares Shares::equal(int64_t numel_per_rank, int ranks) {
  Shares shares;
  shares.ranks_ = ranks;
  shares.equal_count_ = numel_per_rank;
  return shares;
}

Shares Shares::uneven(std::span<const int64_t> counts) {
  Shares shares;
  shares.ranks_ = static_cast<int>(counts.size());
  int64_t end = 0;
  for (size_t rank = 0; rank < counts.size(); ++rank) {
    FSDP_CHECK(counts[rank] >= 0, "counts[", rank, "] is ", counts[rank],
               ": a rank's number of elements must be 0 or more");
    end = checked_add(end, counts[rank]);
    shares.ends_.push_back(end);
  }
  return shares;
}

Shares Shares::cut(int64_t numel, int ranks, int64_t multiple) {
  const int64_t piece = round_up(ceil_div(numel, ranks), multiple);
  if (piece * ranks == numel) return equal(piece, ranks);
  Shares shares;
  shares.ranks_ = ranks;
  for (int rank = 0; rank < ranks; ++rank)
    shares.ends_.push_back(std::min(numel, piece * (rank + 1)));
  return shares;
}

int64_t Shares::offset(int rank) const { return rank == 0 ? 0 : end(rank - 1); }

int64_t Shares::end(int rank) const {
  return is_equal() ? equal_count_ * (rank + 1) : ends_[static_cast<size_t>(rank)];
}

int64_t Shares::largest() const {
  int64_t largest = equal_count_;
  for (int rank = 0; rank < ranks_; ++rank) largest = std::max(largest, count(rank));
  return largest;
}

}  // namespace fsdp
