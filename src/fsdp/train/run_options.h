// From what a person decided to the options of engine, optimizer, checkpoints and communicators.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <string>

#include "fsdp/base/cpu_types.h"
#include "fsdp/checkpoint/checkpointer.h"
#include "fsdp/checkpoint/load.h"
#include "fsdp/comm/comm_options.h"
#include "fsdp/optim/optimizer.h"
#include "fsdp/shard/options.h"
#include "fsdp/train/train_options.h"

namespace fsdp::train {

// The device that a rank computes on. UsageError where --device asks for one that is not there.
c10::Device training_device(const TrainOptions& options, int local_rank);

// Of weights and activations.
DType compute_dtype(const TrainOptions& options, c10::Device device);

// Why computing in this type is a bad idea on this device, in a sentence; "": it is none.
std::string slow_compute_text(DType compute, c10::Device device, const CpuTypes& cpu);

// What plan_run() is to know of it.
RankDevice rank_device(const TrainOptions& options, c10::Device device);

// Environment variables where flags say nothing.
CommOptions comm_options(const TrainOptions& options);
ShardOptions shard_options(const TrainOptions& options, c10::Device device);
std::unique_ptr<Optimizer> make_optimizer(const TrainOptions& options, const Sharded& sharded);
CheckpointerOptions checkpointer_options(const TrainOptions& options, const NameRules& names);
LoadOptions load_options(const TrainOptions& options, const NameRules& names);

}  // namespace fsdp::train
