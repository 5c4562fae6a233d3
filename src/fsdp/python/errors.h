// Errors of the engine as Python's: their classes, and their words.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <string>

namespace fsdp {

// fsdp_cpp.Error, a RuntimeError, its UsageError, which is a ValueError, too, and its RemoteError,
// which another rank has caused; also for errors inside a backward, which pass through autograd.
void bind_errors(pybind11::module_& module);

// A sentence of the library's in Python's words: "Sharded::reset()" is "fsdp_cpp.reset(model)",
// "step.rounding is kNearest" is "rounding is 'nearest'".
std::string in_python(std::string sentence);

}  // namespace fsdp
