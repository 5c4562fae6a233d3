#include <cstdio>

#include "fsdp/base/version.h"

int main() {
  std::puts("fsdp " FSDP_VERSION);
  return 0;
}
