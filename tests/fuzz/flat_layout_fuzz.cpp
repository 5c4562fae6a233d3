// libFuzzer: any request either makes a layout that keeps its promises, or is refused with an
// Error.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "fsdp/base/error.h"
#include "support/layout_checker.h"

namespace {

void fail(const std::string& problem) {
  std::fprintf(stderr, "flat_layout_fuzz: %s\n", problem.c_str());
  std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fsdp::testing::RequestReader reader({data, size});
  const bool is_extreme = reader.is_extreme();
  const fsdp::FlatLayoutRequest request = reader.read();
  try {
    const fsdp::FlatLayout layout(request);
    // Every element is walked for every rank, so only small layouts can be checked in full; the
    // others have passed the checks of their own constructor.
    constexpr int64_t kMaxRanks = 64;
    constexpr int64_t kMaxNumel = int64_t{1} << 14;
    if (request.inner_ranks * request.outer_ranks > kMaxRanks) return 0;
    if (layout.padded_numel() > kMaxNumel) return 0;
    const std::string problem = fsdp::testing::check_layout(layout);
    if (!problem.empty()) fail(problem);
  } catch (const fsdp::Error& error) {
    if (!is_extreme) fail(error.what());
  }
  return 0;
}
