// Small files with tokens whose values tests know.
#pragma once

#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/base/durable_file.h"
#include "fsdp/data/corpus.h"
#include "fsdp/data/token_file.h"

namespace fsdp::testing {

// A vocabulary of four-byte tokens in which a token can be its own number.
inline TokenHeader counting_header() {
  return {.token_bytes = 4,
          .vocabulary = 1 << 24,
          .num_documents = 0,
          .end_of_document = {},
          .tokenizer = "counting"};
}

inline TokenHeader write_tokens(const std::string& path, const std::vector<int64_t>& tokens,
                                const TokenHeader& header = counting_header()) {
  TokenFileWriter writer(path, header);
  writer.write(tokens);
  writer.count_documents(header.num_documents);
  return writer.commit();
}

// Token i is `first + i`.
inline void write_counting_tokens(const std::string& path, int64_t num_tokens, int64_t first = 0) {
  std::vector<int64_t> tokens(static_cast<size_t>(num_tokens));
  std::iota(tokens.begin(), tokens.end(), first);
  write_tokens(path, tokens);
}

inline std::shared_ptr<const Corpus> open_corpus(const std::vector<std::string>& paths,
                                                 const CorpusOptions& options = {}) {
  return Corpus::open(paths, options);
}

inline std::vector<int64_t> tokens_of(const Corpus& corpus) {
  std::vector<int64_t> tokens(static_cast<size_t>(corpus.num_tokens()));
  corpus.read(0, tokens);
  return tokens;
}

inline void write_text_file(const std::string& path, std::string_view text) {
  FileWriter writer(path);
  writer.write(std::as_bytes(std::span(text)));
  writer.commit();
}

}  // namespace fsdp::testing
