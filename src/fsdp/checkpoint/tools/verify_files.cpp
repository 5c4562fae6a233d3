#include "fsdp/checkpoint/tools/verify_files.h"

#include <algorithm>
#include <map>
#include <optional>
#include <span>

#include "fsdp/base/check.h"
#include "fsdp/base/crc32c.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/integer.h"
#include "fsdp/checkpoint/format/manifest_text.h"
#include "fsdp/checkpoint/format/tensor_catalog.h"
#include "fsdp/checkpoint/run_directory.h"

namespace fsdp {

namespace {

// Bytes per read, rounded up to blocks.
constexpr int64_t kReadBytes = int64_t{8} << 20;

class Verifier {
 public:
  Verifier(const std::string& root, const std::function<void(int64_t, int64_t)>& on_progress)
      : root_(root), on_progress_(on_progress) {}

  void expect(int64_t total_bytes) { total_bytes_ = total_bytes; }

  // Checks a file whose blocks have checksums; without checksums, it is only read.
  void check_blocks(const std::string& name, int64_t bytes, int64_t block_bytes,
                    std::span<const uint32_t> blocks) {
    std::optional<Bad> bad;
    const auto report = [&] {
      if (bad) fault(name, concat("bytes ", bad->begin, " to ", bad->end, " ", bad->why));
      bad.reset();
    };
    // Joins neighbouring blocks with the same fault into one line.
    const auto add = [&](int64_t begin, int64_t end, const std::string& why) {
      if (bad && bad->end == begin && bad->why == why) {
        bad->end = end;
        return;
      }
      report();
      bad = Bad{begin, end, why};
    };
    read(
        name, bytes, block_bytes,
        [&](int64_t begin, std::span<const std::byte> part) {
          for (size_t i = 0; !blocks.empty() && i < part.size();
               i += static_cast<size_t>(block_bytes)) {
            const std::span<const std::byte> block =
                part.subspan(i, std::min(part.size() - i, static_cast<size_t>(block_bytes)));
            const int64_t at = begin + static_cast<int64_t>(i);
            if (crc32c(block) != blocks[static_cast<size_t>(at / block_bytes)])
              add(at, at + static_cast<int64_t>(block.size()), "are not what was written");
          }
        },
        add);
    report();
  }

  // Checks a file with one checksum. Returns its content, or nullopt if it is damaged.
  enum class Content { kDrop, kKeep };
  std::optional<std::string> check_whole(const StoredFile& file, Content content) {
    uint32_t found = 0;
    std::string text;
    const size_t num_before = result_.damaged.size();
    read(
        file.path, file.bytes, 1,
        [&](int64_t, std::span<const std::byte> part) {
          found = crc32c(part, found);
          if (content == Content::kKeep)
            text.append(reinterpret_cast<const char*>(part.data()), part.size());
        },
        [&](int64_t begin, int64_t end, const std::string& why) {
          fault(file.path, concat("bytes ", begin, " to ", end, " ", why));
        });
    if (result_.damaged.size() > num_before) return std::nullopt;
    if (found != file.crc32c) {
      fault(file.path, "is not what was written");
      return std::nullopt;
    }
    return text;
  }

  void fault(const std::string& name, const std::string& what) {
    result_.damaged.push_back({name, what});
  }

  Verification take() { return std::move(result_); }

 private:
  struct Bad {
    int64_t begin = 0;
    int64_t end = 0;
    std::string why;
  };

