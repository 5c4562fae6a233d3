// Quantises a contiguous part of a matrix, on a host or on a CUDA device (in builds without CUDA:
// an Error). What a part becomes does not depend on how the matrix is cut, if amaxes of shared
// scales are those of all parts.
#pragma once

#include <cstdint>

#include "fsdp/base/weight_recipe.h"
#include "fsdp/layout/segment.h"
#include "fsdp/layout/state_bytes.h"

namespace fsdp {

// Elements [range) of a flattened matrix of fp32 numbers.
struct MatrixPart {
  // The first element of the range. A device also reads page-locked memory of its host.
  const float* values = nullptr;
  FlatRange range;
  int64_t rows = 0;
  int64_t columns = 0;
};

// Elements whose code is far from them.
struct QuantizeCounts {
  int64_t overflows = 0;   // out of range: the largest code
  int64_t underflows = 0;  // not 0, but their code is
};

// amaxes[index] = max(amaxes[index], magnitudes of the part); as bits (block_scale.h).
void amax_on_host(const MatrixPart& part, const SharedScales& scales, uint32_t* amaxes);
void amax_on_device(const MatrixPart& part, const SharedScales& scales, uint32_t* amaxes,
                    void* stream);

// Computes all shared scales from their amaxes: what numbers are multiplied by, and what codes are.
void factors_on_host(const uint32_t* amaxes, int64_t count, float* factors, float* scales);
void factors_on_device(const uint32_t* amaxes, int64_t count, float* factors, float* scales,
                       void* stream);

// The part's codes, and where the recipe has them its scales of one byte; all of the part's, from
// its first element on. Parts of such recipes begin and end between two blocks. Adds to `counts`.
struct QuantizedPart {
  uint8_t* codes = nullptr;
  uint8_t* block_scales = nullptr;
  QuantizeCounts* counts = nullptr;
};
void quantize_on_host(const MatrixPart& part, WeightRecipe recipe, const float* factors,
                      const QuantizedPart& into);
void quantize_on_device(const MatrixPart& part, WeightRecipe recipe, const float* factors,
                        const QuantizedPart& into, void* stream);

}  // namespace fsdp
