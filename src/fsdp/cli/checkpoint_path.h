// What users mean by the path of a checkpoint.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::cli {

// A checkpoint itself, a run's latest one, or files of other tools as they are. Error where the
// path does not exist, or is a run that does not say which one is the latest.
std::string meant_by(const std::string& path);

// The steps of a run's checkpoints; none where the path is no run's directory.
std::vector<int64_t> steps_in(const std::string& path);

}  // namespace fsdp::cli
