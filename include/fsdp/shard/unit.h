// fsdp::Unit<M>: a module that is gathered and reduced together, declared where it is called.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/base/error.h"

namespace torch::nn {
class SequentialImpl;
}

namespace fsdp {

// Calls visit(at::Tensor&) for every tensor in `value`. Covers tensors, and optionals, vectors,
// arrays, pairs and tuples of covered types; plain numbers, enums and the like have none. For your
// own type write a specialisation with the same three members.
template <typename T>
struct TensorFields {
  static constexpr bool kKnown = !std::is_class_v<T>;  // numbers have no tensors; a class might
  static constexpr bool kHasTensors = false;
  static void visit(T&, const auto&) {}
};

template <>
struct TensorFields<at::Tensor> {
  static constexpr bool kKnown = true;
  static constexpr bool kHasTensors = true;
  static void visit(at::Tensor& tensor, const auto& visitor) { visitor(tensor); }
};

template <typename T>
struct TensorFields<std::optional<T>> {
  static constexpr bool kKnown = TensorFields<T>::kKnown;
  static constexpr bool kHasTensors = TensorFields<T>::kHasTensors;
  static void visit(std::optional<T>& value, const auto& visitor) {
    if (value) TensorFields<T>::visit(*value, visitor);
  }
};

template <typename T>
struct TensorFields<std::vector<T>> {
  static constexpr bool kKnown = TensorFields<T>::kKnown;
  static constexpr bool kHasTensors = TensorFields<T>::kHasTensors;
  static void visit(std::vector<T>& values, const auto& visitor) {
    if constexpr (kHasTensors)
      for (T& value : values) TensorFields<T>::visit(value, visitor);
  }
};

template <typename T, size_t kCount>
struct TensorFields<std::array<T, kCount>> {
  static constexpr bool kKnown = TensorFields<T>::kKnown;
  static constexpr bool kHasTensors = TensorFields<T>::kHasTensors;
  static void visit(std::array<T, kCount>& values, const auto& visitor) {
    for (T& value : values) TensorFields<T>::visit(value, visitor);
  }
};

template <typename... T>
struct TensorFields<std::tuple<T...>> {
  static constexpr bool kKnown = (TensorFields<T>::kKnown && ...);
  static constexpr bool kHasTensors = (TensorFields<T>::kHasTensors || ...);
  static void visit(std::tuple<T...>& values, const auto& visitor) {
    std::apply([&](T&... each) { (TensorFields<T>::visit(each, visitor), ...); }, values);
  }
};

template <typename A, typename B>
struct TensorFields<std::pair<A, B>> {
  static constexpr bool kKnown = TensorFields<A>::kKnown && TensorFields<B>::kKnown;
  static constexpr bool kHasTensors = TensorFields<A>::kHasTensors || TensorFields<B>::kHasTensors;
  static void visit(std::pair<A, B>& values, const auto& visitor) {
    TensorFields<A>::visit(values.first, visitor);
    TensorFields<B>::visit(values.second, visitor);
  }
};

// The engine's work around one call of a unit's forward. Made by fully_shard().
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

// The common base of all units: the seam between a module and the engine.
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

// R(A...) of a forward that is neither overloaded nor a template.
template <typename Member>
struct SignatureOf;
template <typename C, typename R, typename... A>
struct SignatureOf<R (C::*)(A...)> {
  using type = R(A...);
};
template <typename C, typename R, typename... A>
struct SignatureOf<R (C::*)(A...) const> : SignatureOf<R (C::*)(A...)> {};

template <typename Impl>
struct DefaultSignature {
  static_assert(HasPlainForward<Impl>,
                "fsdp::Unit<M>: M has several forwards, or a template; name the one that is meant, "
                "e.g. fsdp::Unit<M, torch::Tensor(torch::Tensor, int64_t)>");
  using type = typename SignatureOf<decltype(&Impl::forward)>::type;
};
// For a forward that is a template.
template <>
struct DefaultSignature<torch::nn::SequentialImpl> {
  using type = at::Tensor(at::Tensor);
};

// An argument as forward gets it: a copy of a tensor, because the engine may replace it by a view;
// otherwise the caller's object. A tensor that forward changes for its caller (T&) is left alone.
template <typename A>
inline constexpr bool kIsCopied =
    TensorFields<std::remove_cvref_t<A>>::kHasTensors &&
    !(std::is_lvalue_reference_v<A> && !std::is_const_v<std::remove_reference_t<A>>);
template <typename A>
using Argument = std::conditional_t<kIsCopied<A>, std::remove_cvref_t<A>, A&&>;

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

// The first of A..., as many as in B...: the arguments of a call that omits trailing ones.
template <typename Taken, typename Left, size_t kCount>
struct FirstOf;
template <typename... T, typename... L>
struct FirstOf<std::tuple<T...>, std::tuple<L...>, 0> {
  using type = std::tuple<T...>;
};
template <typename... T, typename F, typename... L, size_t kCount>
requires(kCount > 0) struct FirstOf<std::tuple<T...>, std::tuple<F, L...>, kCount>
    : FirstOf<std::tuple<T..., F>, std::tuple<L...>, kCount - 1> {
};

template <typename Impl, typename Signature>
class UnitImpl;

// The unit *is* the module (it inherits), so that the tree has the module's own names.
template <typename Impl, typename R, typename... A>
class UnitImpl<Impl, R(A...)> : public Impl, public UnitBase {
 public:
  using Impl::Impl;

