#include "fsdp/checkpoint/format/tensor_stream.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/narrow_float.h"
#include "fsdp/base/utf8.h"
#include "fsdp/checkpoint/format/verified_reads.h"

namespace fsdp {

namespace {

// Bytes of a file may lie at any address.
template <typename Value>
Value load(const std::byte* from) {
  Value value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// Calls body(read), where read(address) gives the number there, as it is or widened to fp32.
template <typename Body>
void with_reader(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat64:
      return body([](const std::byte* at) { return load<double>(at); });
    case DType::kFloat32:
      return body([](const std::byte* at) { return load<float>(at); });
    case DType::kFloat16:
      return body([](const std::byte* at) { return Fp16::widened(load<Fp16::Code>(at)); });
    case DType::kBFloat16:
      return body([](const std::byte* at) { return Bf16::widened(load<Bf16::Code>(at)); });
    case DType::kFloat8E4M3:
      return body([](const std::byte* at) { return Fp8E4M3::widened(load<Fp8E4M3::Code>(at)); });
    case DType::kFloat8E5M2:
      return body([](const std::byte* at) { return Fp8E5M2::widened(load<Fp8E5M2::Code>(at)); });
    case DType::kInt64:
      return body([](const std::byte* at) { return load<int64_t>(at); });
    case DType::kInt32:
      return body([](const std::byte* at) { return load<int32_t>(at); });
    case DType::kUInt8:
      return body([](const std::byte* at) { return load<uint8_t>(at); });
  }
}

// Cuts fp64 to fp32 and sets the last bit if anything was cut, for callers that round again.
// Rounding the result to a type of at most 22 bits is then the same as rounding the fp64 number;
// rounding to fp32 first could make a tie where there is none.
float rounded_to_odd(double value) {
  auto nearest = static_cast<float>(value);
  if (std::isnan(nearest) || static_cast<double>(nearest) == value) return nearest;
  auto bits = std::bit_cast<uint32_t>(nearest);
  const bool is_too_far = std::abs(static_cast<double>(nearest)) > std::abs(value);
  if (is_too_far) --bits;  // also from Inf to the largest number
  return std::bit_cast<float>(bits | 1u);
}
float rounded_to_odd(float value) { return value; }

// Calls body(write), where write(address, number) stores a number.
template <typename Body>
void with_writer(DType dtype, const Body& body) {
  const auto store = [](std::byte* to, auto value) { std::memcpy(to, &value, sizeof value); };
  switch (dtype) {
    case DType::kFloat64:
      return body([&](std::byte* to, auto value) { store(to, static_cast<double>(value)); });
    case DType::kFloat32:
      return body([&](std::byte* to, auto value) { store(to, static_cast<float>(value)); });
    case DType::kFloat16:
      return body(
          [&](std::byte* to, auto value) { store(to, Fp16::nearest(rounded_to_odd(value))); });
    case DType::kBFloat16:
      return body(
          [&](std::byte* to, auto value) { store(to, Bf16::nearest(rounded_to_odd(value))); });
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
    case DType::kInt64:
    case DType::kInt32:
    case DType::kUInt8:
      break;
  }
  FSDP_ASSERT(false, "no conversion to ", name_of(dtype));
}

// Finite numbers of this size or more become Inf.
double first_overflow(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return 65520.0;  // between the largest, 65504, and the next number
    case DType::kBFloat16:
      return 0x1.FFp127;
    case DType::kFloat32:
      return 0x1.FFFFFFp127;
    case DType::kFloat64:
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
    case DType::kInt64:
    case DType::kInt32:
    case DType::kUInt8:
      break;
  }
  return std::numeric_limits<double>::infinity();
}

}  // namespace

void read_values(DType dtype, std::span<const std::byte> bytes, std::span<double> values) {
  const auto width = static_cast<size_t>(element_bytes(dtype));
  FSDP_ASSERT(bytes.size() == values.size() * width, bytes.size(), " bytes");
  with_reader(dtype, [&](auto read) {
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<double>(read(bytes.data() + i * width));
  });
}

