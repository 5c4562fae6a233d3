// The parts of the Python module fsdp_cpp._C; python/fsdp_cpp/_C.pyi describes it to Python's
// tools.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fsdp {

void bind_ranks(pybind11::module_& module);
void bind_shard(pybind11::module_& module);
void bind_optim(pybind11::module_& module);
void bind_checkpoint(pybind11::module_& module);
void bind_convert(pybind11::module_& module);
void bind_graph(pybind11::module_& module);

// For calls that may wait: other threads of Python go on.
using WithoutGil = pybind11::call_guard<pybind11::gil_scoped_release>;

}  // namespace fsdp
