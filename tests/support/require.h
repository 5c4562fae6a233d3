// For tests that need something this machine may not have: they are skipped with a reason, or fail
// if FSDP_REQUIRE (=gpu) promises it.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace fsdp::testing {

inline bool is_promised(const std::string& what) {
  const char* promised = std::getenv("FSDP_REQUIRE");
  return promised != nullptr && std::string(promised).find(what) != std::string::npos;
}

}  // namespace fsdp::testing

#define FSDP_REQUIRE_GPU()                                                       \
  do {                                                                           \
    if (!at::hasCUDA()) {                                                        \
      ASSERT_FALSE(::fsdp::testing::is_promised("gpu")) << "a GPU was promised"; \
      GTEST_SKIP() << "no GPU here";                                             \
    }                                                                            \
  } while (false)
