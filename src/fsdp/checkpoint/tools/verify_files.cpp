#include "fsdp/checkpoint/tools/verify_files.h"

#include <algorithm>
#include <map>
#include <optional>
#include <span>

#include "fsdp/base/check.h"
#include "fsdp/base/crc32c.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/integer.h"
#include "fsdp/checkpoint/format/manifest.h"
#include "fsdp/checkpoint/format/tensor_catalog.h"
#include "fsdp/checkpoint/run_directory.h"

namespace fsdp {

namespace {

// Bytes per read, rounded up to blocks.
constexpr int64_t kReadBytes = int64_t{8} << 20;

// A file must have these: the checksums of its blocks, or the one of all of it. Neither: it is only
// read.
struct Checksums {
  int64_t block_bytes = 1;
  std::span<const uint32_t> blocks = {};
  std::optional<uint32_t> whole = std::nullopt;
};

class Verifier {
 public:
  Verifier(const std::string& root, int64_t total_bytes,
           const std::function<void(int64_t, int64_t)>& on_progress)
      : root_(root), total_bytes_(total_bytes), on_progress_(on_progress) {}

  // Returns whether the file is sound; then `text`, if there is one, is its content.
  bool check(const std::string& name, int64_t bytes, const Checksums& expected,
             std::string* text = nullptr) {
    const size_t num_before = result_.damaged.size();
    const int64_t end_of_file = done_bytes_ + bytes;
    const int64_t step = round_up(kReadBytes, expected.block_bytes);
    uint32_t found = 0;
    ++result_.num_files;
    name_ = name;
    try {
      const FileReader reader(path());
      if (reader.bytes() != bytes)
        fault(concat("has ", reader.bytes(), " bytes instead of ", bytes));
      // A shorter file has no whole last block; its length is already reported.
      const int64_t readable = reader.bytes() >= bytes
                                   ? bytes
                                   : reader.bytes() / expected.block_bytes * expected.block_bytes;
      for (int64_t begin = 0; begin < readable; begin += step) {
        if (!read(reader, begin, std::min(begin + step, readable))) continue;
        check_blocks(begin, expected);
        if (expected.whole) found = crc32c(buffer_, found);
        if (text != nullptr)
          text->append(reinterpret_cast<const char*>(buffer_.data()), buffer_.size());
      }
    } catch (const Error& error) {
      fault(reason_of(error));
    }
    report_bad();
    if (result_.damaged.size() == num_before && expected.whole && found != *expected.whole)
      fault("is not what was written");
    done_bytes_ = end_of_file;
    if (on_progress_) on_progress_(done_bytes_, total_bytes_);
    return result_.damaged.size() == num_before;
  }

  Verification take() { return std::move(result_); }

 private:
  struct Bad {
    int64_t begin = 0;
    int64_t end = 0;
    std::string why;
  };

  std::string path() const { return root_.empty() ? name_ : concat(root_, "/", name_); }

  void fault(const std::string& what) { result_.damaged.push_back({name_, what}); }

  // Joins neighbouring blocks with the same fault into one line.
  void add_bad(int64_t begin, int64_t end, const std::string& why) {
    if (bad_ && bad_->end == begin && bad_->why == why) {
      bad_->end = end;
      return;
    }
    report_bad();
    bad_ = Bad{begin, end, why};
  }
  void report_bad() {
    if (bad_) fault(concat("bytes ", bad_->begin, " to ", bad_->end, " ", bad_->why));
    bad_.reset();
  }

  // Whether the bytes are in the buffer now.
  bool read(const FileReader& reader, int64_t begin, int64_t end) {
    buffer_.resize(static_cast<size_t>(end - begin));
    try {
      reader.read(begin, buffer_);
    } catch (const Error& error) {
      add_bad(begin, end, concat("cannot be read (", error.what(), ")"));
      return false;
    }
    result_.bytes += end - begin;
    if (on_progress_) on_progress_(done_bytes_ + end, total_bytes_);
    return true;
  }

