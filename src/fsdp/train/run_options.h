// Turns a person's settings into the options of engine, optimizer and communicators.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <string>

#include "fsdp/base/dtype.h"
#include "fsdp/comm/comm_options.h"
#include "fsdp/comm/launch.h"
#include "fsdp/optim/optimizer.h"
#include "fsdp/shard/options.h"
#include "fsdp/train/machine.h"
#include "fsdp/train/settings/train_options.h"

namespace fsdp::train {

// The device that a rank computes on. UsageError where --device asks for a missing one.
c10::Device training_device(const TrainOptions& options, int local_rank);

// How many ranks share this host, and how many this device.
RanksHere ranks_here(const Launch& launch, int64_t num_ranks, c10::Device device);

// The type of weights and activations.
DType compute_dtype(const TrainOptions& options, c10::Device device);

// Says in a sentence why this type is slow on this device; "" where it is not.
std::string slow_compute_text(DType compute, c10::Device device, const CpuTypes& cpu);

// The facts about the device that plan_run() needs.
RankDevice rank_device(const TrainOptions& options, c10::Device device, const RanksHere& ranks);

// Takes the environment variables where flags say nothing.
CommOptions comm_options(const TrainOptions& options);
ShardOptions shard_options(const TrainOptions& options, c10::Device device);
std::unique_ptr<Optimizer> make_optimizer(const TrainOptions& options, const Sharded& sharded);

}  // namespace fsdp::train
