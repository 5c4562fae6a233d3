// Objects behind Python's handles that hold threads, connections or memory of a device.
#pragma once

#include <memory>
#include <optional>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/comm/mesh.h"
#include "fsdp/comm/world.h"
#include "fsdp/optim/optimizer.h"
#include "fsdp/python/module_mirror.h"
#include "fsdp/shard/sharded.h"

namespace fsdp {

// Note [Closing before Python ends]
// Python destroys objects that are alive at its end late or never, in any order, when threads and
// MPI may be gone. So fsdp_cpp closes everything in an atexit function, the newest first: the
// objects of ours are destroyed then, and the handles that Python still has are empty. A call
// through an empty handle is an Error.
class Resource {
 public:
  virtual ~Resource() = default;
  // Destroys the object. May be called again.
  virtual void close() = 0;
};

// Remembers the resource, not longer than it lives.
void remember(const std::shared_ptr<Resource>& resource);
// Closes all that are remembered, the newest first.
void close_all();
// In a child of fork(): never destroys them, because their connections are still the parent's.
void leave_to_parent();

template <typename R, typename... Arguments>
std::shared_ptr<R> make_resource(Arguments&&... arguments) {
  auto resource = std::make_shared<R>(std::forward<Arguments>(arguments)...);
  remember(resource);
  return resource;
}

// An object that a handle owns until it is closed.
template <typename T>
class Held {
 public:
  explicit Held(T object) : object_(std::move(object)) {}
  T* operator->() { return &get(); }
  T& get() {
    FSDP_CHECK(object_,
               "fsdp_cpp is closed: its ranks have parted, which happens when Python ends");
    return *object_;
  }
  bool is_open() const { return object_.has_value(); }
  void close() { object_.reset(); }

 private:
  std::optional<T> object_;
};

struct RankWorld final : Resource {
  explicit RankWorld(World joined) : world(std::move(joined)) {}
  void close() override { world.close(); }

  Held<World> world;
};

struct RankMesh final : Resource {
  RankMesh(std::shared_ptr<RankWorld> owner, const MeshOptions& options)
      : ranks(std::move(owner)), mesh(ranks->world->mesh(options)) {}
  void close() override { mesh.close(); }

  std::shared_ptr<RankWorld> ranks;
  Held<Mesh> mesh;
};

struct ShardedModel final : Resource {
  ShardedModel(std::shared_ptr<RankMesh> over, std::shared_ptr<ModuleMirror> model,
               const ShardOptions& options);
  ~ShardedModel() override { close(); }
  // Before that, units call through their mirrors; after it they are plain modules without weights.
  void close() override;

  std::shared_ptr<RankMesh> mesh;
  std::shared_ptr<ModuleMirror> root;
  Held<Sharded> sharded;
};

// An object that works on a sharded model, with its optimizer or without (nullptr), and outlives
// neither.
template <typename T>
class OnModel : public Resource {
 public:
  OnModel(std::shared_ptr<ShardedModel> of_model, std::shared_ptr<OnModel<Optimizer>> updates,
          std::unique_ptr<T> made)
      : model(std::move(of_model)), optimizer(std::move(updates)), object_(std::move(made)) {}
  void close() final { object_.close(); }
  T& get() { return *object_.get(); }

  const std::shared_ptr<ShardedModel> model;
  const std::shared_ptr<OnModel<Optimizer>> optimizer;

 private:
  Held<std::unique_ptr<T>> object_;
};
using ModelOptimizer = OnModel<Optimizer>;

inline Sharded& object_of(ShardedModel& handle) { return handle.sharded.get(); }
template <typename T>
T& object_of(OnModel<T>& handle) {
  return handle.get();
}

// A method of the object behind a handle, as one of the handle.
template <typename Handle, typename T, typename Result, typename... Arguments>
auto method_of(Result (T::*method)(Arguments...)) {
  return [method](Handle& self, Arguments... arguments) -> Result {
    return (object_of(self).*method)(std::forward<Arguments>(arguments)...);
  };
}
template <typename Handle, typename T, typename Result, typename... Arguments>
auto method_of(Result (T::*method)(Arguments...) const) {
  return [method](Handle& self, Arguments... arguments) -> Result {
    return (object_of(self).*method)(std::forward<Arguments>(arguments)...);
  };
}

inline Optimizer* optimizer_in(const std::shared_ptr<ModelOptimizer>& handle) {
  return handle ? &handle->get() : nullptr;
}

}  // namespace fsdp
