// What the ranks of a tp group or of an ep group have of a parameter, and of its gradient.
#pragma once

#include <array>
#include <cstdint>

#include "fsdp/comm/mesh.h"

namespace fsdp {

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
