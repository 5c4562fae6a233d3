// The first use of libtorch's math libraries happens on one thread.
#include <ATen/ATen.h>
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "fsdp/comm/world.h"

namespace {

std::atomic<int> num_detections{0};

}  // namespace

// Replaces MKL's own function, which libtorch calls by this name: counts how often its vector
// functions look for their code, slowly enough that other threads look meanwhile.
extern "C" __attribute__((visibility("default"))) int mkl_serv_vml_cpu_detect() {
  ++num_detections;
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  return reinterpret_cast<int (*)()>(dlsym(RTLD_NEXT, "mkl_serv_vml_cpu_detect"))();
}

namespace fsdp::torch_math_test {
namespace {

// See Note [The first call of MKL's vector functions]: it is a race for two threads only if both
// are in it.
TEST(TorchMath, IsChosenByOneThreadBeforeRanksCompute) {
  run_threads(2, {.timeout_seconds = 60}, [](World&) { at::cos(at::ones({16})); });
  at::cos(at::ones({16}));
  if (num_detections == 0) GTEST_SKIP() << "this libtorch has no MKL";
  EXPECT_EQ(num_detections, 1);
}

}  // namespace
}  // namespace fsdp::torch_math_test
