#include "fsdp/shard/call_unit.h"

#include <mutex>
#include <unordered_map>

#include "fsdp/base/check.h"
#include "fsdp/shard/engine/unit_call.h"

namespace fsdp {

namespace {

// The named units of all models of this process; ranks may be its threads.
struct NamedUnits {
  std::mutex mutex;
  std::unordered_map<const torch::nn::Module*, UnitHooks*> hooks;
};

NamedUnits& named_units() {
  static NamedUnits units;
  return units;
}

// Lives as long as the engine, which it must not keep alive: nothing in the module holds it.
class NamedUnitHooks final : public UnitHooks {
 public:
  NamedUnitHooks(const torch::nn::Module& module, std::weak_ptr<Engine> engine, ShardedUnit& unit)
      : module_(&module), engine_(std::move(engine)), unit_(unit) {
    const std::scoped_lock lock(named_units().mutex);
    named_units().hooks[module_] = this;
  }
  ~NamedUnitHooks() override {
    const std::scoped_lock lock(named_units().mutex);
    named_units().hooks.erase(module_);
  }

  std::shared_ptr<Call> begin_call() override {
    std::shared_ptr<Engine> engine = engine_.lock();
    FSDP_ASSERT(engine != nullptr);
    return std::make_shared<UnitCall>(std::move(engine), unit_);
  }

 private:
  const torch::nn::Module* const module_;
  const std::weak_ptr<Engine> engine_;
  ShardedUnit& unit_;
};

}  // namespace

UnitHooks* named_unit_hooks(const torch::nn::Module& module) {
  const std::scoped_lock lock(named_units().mutex);
  const auto found = named_units().hooks.find(&module);
  return found == named_units().hooks.end() ? nullptr : found->second;
}

std::unique_ptr<UnitHooks> make_named_unit_hooks(const torch::nn::Module& module,
                                                 std::weak_ptr<Engine> engine, ShardedUnit& unit) {
  return std::make_unique<NamedUnitHooks>(module, std::move(engine), unit);
}

}  // namespace fsdp
