// A tokenizer.json of HuggingFace's package tokenizers, which encodes and decodes in a process of
// its own.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/data/python_worker.h"
#include "fsdp/data/token_header.h"
#include "fsdp/data/tokenizer.h"

namespace fsdp {

class WorkerTokenizer final : public Tokenizer {
 public:
  // `path`: the tokenizer.json; other files of the model are looked for beside it.
  WorkerTokenizer(const std::string& path, const std::string& end_of_document);

  const TokenHeader& kind() const override { return kind_; }
  bool ends_turns() const override { return ends_turns_; }
  const std::vector<int64_t>& ends() const override { return ends_; }
  std::vector<EncodedDocument> encode(std::span<const Document> documents) const override;
  std::vector<int64_t> encode_prompt(std::string_view text) const override;
  std::vector<int64_t> encode_chat(std::string_view chat) const override;
  void begin_text(std::span<const int64_t> prompt) const override;
  std::string next_text(std::span<const int64_t> tokens) const override;

 private:
  std::string decode(std::span<const int64_t> tokens, bool is_first) const;

  PythonWorker worker_;
  TokenHeader kind_;
  bool ends_turns_ = false;
  std::vector<int64_t> ends_;
};

}  // namespace fsdp
