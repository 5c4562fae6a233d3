// Where a run is: what a program needs beside weights and optimizer to go on as if never stopped.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp {

// What a program gives when it saves. Texts are its own; JSON is a good choice.
struct TrainingPosition {
  int64_t step = 0;           // names the checkpoint
  std::string schedule = {};  // of the learning rate; the same on all ranks
  std::string data = {};      // how far this rank has read its data
};

}  // namespace fsdp