  R forward(A... args) { return call<A...>(std::forward<A>(args)...); }

  // forward() without trailing arguments that have defaults in Impl::forward.
  template <typename... B>
  R forward_with_defaults(B&&... args) {
    using First = typename FirstOf<std::tuple<>, std::tuple<A...>, sizeof...(B)>::type;
    return [&]<typename... F>(std::type_identity<std::tuple<F...>>) -> R {
      return call<F...>(static_cast<F>(std::forward<B>(args))...);
    }(std::type_identity<First>());
  }
  static constexpr size_t kNumArguments = sizeof...(A);

  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<torch::Device>& = std::nullopt) const override {
    throw Error("a unit cannot be cloned; build the module again and load its parameters");
  }

 private:
  template <typename... F>
  R call(F&&... args) {
    if (!is_sharded()) return Impl::forward(std::forward<F>(args)...);
    return call_as_unit<R, F...>(
        *hooks_, [this](F... each) -> R { return Impl::forward(std::forward<F>(each)...); },
        std::forward<F>(args)...);
  }
};

template <typename M, typename Signature>
struct UnitOf {
  using Impl = typename ContainedIn<M>::type;
  using type = UnitImpl<Impl, Signature>;
};
template <typename M>
struct UnitOf<M, void> : UnitOf<M, typename DefaultSignature<typename ContainedIn<M>::type>::type> {
};

}  // namespace detail

// A module whose parameters are gathered before its forward and backward and released after, and
// whose gradients are reduced together. M is a module holder (Linear, or a TORCH_MODULE) or a
// module class. Constructed with M's own arguments, registered and called like M:
//
//   struct NetImpl : torch::nn::Module {
//     fsdp::Unit<Block> first{register_module("first", fsdp::Unit<Block>(64))};
//     torch::Tensor forward(torch::Tensor x) { return first(x); }
//   };
//
// Before fully_shard() it behaves exactly like M. Units may contain units; they work in Sequential
// and ModuleList, and Unit<torch::nn::Sequential> is one unit. Called as first(x), it takes M's
// default arguments; first->forward(...) takes all arguments.
//
// If forward is overloaded or a template, `Signature` names the one to call: Unit<Block,
// torch::Tensor(torch::Tensor, int64_t)>. The unit has no other.
template <typename M, typename Signature = void>
class Unit : public torch::nn::ModuleHolder<typename detail::UnitOf<M, Signature>::type> {
 public:
  using Impl = typename detail::UnitOf<M, Signature>::type;
  using torch::nn::ModuleHolder<Impl>::ModuleHolder;

  template <typename... B>
  decltype(auto) operator()(B&&... args) {
    if constexpr (sizeof...(B) == Impl::kNumArguments)
      return (*this)->forward(std::forward<B>(args)...);
    else
      return (*this)->forward_with_defaults(std::forward<B>(args)...);
  }
};

}  // namespace fsdp
