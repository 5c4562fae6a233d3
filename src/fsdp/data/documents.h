// The documents of files, some at a time: a text file is one, and so is each row of JSON lines or
// parquet.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "fsdp/data/text_files.h"
#include "fsdp/data/token_file.h"
#include "fsdp/data/tokenizer.h"

namespace fsdp {

// Gets documents, in order, and of how many bytes of the file they are.
using TakeDocuments = std::function<void(const std::vector<Document>&, int64_t bytes)>;

// About 4 MiB of text at a time: an encoding takes some fifty times the memory of its text. A
// longer text comes in pieces. `field`: see row_kind(). Error with the path and the place in it.
void read_documents(const TextFile& file, const std::string& field, const TakeDocuments& take);

// What a file of the text's tokens says of itself; with or without a loss mask.
TokenHeader kind_of_text(const Tokenizer& tokenizer, bool has_mask);

// Takes the tokens of documents, in order.
struct TokenSink {
  std::function<void(std::span<const int64_t>, Learnt)> tokens;
  // So many documents are complete, and so many bytes of the file are read.
  std::function<void(int64_t num_documents, int64_t bytes)> progress;
};

void encode_documents(const TextFile& file, const std::string& field, const Tokenizer& tokenizer,
                      const TokenSink& sink);

}  // namespace fsdp
