// Whether a backend uses the memory of its callers in place, without copies through its own.
#pragma once

#include <cstdint>
#include <string>

namespace fsdp {

// From worst to best.
enum class UserBuffers : uint8_t {
  kOff,         // what is sent and received is copied through the backend's memory
  kRegistered,  // the backend knows the memory and may let the network or other GPUs use it
  kSymmetric,   // every rank knows where the others' is, for kernels that read and write there
};

// "off", "registered", "symmetric"
const char* name_of(UserBuffers use);

// What became of memory that a communicator was told of.
struct RegisteredMemory {
  UserBuffers use = UserBuffers::kOff;
  std::string why_not_better;  // "" where nothing better was asked for
};

}  // namespace fsdp