int64_t convert_values(DType from, std::span<const std::byte> bytes, DType to,
                       std::span<std::byte> into) {
  FSDP_ASSERT(is_floating(from), "no conversion from ", name_of(from));
  const auto from_width = static_cast<size_t>(element_bytes(from));
  const auto to_width = static_cast<size_t>(element_bytes(to));
  const size_t numel = bytes.size() / from_width;
  FSDP_ASSERT(into.size() == numel * to_width, into.size(), " bytes");
  const double too_large = first_overflow(to);
  int64_t num_overflows = 0;
  with_reader(from, [&](auto read) {
    using Value = decltype(read(bytes.data()));
    if constexpr (std::is_floating_point_v<Value>) {
      with_writer(to, [&](auto write) {
        for (size_t i = 0; i < numel; ++i) {
          const Value value = read(bytes.data() + i * from_width);
          const double magnitude = std::abs(static_cast<double>(value));
          num_overflows += magnitude >= too_large && !std::isinf(magnitude) ? 1 : 0;
          write(into.data() + i * to_width, value);
        }
      });
    }
  });
  return num_overflows;
}

int64_t numel_of(const StoredTensor& tensor) {
  int64_t numel = 1;
  for (const int64_t size : tensor.shape) numel *= size;
  return numel;
}

int64_t bytes_of(const StoredTensor& tensor) {
  return numel_of(tensor) * element_bytes(tensor.dtype);
}

void read_elements(std::span<const CheckedFile> files, const CatalogTensor& tensor, FlatRange range,
                   std::byte* into) {
  const std::vector<int64_t> strides = strides_of(tensor.tensor.shape);
  std::vector<FileRun> runs;
  for (const Box& box : boxes(tensor.tensor.shape, range)) {
    StridedBox target{box, strides, -range.begin};
    for (size_t i = 0; i < strides.size(); ++i) target.begin += box.offsets[i] * strides[i];
    add_runs(tensor, target, into, runs);
  }
  read_runs(files, std::move(runs));
}

void for_each_chunk(int64_t numel, int64_t width, const std::function<void(FlatRange)>& body) {
  const int64_t step = std::max<int64_t>(kStreamBytes / width, 1);
  for (int64_t begin = 0; begin < numel; begin += step)
    body({begin, std::min(begin + step, numel)});
}

ConvertedReads::ConvertedReads(std::span<const CheckedFile> files, std::optional<DType> dtype,
                               OnBytes on_bytes, std::set<std::string> kept)
    : files_(files), dtype_(dtype), on_bytes_(std::move(on_bytes)), kept_(std::move(kept)) {}

DType ConvertedReads::dtype_of(const StoredTensor& tensor) const {
  const bool is_converted = is_floating(tensor.dtype) && !kept_.contains(tensor.name);
  return is_converted ? dtype_.value_or(tensor.dtype) : tensor.dtype;
}

int64_t ConvertedReads::bytes_of(const StoredTensor& tensor) const {
  return numel_of(tensor) * element_bytes(dtype_of(tensor));
}

void ConvertedReads::read(const CatalogTensor& tensor, FlatRange range, std::byte* into) {
  const DType from = tensor.tensor.dtype;
  const DType to = dtype_of(tensor.tensor);
  const int64_t bytes = range.numel() * element_bytes(to);
  if (from == to) {
    read_elements(files_, tensor, range, into);
  } else {
    stored_.resize(static_cast<size_t>(range.numel() * element_bytes(from)));
    read_elements(files_, tensor, range, stored_.data());
    const int64_t num_overflows =
        convert_values(from, stored_, to, {into, static_cast<size_t>(bytes)});
    FSDP_CHECK(num_overflows == 0, "tensor '", shown(tensor.tensor.name), "' has ", num_overflows,
               " numbers that are too large for ", name_of(to), "; keep ", name_of(from),
               ", or choose a type with a larger range");
  }
  if (on_bytes_) on_bytes_(bytes);
}

}  // namespace fsdp
