// fsdp::Unit<M>: a module that is gathered and reduced together, declared where it is called.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>

#include "fsdp/base/error.h"
#include "fsdp/shard/tensor_fields.h"

namespace fsdp {

// What the engine does around one call of a unit's forward. Made by fully_shard().
class UnitHooks {
 public:
  virtual ~UnitHooks() = default;

  // One call, from before its forward until after its backward.
  class Call {
   public:
    virtual ~Call() = default;
    // Both may replace tensors by views of them.
    virtual void enter(std::span<at::Tensor* const> inputs) = 0;
    virtual void leave(std::span<at::Tensor* const> outputs) = 0;
    virtual void fail() noexcept = 0;
  };
  virtual std::shared_ptr<Call> begin_call() = 0;
};

// What is common to units of all modules: the seam between a module and the engine.
class UnitBase {
 public:
  virtual ~UnitBase() = default;
  bool is_sharded() const { return hooks_ != nullptr; }
  void attach(std::shared_ptr<UnitHooks> hooks) { hooks_ = std::move(hooks); }

 protected:
  std::shared_ptr<UnitHooks> hooks_;  // none: forward is a plain call
};

namespace detail {

template <typename M>
struct ContainedIn {
  using type = M;
};
template <typename M>
requires requires { typename M::ContainedType; }
struct ContainedIn<M> {
  using type = typename M::ContainedType;
};

template <typename Impl>
concept HasPlainForward = requires {
  &Impl::forward;
};

// An argument as forward gets it: its own copy where the engine may put a view in place of a
// tensor, the caller's object otherwise. A tensor that forward wants to change for its caller (T&)
// is left alone.
template <typename A>
inline constexpr bool kIsCopied =
    TensorFields<std::remove_cvref_t<A>>::kHasTensors &&
    !(std::is_lvalue_reference_v<A> && !std::is_const_v<std::remove_reference_t<A>>);
template <typename A>
using Argument = std::conditional_t<kIsCopied<A>, std::remove_cvref_t<A>, A&&>;

template <typename Impl, typename Forward>
class UnitImpl;

// Runs `forward` between the two ends of a call.
template <typename R, typename... A>
R call_as_unit(UnitHooks& hooks, const auto& forward, A&&... args) {
  static_assert(TensorFields<R>::kKnown && !std::is_void_v<R>,
                "fsdp::Unit: forward must return something whose tensors are known; specialise "
                "fsdp::TensorFields for a class of your own");
  const std::shared_ptr<UnitHooks::Call> call = hooks.begin_call();
  try {
    std::tuple<Argument<A>...> arguments(std::forward<A>(args)...);
    c10::SmallVector<at::Tensor*, 8> tensors;
    const auto collect = [&](at::Tensor& tensor) {
      if (tensor.defined()) tensors.push_back(&tensor);
    };
    const auto collect_copied = [&]<typename B>(B& each, auto is_copied) {
      if constexpr (decltype(is_copied)::value) TensorFields<B>::visit(each, collect);
    };
    std::apply(
        [&](auto&... each) { (collect_copied(each, std::bool_constant<kIsCopied<A>>{}), ...); },
        arguments);
    call->enter(tensors);
    R result = std::apply([&](auto&... each) -> R { return forward(static_cast<A&&>(each)...); },
                          arguments);
    tensors.clear();
    TensorFields<R>::visit(result, collect);
    call->leave(tensors);
    return result;
  } catch (...) {
    call->fail();
    throw;
  }
}

// The unit *is* the module (it inherits), so that names in the tree are the module's own.
template <typename Impl, typename C, typename R, typename... A>
class UnitImpl<Impl, R (C::*)(A...)> : public Impl, public UnitBase {
 public:
  using Impl::Impl;

  R forward(A... args) {
    if (!is_sharded()) return Impl::forward(std::forward<A>(args)...);
    return call_as_unit<R, A...>(
        *hooks_, [this](A... each) -> R { return Impl::forward(std::forward<A>(each)...); },
        std::forward<A>(args)...);
  }

  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& = std::nullopt) const override {
    throw Error("a unit cannot be cloned; build the module again and load its parameters");
  }
};

template <typename Impl, typename C, typename R, typename... A>
class UnitImpl<Impl, R (C::*)(A...) const> : public UnitImpl<Impl, R (C::*)(A...)> {
 public:
  using UnitImpl<Impl, R (C::*)(A...)>::UnitImpl;
};

template <typename M>
struct UnitOf {
  using Impl = typename ContainedIn<M>::type;
  static_assert(HasPlainForward<Impl>,
                "fsdp::Unit<M>: M needs one forward that is neither overloaded nor a template");
  using type = UnitImpl<Impl, decltype(&Impl::forward)>;
};

}  // namespace detail

// A module whose parameters are gathered before its forward and backward and let go after, and
// whose gradients are reduced together. M is a module holder (Linear, or what TORCH_MODULE made) or
// a module class. Made with M's own constructor arguments, registered and called like M:
//
//   struct NetImpl : torch::nn::Module {
//     fsdp::Unit<Block> first{register_module("first", fsdp::Unit<Block>(64))};
//     torch::Tensor forward(torch::Tensor x) { return first(x); }
//   };
//
// Before fully_shard() it is M and nothing else. Units may contain units; works in Sequential and
// ModuleList.
template <typename M>
class Unit : public torch::nn::ModuleHolder<typename detail::UnitOf<M>::type> {
 public:
  using torch::nn::ModuleHolder<typename detail::UnitOf<M>::type>::ModuleHolder;
};

}  // namespace fsdp