  // Calls body(offset, bytes) with all whole blocks of a file that can be read, and bad(begin, end,
  // why) for the others.
  template <typename Body, typename OnBad>
  void read(const std::string& name, int64_t bytes, int64_t block_bytes, const Body& body,
            const OnBad& bad) {
    const int64_t step = round_up(kReadBytes, block_bytes);
    ++result_.num_files;
    const int64_t end_of_file = done_bytes_ + bytes;
    try {
      const FileReader reader(root_.empty() ? name : concat(root_, "/", name));
      if (reader.bytes() != bytes)
        fault(name, concat("has ", reader.bytes(), " bytes instead of ", bytes));
      // A shorter file has no whole last block; its length is already reported.
      const int64_t readable =
          reader.bytes() >= bytes ? bytes : reader.bytes() / block_bytes * block_bytes;
      for (int64_t begin = 0; begin < readable; begin += step)
        read_part(reader, begin, std::min(begin + step, readable), body, bad);
    } catch (const Error& error) {
      fault(name, reason_of(error, name));
    }
    done_bytes_ = end_of_file;
    if (on_progress_) on_progress_(done_bytes_, total_bytes_);
  }

  template <typename Body, typename OnBad>
  void read_part(const FileReader& reader, int64_t begin, int64_t end, const Body& body,
                 const OnBad& bad) {
    buffer_.resize(static_cast<size_t>(end - begin));
    try {
      reader.read(begin, buffer_);
    } catch (const Error& error) {
      return bad(begin, end, concat("cannot be read (", error.what(), ")"));
    }
    body(begin, std::span<const std::byte>(buffer_));
    result_.bytes += end - begin;
    if (on_progress_) on_progress_(done_bytes_ + end, total_bytes_);
  }

  // Without the path at its beginning, which is already reported.
  std::string reason_of(const Error& error, const std::string& name) const {
    const std::string text = error.what();
    const std::string begin = concat(root_.empty() ? name : concat(root_, "/", name), ": ");
    return text.starts_with(begin) ? text.substr(begin.size()) : text;
  }

  const std::string root_;
  const std::function<void(int64_t, int64_t)>& on_progress_;
  int64_t total_bytes_ = 0;
  int64_t done_bytes_ = 0;
  std::vector<std::byte> buffer_;
  Verification result_;
};

void verify_ours(const std::string& path, Verifier& verifier) {
  const Manifest manifest = read_manifest(path);
  int64_t total = 0;
  std::map<std::string, std::pair<RankRecord::File, int64_t>> described;  // with block_bytes
  for (const StoredFile& file : manifest.files) total = checked_add(total, file.bytes);
  verifier.expect(total);
  std::vector<StoredFile> others;
  for (const StoredFile& file : manifest.files) {
    if (!file.path.starts_with("ranks/")) {
      others.push_back(file);
      continue;
    }
    const std::optional<std::string> text = verifier.check_whole(file, Verifier::Content::kKeep);
    if (!text) continue;
    const RankRecord record = parse_rank_record(*text, concat(path, "/", file.path));
    for (const RankRecord::File& each : record.files)
      described[each.path] = {each, record.block_bytes};
  }
  for (const StoredFile& file : others) {
    const auto found = described.find(file.path);
    // If the record with its blocks is lost, the manifest's checksum of the whole file remains.
    if (found == described.end() || found->second.first.bytes != file.bytes) {
      verifier.check_whole(file, Verifier::Content::kDrop);
    } else {
      verifier.check_blocks(file.path, file.bytes, found->second.second,
                            found->second.first.blocks);
    }
  }
}

void verify_plain(const TensorCatalog& catalog, Verifier& verifier) {
  int64_t total = 0;
  for (const CheckedFile& file : catalog.files()) total = checked_add(total, file.bytes);
  verifier.expect(total);
  for (const CheckedFile& file : catalog.files())
    verifier.check_blocks(file.path, file.bytes, 1, {});
}

}  // namespace

Verification verify_files(const std::string& path,
                          const std::function<void(int64_t, int64_t)>& on_progress) {
  if (!path_exists(concat(path, "/", kManifestName))) {
    Verifier verifier("", on_progress);
    verify_plain(TensorCatalog(path), verifier);
    return verifier.take();
  }
  Verifier verifier(path, on_progress);
  verify_ours(path, verifier);
  Verification result = verifier.take();
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
