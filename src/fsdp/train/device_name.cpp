#include "fsdp/train/device_name.h"

#include <dlfcn.h>

#include <array>

namespace fsdp::train {

namespace {

// Of CUDA's driver library, whose interface does not change: libtorch tells names only to programs
// that are compiled with CUDA's headers.
template <typename Function>
Function driver_function(void* driver, const char* name) {
  return reinterpret_cast<Function>(::dlsym(driver, name));
}

}  // namespace

std::string device_name(c10::Device device) {
  if (!device.is_cuda()) return "";
  // Never closed: libtorch uses it, too.
  void* const driver = ::dlopen("libcuda.so.1", RTLD_LAZY);
  if (driver == nullptr) return "";
  const auto start = driver_function<int (*)(unsigned)>(driver, "cuInit");
  const auto find = driver_function<int (*)(int*, int)>(driver, "cuDeviceGet");
  const auto name_of = driver_function<int (*)(char*, int, int)>(driver, "cuDeviceGetName");
  if (start == nullptr || find == nullptr || name_of == nullptr) return "";
  int found = 0;
  std::array<char, 256> name{};
  const bool is_known = start(0) == 0 && find(&found, device.index()) == 0 &&
                        name_of(name.data(), static_cast<int>(name.size()) - 1, found) == 0;
  return is_known ? name.data() : "";
}

}  // namespace fsdp::train
