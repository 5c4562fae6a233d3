// fsdp::call_unit(): calls a module that ShardOptions::units has made a unit.
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

#include "fsdp/shard/unit.h"

namespace fsdp {

// The hooks around calls of a module that ShardOptions::units names; nullptr for other modules. Any
// thread may call it.
UnitHooks* named_unit_hooks(const torch::nn::Module& module);

namespace detail {

template <typename M>
auto& module_in(M& module) {
  if constexpr (
      requires { typename M::ContainedType; } || requires { module.get(); })
    return *module;
  else
    return module;
}

// An argument of call_unit() as forward gets it: a copy of a tensor, because the engine may replace
// it by a view; otherwise the caller's object.
template <typename B>
using Handed = std::conditional_t<TensorFields<std::remove_cvref_t<B>>::kHasTensors,
                                  std::remove_cvref_t<B>, B&&>;

}  // namespace detail

// module.forward(args...), with the module gathered around it if it is a unit. For modules whose
// class cannot be changed to Unit<M>: name them in ShardOptions::units and call them with this
// function. `module` is a module holder, a shared pointer or a module. Without fully_shard(), or
// for a module that is not a unit, it is a plain call. The module is a unit as long as the Sharded
// that fully_shard() returned lives.
//
//   torch::Tensor forward(torch::Tensor x) {
//     for (auto& layer : layers) x = fsdp::call_unit(layer, x);
//     return x;
//   }
//   auto sharded = fsdp::fully_shard(model, mesh, {.units = {"layers.*"}});
template <typename M, typename... B>
auto call_unit(M&& module, B&&... args) {
  auto& impl = detail::module_in(module);
  UnitHooks* hooks = named_unit_hooks(impl);
  if (hooks == nullptr) return impl.forward(std::forward<B>(args)...);
  using R = decltype(impl.forward(std::forward<B>(args)...));
  return detail::call_as_unit<R, detail::Handed<B>...>(
      *hooks,
      [&impl](auto&&... each) -> R { return impl.forward(std::forward<decltype(each)>(each)...); },
      detail::Handed<B>(std::forward<B>(args))...);
}

}  // namespace fsdp
