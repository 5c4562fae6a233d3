#include "fsdp/data/tokenizer.h"

#include <algorithm>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/data/byte_tokenizer.h"
#include "fsdp/data/token_header.h"
#include "fsdp/data/worker_tokenizer.h"

namespace fsdp {
namespace {

class ByteTokenizer final : public Tokenizer {
 public:
  const TokenHeader& kind() const override { return kind_; }
  const std::vector<int64_t>& ends() const override { return ends_; }

  std::vector<EncodedDocument> encode(std::span<const Document> documents) const override {
    std::vector<EncodedDocument> encoded;
    for (const Document& each : documents) {
      if (each.is_chat) refuse_chat(each.place + ": ");
      EncodedDocument& out = encoded.emplace_back();
      out.tokens.resize(each.text.size());
      encode_bytes(each.text, std::span(out.tokens));
      if (each.is_end) out.tokens.push_back(kByteEndOfDocument);
      if (each.prompt_bytes == 0) continue;
      out.learnt.assign(out.tokens.size(), 1);
      std::fill_n(out.learnt.begin(), each.prompt_bytes, uint8_t{0});
    }
    return encoded;
  }

  std::vector<int64_t> encode_prompt(std::string_view text) const override {
    std::vector<int64_t> tokens(text.size());
    encode_bytes(text, std::span(tokens));
    return tokens;
  }

  std::vector<int64_t> encode_chat(std::string_view /*chat*/) const override { refuse_chat(""); }

  void begin_text(std::span<const int64_t> /*prompt*/) const override {}
  std::string next_text(std::span<const int64_t> tokens) const override {
    return decode_bytes(tokens);
  }

 private:
  [[noreturn]] static void refuse_chat(const std::string& place) {
    throw UsageError(concat(place,
                            "a chat needs a chat template, which bytes do not have; give the "
                            "tokenizer of a model for chats, e.g. --tokenizer DIRECTORY"));
  }

  const TokenHeader kind_ = byte_level_header();
  const std::vector<int64_t> ends_ = {kByteEndOfDocument};
};

}  // namespace

std::shared_ptr<const Tokenizer> open_tokenizer(const std::string& path,
                                                const std::string& end_of_document) {
  if (path == kByteTokenizerName) {
    if (!end_of_document.empty())
      throw UsageError(concat("--end-of-document is '", end_of_document,
                              "', but a document of bytes ends with token 256; leave it out, or "
                              "give a --tokenizer"));
    return std::make_shared<ByteTokenizer>();
  }
  const std::string file = is_directory(path) ? concat(path, "/", kTokenizerFileName) : path;
  if (!path_exists(file))
    throw UsageError(concat("--tokenizer is '", path, "', but there is no file '", file,
                            "'; give a tokenizer.json, a directory with one, or bytes"));
  if (!is_regular_file(file))
    throw UsageError(concat("--tokenizer is '", path, "', but '", file,
                            "' is no regular file; write what is in it to one"));
  return std::make_shared<WorkerTokenizer>(file, end_of_document);
}

}  // namespace fsdp
