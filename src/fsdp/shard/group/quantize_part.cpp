#include "fsdp/shard/group/quantize_part.h"

#include <algorithm>
#include <bit>

#include "fsdp/base/block_scale.h"
#include "fsdp/base/check.h"

namespace fsdp {

namespace {

// Calls body(row, first column, values, number of elements) for each row that the part touches.
template <typename Body>
void for_rows(const MatrixPart& part, const Body& body) {
  for (int64_t at = part.range.begin; at < part.range.end;) {
    const int64_t column = at % part.columns;
    const int64_t count = std::min(part.columns - column, part.range.end - at);
    body(at / part.columns, column, part.values + (at - part.range.begin), count);
    at += count;
  }
}

// Calls body(index of the scale, values, count) for each run of elements that share a scale.
template <typename Body>
void for_runs(const MatrixPart& part, const SharedScales& scales, const Body& body) {
  for_rows(part, [&](int64_t row, int64_t first, const float* values, int64_t in_row) {
    for (int64_t done = 0; done < in_row;) {
      const int64_t column = first + done;
      const int64_t left = scales.block_columns - column % scales.block_columns;
      const int64_t count = std::min(left, in_row - done);
      body(scales.index_of(row, column), values + done, count);
      done += count;
    }
  });
}

uint32_t amax_bits(const float* values, int64_t count) {
  uint32_t amax = 0;
  for (int64_t i = 0; i < count; ++i) amax = std::max(amax, magnitude_bits(values[i]));
  return amax;
}

// e4m3 codes of a run under one factor.
void fp8_codes(const float* values, int64_t count, float factor, uint8_t* codes,
               QuantizeCounts& counts) {
  int64_t overflows = 0;
  int64_t underflows = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t code = fp8_code(values[i], factor);
    codes[i] = code;
    overflows += is_out_of_fp8(values[i], factor);
    underflows += (code & 0x7F) == 0 && magnitude_bits(values[i]) != 0;
  }
  counts.overflows += overflows;
  counts.underflows += underflows;
}

void mxfp8_block(const float* values, int64_t count, uint8_t* codes, uint8_t& scale,
                 QuantizeCounts& counts) {
  scale = e8m0_scale(std::bit_cast<float>(amax_bits(values, count)));
  fp8_codes(values, count, inverse_of_e8m0(scale), codes, counts);
}

}  // namespace

void amax_on_host(const MatrixPart& part, const SharedScales& scales, uint32_t* amaxes) {
  for_runs(part, scales, [&](int64_t index, const float* values, int64_t count) {
    amaxes[index] = std::max(amaxes[index], amax_bits(values, count));
  });
}

void factors_on_host(const uint32_t* amaxes, int64_t count, float* factors, float* scales) {
  for (int64_t i = 0; i < count; ++i) {
    factors[i] = fp8_factor(std::bit_cast<float>(amaxes[i]), kLeastWeightAmax);
    scales[i] = fp8_scale(factors[i]);
  }
}

void quantize_on_host(const MatrixPart& part, WeightRecipe recipe, const float* factors,
                      const QuantizedPart& into) {
  const WeightRecipeRow& row = row_of(recipe);
  if (row.scale_bytes == 4) {
    const SharedScales scales = shared_scales(recipe, part.rows, part.columns);
    uint8_t* codes = into.codes;
    for_runs(part, scales, [&](int64_t index, const float* values, int64_t count) {
      fp8_codes(values, count, factors[index], codes, *into.counts);
      codes += count;
    });
    return;
  }
  const int64_t block = row.scale_columns;
  FSDP_ASSERT(part.columns % block == 0 && part.range.begin % block == 0 &&
              part.range.end % block == 0);
  for (int64_t i = 0; i < part.range.numel() / block; ++i) {
    mxfp8_block(part.values + i * block, block, into.codes + i * block, into.block_scales[i],
                *into.counts);
  }
}

}  // namespace fsdp
