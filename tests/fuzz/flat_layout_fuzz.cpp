// libFuzzer: any request either makes a layout that keeps its promises, or is refused with an
// Error.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <new>

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
    // Every element is walked, so only layouts of a few thousand can be checked in full; the others
    // have passed the checks of their own constructor.
    constexpr int64_t kMaxWalked = int64_t{1} << 16;
    const int64_t num_ranks = request.inner_ranks * request.outer_ranks;
    if (layout.padded_numel() > kMaxWalked / num_ranks) return 0;
    const std::string problem = fsdp::testing::check_layout(layout);
    if (!problem.empty()) fail(problem);
  } catch (const fsdp::Error& error) {
    if (!is_extreme) fail(error.what());
  }
  return 0;
}
