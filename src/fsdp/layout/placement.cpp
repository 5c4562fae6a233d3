#include "fsdp/layout/placement.h"

namespace fsdp {

char letter_of(Placement placement) {
  switch (placement) {
    case Placement::kReplicate:
      return 'R';
    case Placement::kShard:
      return 'S';
    case Placement::kPartial:
      return 'P';
  }
  return '?';
}

std::string to_text(PlacementPair pair) { return {letter_of(pair.outer), letter_of(pair.inner)}; }

std::optional<PlacementPair> parse_placement_pair(std::string_view text) {
  for (const PlacementPair pair : kAllPlacementPairs) {
    if (to_text(pair) == text) return pair;
  }
  return std::nullopt;
}

}  // namespace fsdp
