// Keyword arguments of Python as fields of our options; errors name the keyword, its value and the
// fix.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "fsdp/optim/adamw.h"
#include "fsdp/optim/muon.h"
#include "fsdp/optim/sgd.h"
#include "fsdp/shard/options.h"

namespace fsdp {

// A keyword that is missing leaves its field at the default. UsageError for an unknown keyword, and
// for a value of the wrong type or outside its choices.
ShardOptions shard_options(const pybind11::dict& keywords);
AdamWOptions adamw_options(const pybind11::dict& keywords);
SGDOptions sgd_options(const pybind11::dict& keywords);
MuonOptions muon_options(const pybind11::dict& keywords);

// For set_precision(): the fields of PrecisionPolicy alone, on top of `current`.
PrecisionPolicy precision_policy(const PrecisionPolicy& current, const pybind11::dict& keywords);

}  // namespace fsdp
