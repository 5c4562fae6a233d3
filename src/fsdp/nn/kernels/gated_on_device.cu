// activation(gate) * up and its two gradients: every number is read once and written once.
#include "fsdp/base/kernel_launch.cuh"
#include "fsdp/base/packed_access.cuh"
#include "fsdp/nn/kernels/layer_kernels.h"

namespace fsdp::nn {

namespace {

constexpr int kThreads = 256;

// An activation's value, and its slope.
struct ValueAndSlope {
  float value;
  float slope;
};

struct Silu {
  static __device__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }
  static __device__ float value(float x) { return x * sigmoid(x); }
  static __device__ ValueAndSlope both(float x) {
    const float s = sigmoid(x);
    return {x * s, s * (1.0f + x * (1.0f - s))};
  }
};

struct Gelu {
  static __device__ float half_of_area(float x) { return 0.5f * (1.0f + erff(x * 0.70710678f)); }
  static __device__ float value(float x) { return x * half_of_area(x); }
  static __device__ ValueAndSlope both(float x) {
    constexpr float kDensityAtZero = 0.39894228f;  // of a normal distribution
    const float area = half_of_area(x);
    return {x * area, area + x * kDensityAtZero * expf(-0.5f * x * x)};
  }
};

struct GeluTanh {
  static constexpr float kInner = 0.79788456f;  // sqrt(2 / pi)
  static constexpr float kCubic = 0.044715f;
  static __device__ float bend(float x) { return tanhf(kInner * (x + kCubic * x * x * x)); }
  static __device__ float value(float x) { return 0.5f * x * (1.0f + bend(x)); }
  static __device__ ValueAndSlope both(float x) {
    const float t = bend(x);
    const float inner_slope = kInner * (1.0f + 3.0f * kCubic * x * x);
    return {0.5f * x * (1.0f + t), 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * inner_slope};
  }
};

// Finds number i of gate and up.
struct Rows {
  int64_t columns;
  int64_t stride;
  __device__ int64_t place(int64_t i) const {
    return columns == stride ? i : i + i / columns * (stride - columns);
  }
};

template <typename Activation, int kCount, typename T>
__device__ void forward_at(const T* gate, const T* up, const Rows& rows, T* result, int64_t i) {
  const int64_t place = rows.place(i);
  const Floats<kCount> g = load_pack<kCount>(gate + place);
  const Floats<kCount> u = load_pack<kCount>(up + place);
  Floats<kCount> y;
#pragma unroll
  for (int k = 0; k < kCount; ++k) y.of[k] = Activation::value(g.of[k]) * u.of[k];
  store_pack(result + i, y);
}

template <typename T>
struct Gradients {
  const T* of_result;
  T* of_gate;
  T* of_up;
};

template <typename Activation, int kCount, typename T>
__device__ void backward_at(const T* gate, const T* up, const Rows& rows,
                            const Gradients<T>& gradients, int64_t i) {
  const int64_t place = rows.place(i);
  const Floats<kCount> g = load_pack<kCount>(gate + place);
  const Floats<kCount> u = load_pack<kCount>(up + place);
  const Floats<kCount> d = load_pack<kCount>(gradients.of_result + i);
  Floats<kCount> dg;
  Floats<kCount> du;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const ValueAndSlope at = Activation::both(g.of[k]);
    du.of[k] = d.of[k] * at.value;
    dg.of[k] = d.of[k] * u.of[k] * at.slope;
  }
  store_pack(gradients.of_gate + place, dg);
  store_pack(gradients.of_up + place, du);
}

// Calls body(count, i) for this thread's numbers: whole packs, and the rest one by one.
template <int kCount, typename Body>
__device__ void at_own_numbers(int64_t numel, const Body& body) {
  const int64_t begin =
      (static_cast<int64_t>(blockIdx.x) * kThreads + static_cast<int64_t>(threadIdx.x)) * kCount;
  if (begin + kCount <= numel) {
    body(std::integral_constant<int, kCount>{}, begin);
  } else {
    for (int64_t i = begin; i < numel; ++i) body(std::integral_constant<int, 1>{}, i);
  }
}

