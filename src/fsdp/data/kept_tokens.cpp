#include "fsdp/data/kept_tokens.h"

#include <sys/stat.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/hmac_sha256.h"
#include "fsdp/base/log.h"
#include "fsdp/base/version.h"

namespace fsdp {

namespace {

using Json = nlohmann::json;

constexpr int kRules = 2;  // of how rows become tokens; builds of one version may differ
constexpr const char* kTokens = ".tokens";
constexpr const char* kFindings = ".json";
constexpr int64_t kMaxFindingsBytes = int64_t{4} << 30;

// Its times, too: a file may be replaced by one of the same length.
Json identity_of(const TextFile& file) {
  struct stat status {};
  FSDP_CHECK(::stat(file.path.c_str(), &status) == 0, file.path,
             ": cannot be read; check the path");
  return {real_path(file.path),           status.st_size,        status.st_mtim.tv_sec,
          status.st_mtim.tv_nsec,         status.st_ctim.tv_sec, status.st_ctim.tv_nsec,
          static_cast<int>(file.content), file.has_mask};
}

std::string digest_text(const std::string& text) {
  return hex_text(sha256(std::as_bytes(std::span(text))), 8);
}

Json to_json(const OddRows& rows) { return {rows.count, rows.first, rows.detail}; }

OddRows odd_rows_in(const Json& json) {
  return {json.at(0).get<int64_t>(), json.at(1).get<std::string>(), json.at(2).get<std::string>()};
}

}  // namespace

KeptTokens::KeptTokens(std::string directory, const std::string& path, const TextFiles& files,
                       const Tokenizer& tokenizer, const std::string& field,
                       const TokenHeader& kind)
    : directory_(std::move(directory)) {
  const std::string real = real_path(path);
  Json key = {FSDP_VERSION,    kRules,           tokenizer.fingerprint(),          field,
              kind.has_mask(), kind.token_bytes, kind.end_of_document.value_or(-1)};
  for (const TextFile& file : files.files) key.push_back(identity_of(file));
  stem_ = concat(file_name_of(real), "-", digest_text(real), "-");
  const auto text = key.dump(-1, ' ', false, Json::error_handler_t::replace);
  path_ = concat(directory_, "/", stem_, digest_text(text), kTokens);
}

std::optional<KeptTokens::Found> KeptTokens::find() const {
  const std::string beside = path_.substr(0, path_.rfind('.')) + kFindings;
  if (!path_exists(path_) || !path_exists(beside)) return std::nullopt;
  try {
    TokenFile tokens(path_);
    tokens.verify();
    const Json json = Json::parse(read_text_file(beside, kMaxFindingsBytes));
    FSDP_CHECK(json.at("crc32c") == tokens.header().data_crc32c, beside, ": is of other tokens");
    DocumentFindings findings{.unknown_roles = odd_rows_in(json.at("unknown_roles")),
                              .without_learnt = odd_rows_in(json.at("without_learnt")),
                              .row_tokens = json.at("row_tokens").get<std::vector<int64_t>>(),
                              .longest_tokens = json.at("longest_tokens").get<int64_t>(),
                              .longest_place = json.at("longest_place").get<std::string>(),
                              .first_chat = json.at("first_chat").get<std::string>()};
    return Found{std::move(tokens), std::move(findings)};
  } catch (const std::exception& error) {
    log(LogLevel::kWarning, concat(error.what(), " (kept tokens; they are made again)"));
    return std::nullopt;
  }
}

void KeptTokens::complete(const DocumentFindings& findings) const {
  const Json json = {{"crc32c", TokenFile(path_).header().data_crc32c},
                     {"unknown_roles", to_json(findings.unknown_roles)},
                     {"without_learnt", to_json(findings.without_learnt)},
                     {"row_tokens", findings.row_tokens},
                     {"longest_tokens", findings.longest_tokens},
                     {"longest_place", findings.longest_place},
                     {"first_chat", findings.first_chat}};
  const std::string stem = file_name_of(path_.substr(0, path_.rfind('.')));
  write_file_durably(concat(directory_, "/", stem, kFindings),
                     json.dump(-1, ' ', false, Json::error_handler_t::replace));
  for (const std::string& name : names_in(directory_))
    if (name.starts_with(stem_) && !name.starts_with(stem))
      remove_tree(concat(directory_, "/", name));
}

}  // namespace fsdp
