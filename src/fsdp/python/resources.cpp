#include "fsdp/python/resources.h"

#include <mutex>
#include <utility>
#include <vector>

#include "fsdp/shard/fully_shard.h"

namespace fsdp {

namespace {

std::mutex resources_mutex;

std::vector<std::weak_ptr<Resource>>& all_resources() {
  static auto* resources = new std::vector<std::weak_ptr<Resource>>;  // outlives every handle
  return *resources;
}

}  // namespace

void remember(const std::shared_ptr<Resource>& resource) {
  const std::lock_guard lock(resources_mutex);
  std::erase_if(all_resources(), [](const auto& each) { return each.expired(); });
  all_resources().push_back(resource);
}

void close_all() {
  while (true) {
    std::shared_ptr<Resource> newest;
    {
      const std::lock_guard lock(resources_mutex);
      if (all_resources().empty()) return;
      newest = all_resources().back().lock();
      all_resources().pop_back();
    }
    if (newest) newest->close();
  }
}

void leave_to_parent() {
  // A thread that held it has no counterpart here.
  const std::unique_lock lock(resources_mutex, std::try_to_lock);
  if (!lock) return;
  for (const std::weak_ptr<Resource>& each : std::exchange(all_resources(), {}))
    if (std::shared_ptr<Resource> resource = each.lock())
      new std::shared_ptr<Resource>(std::move(resource));
}

ShardedModel::ShardedModel(std::shared_ptr<RankMesh> over, std::shared_ptr<ModuleMirror> model,
                           const ShardOptions& options)
    : mesh(std::move(over)),
      root(std::move(model)),
      sharded(fully_shard(std::static_pointer_cast<torch::nn::Module>(root), mesh->mesh.get(),
                          options)) {}

void ShardedModel::close() {
  root->detach();
  sharded.close();
}

}  // namespace fsdp
