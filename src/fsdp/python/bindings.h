// The parts of the Python module fsdp_cpp._C; python/fsdp_cpp/_C.pyi describes it to Python's
// tools.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <memory>

#include "fsdp/optim/adamw.h"
#include "fsdp/optim/muon.h"
#include "fsdp/optim/sgd.h"
#include "fsdp/shard/options.h"

namespace fsdp {

void bind_ranks(pybind11::module_& module);
void bind_shard(pybind11::module_& module);
void bind_optim(pybind11::module_& module);
void bind_checkpoint(pybind11::module_& module);

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

// Keyword arguments of Python as fields of our options; errors name the keyword, its value and the
// fix. A keyword that is missing leaves its field at the default. UsageError for an unknown
// keyword, and for a value of the wrong type or outside its choices.
ShardOptions shard_options(const pybind11::dict& keywords);
AdamWOptions adamw_options(const pybind11::dict& keywords);
SGDOptions sgd_options(const pybind11::dict& keywords);
MuonOptions muon_options(const pybind11::dict& keywords);

// For set_precision(): the fields of PrecisionPolicy alone, on top of `current`.
PrecisionPolicy precision_policy(const PrecisionPolicy& current, const pybind11::dict& keywords);

}  // namespace fsdp
