#include "fsdp/base/dtype.h"

#include <array>

#include "fsdp/base/error.h"

namespace fsdp {

namespace {

struct Row {
  DType dtype;
  std::string_view name;
  int64_t bytes;
  bool floating;
};

constexpr std::array<Row, 9> kTable = {{
    {DType::kFloat64, "fp64", 8, true},
    {DType::kFloat32, "fp32", 4, true},
    {DType::kFloat16, "fp16", 2, true},
    {DType::kBFloat16, "bf16", 2, true},
    {DType::kFloat8E4M3, "fp8_e4m3", 1, true},
    {DType::kFloat8E5M2, "fp8_e5m2", 1, true},
    {DType::kInt64, "int64", 8, false},
    {DType::kInt32, "int32", 4, false},
    {DType::kUInt8, "uint8", 1, false},
}};

const Row& row_of(DType dtype) {
  const auto index = static_cast<size_t>(dtype);
  FSDP_ASSERT(index < kTable.size() && kTable[index].dtype == dtype, "dtype ", index);
  return kTable[index];
}

}  // namespace

int64_t element_bytes(DType dtype) { return row_of(dtype).bytes; }

std::string_view name_of(DType dtype) { return row_of(dtype).name; }

std::optional<DType> parse_dtype(std::string_view name) {
  for (const Row& row : kTable)
    if (row.name == name) return row.dtype;
  return std::nullopt;
}

std::span<const DType> all_dtypes() {
  static constexpr auto kAll = [] {
    std::array<DType, kTable.size()> all{};
    for (size_t i = 0; i < kTable.size(); ++i) all[i] = kTable[i].dtype;
    return all;
  }();
  return kAll;
}

bool is_floating(DType dtype) { return row_of(dtype).floating; }

}  // namespace fsdp
