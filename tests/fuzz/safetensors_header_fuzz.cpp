// libFuzzer: any first bytes of a file are either a header that describes it whole and can be
// written again, or are refused with an Error that names the file.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "fsdp/base/error.h"
#include "fsdp/checkpoint/format/safetensors_file.h"

namespace {

[[noreturn]] void fail(std::string_view problem) {
  std::fprintf(stderr, "safetensors_header_fuzz: %.*s\n", static_cast<int>(problem.size()),
               problem.data());
  std::abort();
}

void require(bool condition, std::string_view problem) {
  if (!condition) fail(problem);
}

int64_t bytes_of(const fsdp::SafetensorsEntry& entry) {
  if (std::find(entry.shape.begin(), entry.shape.end(), 0) != entry.shape.end()) return 0;
  int64_t bytes = fsdp::element_bytes(entry.dtype);
  for (const int64_t size : entry.shape)
    if (__builtin_mul_overflow(bytes, size, &bytes)) fail("a shape that cannot be counted");
  return bytes;
}

void check(const fsdp::SafetensorsHeader& header, int64_t file_bytes) {
  int64_t covered = 0;
  for (const fsdp::SafetensorsEntry& entry : header.tensors) {
    require(entry.begin == covered, "a hole or an overlap");
    require(entry.end - entry.begin == bytes_of(entry), "data of another length than the shape's");
    covered = entry.end;
  }
  require(header.data_begin + covered == file_bytes, "the tensors are not the file");
}

void check_written_again(const fsdp::SafetensorsHeader& header) {
  fsdp::SafetensorsHeader again = header;
  const std::string bytes = fsdp::write_safetensors_header(again);
  require(again.tensors == header.tensors, "tensors move when they are written again");
  const int64_t data_bytes = header.tensors.empty() ? 0 : header.tensors.back().end;
  int64_t file_bytes = 0;
  if (__builtin_add_overflow(static_cast<int64_t>(bytes.size()), data_bytes, &file_bytes)) return;
  const std::string_view first = std::string_view(bytes).substr(0, 8);
  const int64_t length = fsdp::safetensors_header_bytes(first, file_bytes, "again");
  require(length + 8 == static_cast<int64_t>(bytes.size()), "another length than was written");
  const auto parsed =
      fsdp::parse_safetensors_header(std::string_view(bytes).substr(8), file_bytes, "again");
  require(parsed == again, "what is written again is read as something else");
}

// The last 8 bytes: how much data follows the header, which may be more than anybody has.
int64_t data_bytes_of(std::string_view& input) {
  if (input.size() < 8) return 0;
  uint64_t value = 0;
  for (const char byte : input.substr(input.size() - 8))
    value = value << 8 | static_cast<unsigned char>(byte);
  input.remove_suffix(8);
  return static_cast<int64_t>(value >> 1);
}

}  // namespace

// The first bytes of a file and then, in the last 8, how long its data is.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string_view input(reinterpret_cast<const char*>(data), size);
  int64_t file_bytes = data_bytes_of(input);
  if (__builtin_add_overflow(file_bytes, static_cast<int64_t>(input.size()), &file_bytes)) return 0;
  try {
    int64_t length = fsdp::safetensors_header_bytes(input.substr(0, 8), file_bytes, "input");
    require(length >= 0 && length <= file_bytes - 8, "a header longer than the file");
    // Bytes that are not there are data; the file is as long as it says all the same.
    length = std::min(length, static_cast<int64_t>(input.size()) - 8);
    const auto header = fsdp::parse_safetensors_header(input.substr(8, static_cast<size_t>(length)),
                                                       file_bytes, "input");
    check(header, file_bytes);
    check_written_again(header);
  } catch (const fsdp::Error& error) {
    require(std::string_view(error.what()).starts_with("input"), error.what());
  }
  return 0;
}
