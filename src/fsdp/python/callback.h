// A Python function that C++ calls.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <memory>

namespace fsdp {

// May be called and dropped with or without the GIL. None is an empty function.
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
