// The parts of the Python module fsdp_cpp._C; python/fsdp_cpp/_C.pyi describes it to Python's
// tools.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <memory>

namespace fsdp {

void bind_ranks(pybind11::module_& module);
void bind_parallel(pybind11::module_& module);
void bind_shard(pybind11::module_& module);
void bind_optim(pybind11::module_& module);
void bind_checkpoint(pybind11::module_& module);
void bind_convert(pybind11::module_& module);
void bind_patches(pybind11::module_& module);
void bind_graph(pybind11::module_& module);

// For calls that may wait: other threads of Python go on.
using WithoutGil = pybind11::call_guard<pybind11::gil_scoped_release>;

// A Python function that C++ calls and drops with or without the GIL. None is an empty function.
inline std::function<void()> callback(const pybind11::object& function) {
  if (function.is_none()) return nullptr;
  const std::shared_ptr<pybind11::object> kept(new pybind11::object(function),
                                               [](pybind11::object* dropped) {
                                                 const pybind11::gil_scoped_acquire gil;
                                                 delete dropped;
                                               });
  return [kept] {
    const pybind11::gil_scoped_acquire gil;
    (*kept)();
  };
}

}  // namespace fsdp