template <typename Activation, int kCount, typename T>
__global__ void __launch_bounds__(kThreads)
    gated_kernel(const T* gate, const T* up, Rows rows, T* result, int64_t numel) {
  at_own_numbers<kCount>(numel, [&](auto count, int64_t i) {
    forward_at<Activation, decltype(count)::value>(gate, up, rows, result, i);
  });
}

template <typename Activation, int kCount, typename T>
__global__ void __launch_bounds__(kThreads)
    gated_backward_kernel(const T* gate, const T* up, Rows rows, Gradients<T> gradients,
                          int64_t numel) {
  at_own_numbers<kCount>(numel, [&](auto count, int64_t i) {
    backward_at<Activation, decltype(count)::value>(gate, up, rows, gradients, i);
  });
}

// Whether a pack never crosses the end of a row.
bool rows_are_packs(const GatedMemory& memory) {
  const int64_t count = kPackBytes / element_bytes(memory.dtype);
  return memory.columns == memory.stride ||
         (memory.columns % count == 0 && memory.stride % count == 0);
}

template <typename Body>
void with_activation(GatedActivation activation, const Body& body) {
  switch (activation) {
    case GatedActivation::kSilu:
      return body(Silu{});
    case GatedActivation::kGelu:
      return body(Gelu{});
    case GatedActivation::kGeluTanh:
      return body(GeluTanh{});
  }
}

unsigned blocks_for(int64_t numel, int per_thread) {
  const int64_t per_block = static_cast<int64_t>(kThreads) * per_thread;
  return static_cast<unsigned>((numel + per_block - 1) / per_block);
}

}  // namespace

bool has_device_layers() { return true; }

int device_generation(int device) {
  int major = 0;
  check_call(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
             "cudaDeviceGetAttribute");
  return major;
}

void gated_on_device(const GatedMemory& memory, void* result, void* stream) {
  if (memory.numel == 0) return;
  const bool in_packs = rows_are_packs(memory) && begins_a_pack(memory.gate) &&
                        begins_a_pack(memory.up) && begins_a_pack(result);
  const Rows rows{memory.columns, memory.stride};
  with_activation(memory.activation, [&](auto activation) {
    using Activation = decltype(activation);
    with_kernel_type(memory.dtype, "gated", [&](auto zero) {
      using T = decltype(zero);
      const auto launch = [&](auto kernel, int per_thread) {
        kernel<<<blocks_for(memory.numel, per_thread), kThreads, 0, cuda_stream(stream)>>>(
            static_cast<const T*>(memory.gate), static_cast<const T*>(memory.up), rows,
            static_cast<T*>(result), memory.numel);
      };
      if (in_packs)
        launch(gated_kernel<Activation, kPackCount<T>, T>, kPackCount<T>);
      else
        launch(gated_kernel<Activation, 1, T>, 1);
    });
  });
  check_launch("gated");
}

void gated_backward_on_device(const GatedMemory& memory, const void* gradient, void* gate_gradient,
                              void* up_gradient, void* stream) {
  if (memory.numel == 0) return;
  const bool in_packs = rows_are_packs(memory) && begins_a_pack(memory.gate) &&
                        begins_a_pack(memory.up) && begins_a_pack(gradient) &&
                        begins_a_pack(gate_gradient) && begins_a_pack(up_gradient);
  const Rows rows{memory.columns, memory.stride};
  with_activation(memory.activation, [&](auto activation) {
    using Activation = decltype(activation);
    with_kernel_type(memory.dtype, "gated_backward", [&](auto zero) {
      using T = decltype(zero);
      const Gradients<T> gradients{static_cast<const T*>(gradient), static_cast<T*>(gate_gradient),
                                   static_cast<T*>(up_gradient)};
      const auto launch = [&](auto kernel, int per_thread) {
        kernel<<<blocks_for(memory.numel, per_thread), kThreads, 0, cuda_stream(stream)>>>(
            static_cast<const T*>(memory.gate), static_cast<const T*>(memory.up), rows, gradients,
            memory.numel);
      };
      if (in_packs)
        launch(gated_backward_kernel<Activation, kPackCount<T>, T>, kPackCount<T>);
      else
        launch(gated_backward_kernel<Activation, 1, T>, 1);
    });
  });
  check_launch("gated_backward");
}

}  // namespace fsdp::nn
