// Stands in for operator new and delete of the whole program.
#include "support/counted_news.h"

#include <cstdlib>
#include <new>

namespace {
thread_local int64_t news_of_this_thread = 0;
}  // namespace

int64_t fsdp::testing::num_news() { return news_of_this_thread; }

void* operator new(size_t bytes) {
  ++news_of_this_thread;
  if (void* address = std::malloc(bytes)) return address;
  throw std::bad_alloc();
}
// All of the family: a block of one that is freed by another's delete is an error to sanitizers.
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  ++news_of_this_thread;
  return std::malloc(bytes);
}
// Not inlined: GCC would see free() meet a pointer of operator new, and warn that they do not
// match.
[[gnu::noinline]] void operator delete(void* address) noexcept { std::free(address); }
[[gnu::noinline]] void operator delete(void* address, size_t) noexcept { std::free(address); }
[[gnu::noinline]] void operator delete(void* address, const std::nothrow_t&) noexcept {
  std::free(address);
}
