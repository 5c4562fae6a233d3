#include "fsdp/optim/kernels/moments.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "fsdp/base/check.h"
#include "fsdp/base/narrow_float.h"

namespace fsdp {

namespace {

// Calls body(begin, end, block) for the blocks of scales that a range of elements touches.
template <typename Body>
void for_each_scale_block(FlatRange flat, const Body& body) {
  const int64_t numel = flat.numel();
  int64_t block = 0;
  for (int64_t begin = 0; begin < numel; ++block) {
    const int64_t past = (flat.begin + begin) % kScaleBlock;
    const int64_t end = std::min(begin + kScaleBlock - past, numel);
    body(begin, end, block);
    begin = end;
  }
}

template <typename Narrow>
void read_scaled(const Moment& moment, MomentRole role, FlatRange flat, float* values) {
  const auto* codes = static_cast<const typename Narrow::Code*>(moment.values);
  for_each_scale_block(flat, [&](int64_t begin, int64_t end, int64_t block) {
    const float scale = moment.scales[block];
    for (int64_t i = begin; i < end; ++i)
      values[i] = role == MomentRole::kFirst ? Narrow::widened(codes[i]) * scale
                                             : squared_root<Narrow>(codes[i], scale);
  });
}

template <typename Narrow>
void write_scaled(const float* values, MomentRole role, FlatRange flat, const Moment& moment) {
  auto* codes = static_cast<typename Narrow::Code*>(moment.values);
  const auto kept = [role](float value) {
    return role == MomentRole::kFirst ? value : std::sqrt(value);
  };
  for_each_scale_block(flat, [&](int64_t begin, int64_t end, int64_t block) {
    uint32_t largest = 0;
    for (int64_t i = begin; i < end; ++i)
      largest = std::max(largest, finite_magnitude_bits(kept(values[i])));
    const float scale = block_scale<Narrow>(largest);
    moment.scales[block] = scale;
    for (int64_t i = begin; i < end; ++i)
      codes[i] = Narrow::nearest(kept(values[i]) * inverse_scale(scale));
  });
}

}  // namespace

void read_moment(const Moment& moment, MomentRole role, FlatRange flat, float* values) {
  const auto numel = static_cast<size_t>(flat.numel());
  if (moment.dtype == DType::kFloat32) {
    if (numel > 0) std::memcpy(values, moment.values, numel * sizeof(float));
  } else if (moment.dtype == DType::kBFloat16) {
    const auto* codes = static_cast<const Bf16::Code*>(moment.values);
    std::transform(codes, codes + numel, values, Bf16::widened);
  } else if (moment.dtype == DType::kFloat16) {
    read_scaled<Fp16>(moment, role, flat, values);
  } else if (moment.dtype == DType::kFloat8E4M3) {
    read_scaled<Fp8E4M3>(moment, role, flat, values);
  } else {
    FSDP_ASSERT(moment.dtype == DType::kFloat8E5M2, name_of(moment.dtype));
    read_scaled<Fp8E5M2>(moment, role, flat, values);
  }
}

void write_moment(const float* values, MomentRole role, FlatRange flat, const Moment& moment) {
  const auto numel = static_cast<size_t>(flat.numel());
  if (moment.dtype == DType::kFloat32) {
    if (numel > 0) std::memcpy(moment.values, values, numel * sizeof(float));
  } else if (moment.dtype == DType::kBFloat16) {
    std::transform(values, values + numel, static_cast<Bf16::Code*>(moment.values), Bf16::nearest);
  } else if (moment.dtype == DType::kFloat16) {
    write_scaled<Fp16>(values, role, flat, moment);
  } else if (moment.dtype == DType::kFloat8E4M3) {
    write_scaled<Fp8E4M3>(values, role, flat, moment);
  } else {
    FSDP_ASSERT(moment.dtype == DType::kFloat8E5M2, name_of(moment.dtype));
    write_scaled<Fp8E5M2>(values, role, flat, moment);
  }
}

}  // namespace fsdp