  // The buffer has whole blocks, from `begin` of the file on.
  void check_blocks(int64_t begin, const Checksums& expected) {
    const auto block_bytes = static_cast<size_t>(expected.block_bytes);
    for (size_t i = 0; !expected.blocks.empty() && i < buffer_.size(); i += block_bytes) {
      const std::span<const std::byte> block =
          std::span<const std::byte>(buffer_).subspan(i, std::min(buffer_.size() - i, block_bytes));
      const int64_t at = begin + static_cast<int64_t>(i);
      if (crc32c(block) != expected.blocks[static_cast<size_t>(at / expected.block_bytes)])
        add_bad(at, at + static_cast<int64_t>(block.size()), "are not what was written");
    }
  }

  // Without the path at its beginning, which is already reported.
  std::string reason_of(const Error& error) const {
    const std::string text = error.what();
    const std::string begin = concat(path(), ": ");
    return text.starts_with(begin) ? text.substr(begin.size()) : text;
  }

  const std::string root_;
  const int64_t total_bytes_;
  const std::function<void(int64_t, int64_t)>& on_progress_;
  int64_t done_bytes_ = 0;
  std::string name_;  // of the file that is checked
  std::optional<Bad> bad_;
  std::vector<std::byte> buffer_;
  Verification result_;
};

// Ranks' records first, since they have the checksums of blocks.
Verification verify_ours(const std::string& path,
                         const std::function<void(int64_t, int64_t)>& on_progress) {
  const Manifest manifest = read_manifest(path);
  int64_t total = 0;
  for (const StoredFile& file : manifest.files) total = checked_add(total, file.bytes);
  Verifier verifier(path, total, on_progress);
  std::map<std::string, std::pair<RankRecord::File, int64_t>> described;  // with block_bytes
  const auto is_record = [](const StoredFile& file) { return file.path.starts_with("ranks/"); };
  for (const StoredFile& file : manifest.files) {
    std::string text;
    if (!is_record(file) || !verifier.check(file.path, file.bytes, {.whole = file.crc32c}, &text))
      continue;
    const RankRecord record = parse_rank_record(text, concat(path, "/", file.path));
    for (const RankRecord::File& each : record.files)
      described[each.path] = {each, record.block_bytes};
  }
  for (const StoredFile& file : manifest.files) {
    if (is_record(file)) continue;
    const auto found = described.find(file.path);
    // If the record with its blocks is lost, the manifest's checksum of the whole file remains.
    if (found == described.end() || found->second.first.bytes != file.bytes)
      verifier.check(file.path, file.bytes, {.whole = file.crc32c});
    else
      verifier.check(file.path, file.bytes,
                     {.block_bytes = found->second.second, .blocks = found->second.first.blocks});
  }
  return verifier.take();
}

Verification verify_plain(const TensorCatalog& catalog,
                          const std::function<void(int64_t, int64_t)>& on_progress) {
  int64_t total = 0;
  for (const CheckedFile& file : catalog.files()) total = checked_add(total, file.bytes);
  Verifier verifier("", total, on_progress);
  for (const CheckedFile& file : catalog.files()) verifier.check(file.path, file.bytes, {});
  return verifier.take();
}

}  // namespace

Verification verify_files(const std::string& path,
                          const std::function<void(int64_t, int64_t)>& on_progress) {
  if (!path_exists(concat(path, "/", kManifestName)))
    return verify_plain(TensorCatalog(path), on_progress);
  Verification result = verify_ours(path, on_progress);
  result.has_checksums = true;
  result.has_manifest_checksum = checksum_in(read_manifest_text(path)) == ManifestChecksum::kRight;
  if (!result.damaged.empty()) return result;
  try {
    const TensorCatalog catalog(path);  // finds headers, boxes and names that do not fit together
  } catch (const Error& error) {
    result.damaged.push_back({std::string(kManifestName), error.what()});
  }
  return result;
}

}  // namespace fsdp
