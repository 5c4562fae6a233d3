// How often operator new was called. Programs that link counted_news.cpp have its operator new, so
// they hold nothing but tests that count.
#pragma once

#include <cstdint>

namespace fsdp::testing {

// Calls by this thread: a rank counts what its own thread asks for, not what others do meanwhile.
int64_t num_news();

}  // namespace fsdp::testing
