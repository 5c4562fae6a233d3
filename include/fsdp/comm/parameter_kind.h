// What the ranks of a tp group or of an ep group have of a parameter, and of its gradient; and the
// grid of ranks over which it is then sharded.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace fsdp {

// All parameters are dense unless a module says otherwise (parallel_module.h).
enum class GridKind : uint8_t { kDense, kTensor, kExpert };
inline constexpr std::array kGridKinds{GridKind::kDense, GridKind::kTensor, GridKind::kExpert};

enum class ParameterKind : uint8_t {
  kEqual,    // whole, with equal gradients on the ranks of a tp group: without tp, every dense one
  kPartial,  // whole, with a part of its gradient on each rank of a tp group
  kTensor,   // a slice on each rank of a tp group
  kExpert,   // a slice on each rank of an ep group
};

struct ParameterKindRow {
  ParameterKind kind;
  GridKind grid;     // over which it is cut and reduced
  const char* name;  // of its buckets
};

inline constexpr std::array kParameterKinds{
    ParameterKindRow{ParameterKind::kEqual, GridKind::kDense, ""},
    ParameterKindRow{ParameterKind::kPartial, GridKind::kDense, "partial"},
    ParameterKindRow{ParameterKind::kTensor, GridKind::kTensor, "tensor"},
    ParameterKindRow{ParameterKind::kExpert, GridKind::kExpert, "expert"}};

constexpr const ParameterKindRow& row_of(ParameterKind kind) {
  return kParameterKinds[static_cast<size_t>(kind)];
}

}  // namespace fsdp
