// Peak rates of GPUs, by the name that the driver gives them.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace fsdp::train {

// The type of matrix products. fp32 ones use TensorFloat32 where libtorch is allowed to.
enum class ProductType : uint8_t { kFloat32, kTensorFloat32, kBFloat16, kFloat16 };

// TFLOP/s of dense matrices, as the manufacturer publishes them; nullopt for a name that is not in
// the table, a part of a GPU (MIG), and a type that the GPU does not have.
std::optional<double> known_peak_tflops(std::string_view device_name, ProductType type);

}  // namespace fsdp::train
