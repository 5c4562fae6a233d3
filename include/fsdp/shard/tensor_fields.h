// Finds the tensors in the arguments and results of a forward, so that a unit can attach to them.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

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

}  // namespace fsdp
