#include "fsdp/comm/operation.h"

#include <algorithm>

#include "fsdp/base/error.h"

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

}  // namespace fsdp
