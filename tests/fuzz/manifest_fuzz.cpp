// libFuzzer: any text is either a manifest or a rank's record, which is the same after writing it
// again and opens nothing outside its checkpoint, or is refused with an Error that names it.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>

#include "fsdp/base/error.h"
#include "fsdp/base/integer.h"
#include "fsdp/checkpoint/format/manifest.h"

namespace {

[[noreturn]] void fail(std::string_view problem) {
  std::fprintf(stderr, "manifest_fuzz: %.*s\n", static_cast<int>(problem.size()), problem.data());
  std::abort();
}

void require(bool condition, std::string_view problem) {
  if (!condition) fail(problem);
}

// Judged by the standard library, not by the rules under test.
void check_path(const std::string& path) {
  const std::filesystem::path root = "/checkpoint";
  const std::filesystem::path opened = (root / path).lexically_normal();
  require(opened.string() == "/checkpoint/" + path, "a path that is not what it seems: " + path);
  require(path.find('\0') == std::string::npos && path.find('\\') == std::string::npos,
          "a path that other systems read otherwise");
}

void check_shape(const std::vector<int64_t>& shape) {
  bool is_empty = false;
  for (const int64_t size : shape) is_empty = is_empty || size == 0;
  int64_t bytes = 8;
  for (const int64_t size : shape) {
    require(size >= 0, "a negative size");
    if (!is_empty && __builtin_mul_overflow(bytes, size, &bytes)) fail("a shape without end");
  }
}

void check(const fsdp::Manifest& manifest) {
  for (const fsdp::StoredFile& file : manifest.files) {
    check_path(file.path);
    require(file.bytes >= 0, "a negative length");
  }
  for (const auto* tensors : {&manifest.model, &manifest.moments})
    for (const fsdp::StoredTensor& tensor : *tensors) check_shape(tensor.shape);
  require(manifest.num_ranks() >= 1 && manifest.step >= 0, "negative counts");
}

void check(const fsdp::RankRecord& record) {
  require(record.rank >= 0, "a negative rank");
  require(record.block_bytes >= 1 && record.block_bytes <= fsdp::kMaxBlockBytes, "no block");
  for (const fsdp::RankRecord::File& file : record.files) {
    check_path(file.path);
    require(file.header_bytes >= 0 && file.header_bytes <= file.bytes, "a header beyond the file");
    require(
        static_cast<int64_t>(file.blocks.size()) == fsdp::ceil_div(file.bytes, record.block_bytes),
        "blocks that are not the file's");
    static_cast<void>(fsdp::crc32c_of(file, record.block_bytes));
  }
}

template <typename Parse>
void try_parse(std::string_view text, const Parse& parse) {
  try {
    const auto value = parse(text, "input");
    check(value);
    require(parse(fsdp::to_json(value), "again") == value, "written again it is something else");
  } catch (const fsdp::Error& error) {
    require(std::string_view(error.what()).starts_with("input"), error.what());
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try_parse(text, fsdp::parse_manifest);
  // No fuzzer guesses a checksum.
  if (text.ends_with("\n}\n")) try_parse(fsdp::with_checksum(text), fsdp::parse_manifest);
  try_parse(text, fsdp::parse_rank_record);
  return 0;
}
