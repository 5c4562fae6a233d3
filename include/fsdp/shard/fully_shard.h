// fully_shard(): turns a plain model into a sharded one.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>

#include "fsdp/comm/mesh.h"
#include "fsdp/shard/options.h"
#include "fsdp/shard/sharded.h"

namespace fsdp {

// Shards the parameters of a model in place over the mesh, unit by unit; all ranks call it with the
// same model (same structure, same values). The model is then used as before.
//
// Parameters outside any unit stay whole between steps, since nothing says when they are used;
// their gradients and optimizer state are sharded like all others. Parameters on the meta device
// are initialised here, one module at a time, in the order of construction.
//
// The mesh must outlive the model; the compiler refuses a temporary one.
Sharded fully_shard(const std::shared_ptr<torch::nn::Module>& model, const Mesh& mesh,
                    const ShardOptions& options = {});
Sharded fully_shard(const std::shared_ptr<torch::nn::Module>& model, const Mesh&& mesh,
                    const ShardOptions& options = {}) = delete;

template <typename Contained>
Sharded fully_shard(const torch::nn::ModuleHolder<Contained>& model, const Mesh& mesh,
                    const ShardOptions& options = {}) {
  return fully_shard(std::static_pointer_cast<torch::nn::Module>(model.ptr()), mesh, options);
}
template <typename Contained>
Sharded fully_shard(const torch::nn::ModuleHolder<Contained>& model, const Mesh&& mesh,
                    const ShardOptions& options = {}) = delete;

}  // namespace fsdp
