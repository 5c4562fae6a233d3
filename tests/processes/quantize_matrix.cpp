// Quantises a matrix of a file, for comparison with what other packages make of it.
//
// Usage: quantize_matrix RECIPE ROWS COLUMNS VALUES CODES SCALES
// VALUES holds fp32 numbers; codes and scales are written as they lie in memory.
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "fsdp/shard/group/quantize_part.h"

namespace {

template <typename T>
void write(const char* path, const std::vector<T>& values) {
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(values.data()),
             static_cast<std::streamsize>(values.size() * sizeof(T)));
}

}  // namespace

int main(int argc, char** argv) {
  const auto recipe = argc >= 7 ? fsdp::parse_weight_recipe(argv[1]) : std::nullopt;
  if (!recipe || *recipe == fsdp::WeightRecipe::kPlain) {
    std::fprintf(stderr, "usage: quantize_matrix RECIPE ROWS COLUMNS VALUES CODES SCALES\n");
    return 2;
  }
  const int64_t rows = std::stoll(argv[2]);
  const int64_t columns = std::stoll(argv[3]);
  const auto numel = static_cast<size_t>(rows * columns);
  std::vector<float> values(numel);
  std::ifstream(argv[4], std::ios::binary)
      .read(reinterpret_cast<char*>(values.data()), static_cast<std::streamsize>(4 * numel));

  const fsdp::WeightRecipeRow& row = row_of(*recipe);
  const fsdp::SharedScales shared = fsdp::shared_scales(*recipe, rows, columns);
  const auto count = static_cast<size_t>(shared.count);
  std::vector<uint32_t> amaxes(count);
  std::vector<float> factors(count);
  std::vector<float> scales(count);
  std::vector<uint8_t> codes(numel);
  std::vector<uint8_t> block_scales(
      row.scale_bytes == 1 ? numel / static_cast<size_t>(row.scale_columns) : 0);
  fsdp::QuantizeCounts counts;
  const fsdp::MatrixPart all{values.data(), {0, rows * columns}, rows, columns};
  if (count > 0) amax_on_host(all, shared, amaxes.data());
  fsdp::factors_on_host(amaxes.data(), shared.count, factors.data(), scales.data());
  quantize_on_host(all, *recipe, factors.data(), {codes.data(), block_scales.data(), &counts});
  write(argv[5], codes);
  if (row.scale_bytes == 1)
    write(argv[6], block_scales);
  else
    write(argv[6], scales);
  return 0;
}
