#include "fsdp/checkpoint/random_state.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <cstring>
#include <mutex>
#include <vector>

#include "fsdp/base/error.h"

namespace fsdp {

namespace {

std::vector<at::Generator> generators(c10::Device device) {
  std::vector<at::Generator> all = {at::detail::getDefaultCPUGenerator()};
  if (!device.is_cpu()) all.push_back(at::globalContext().defaultGenerator(device));
  return all;
}

}  // namespace

// For each generator how many bytes its state has, in 8 bytes, and the state.
std::string random_state(c10::Device device) {
  std::string all;
  for (at::Generator& generator : generators(device)) {
    const std::lock_guard lock(generator.mutex());
    const at::Tensor state = generator.get_state().cpu().contiguous();
    const auto bytes = static_cast<uint64_t>(state.nbytes());
    all.append(reinterpret_cast<const char*>(&bytes), sizeof(bytes));
    all.append(static_cast<const char*>(state.const_data_ptr()), bytes);
  }
  return all;
}

void set_random_state(const std::string& state, c10::Device device) {
  size_t position = 0;
  for (at::Generator& generator : generators(device)) {
    uint64_t bytes = 0;
    if (position == state.size()) return;  // written without this device: its numbers go on
    FSDP_CHECK(state.size() - position >= sizeof(bytes),
               "the random state of the checkpoint ends in the middle");
    std::memcpy(&bytes, state.data() + position, sizeof(bytes));
    position += sizeof(bytes);
    FSDP_CHECK(state.size() - position >= bytes,
               "the random state of the checkpoint ends in the middle");
    at::Tensor values = at::empty({static_cast<int64_t>(bytes)}, at::kByte);
    std::memcpy(values.mutable_data_ptr(), state.data() + position, bytes);
    position += bytes;
    const std::lock_guard lock(generator.mutex());
    generator.set_state(values);
  }
}

}  // namespace fsdp
