// The documents of files, some at a time: a text file is one, and so is each row of JSON
// or parquet.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "fsdp/data/rows.h"
#include "fsdp/data/text_files.h"
#include "fsdp/data/token_file.h"
#include "fsdp/data/tokenizer.h"

namespace fsdp {

// Gets documents, in order, and of how many bytes of the file they are.
using TakeDocuments = std::function<void(const std::vector<Document>&, int64_t bytes)>;

// Some MiB of text at a time: an encoding takes some fifty times the memory of its text. A longer
// text comes in pieces. `field`: see row_kind(). Error with the path and the place in it.
// Returns the rows with unknown roles.
OddRows read_documents(const TextFile& file, const std::string& field, const TakeDocuments& take);

// The files that paths name, each by itself: text files, or none for a packed token file. All are
// looked for before any is read.
struct DataSources {
  std::vector<TextFiles> texts;
  // The header of a file of the text's tokens; with a loss mask if some of the text needs
  // one.
  TokenHeader text_kind;
};
DataSources find_sources(std::span<const std::string> paths, const Tokenizer& tokenizer,
                         const TextFileOptions& options);

// Takes the tokens of documents, in order.
struct TokenSink {
  std::function<void(std::span<const int64_t>, Learnt)> tokens;
  // So many documents are complete, and so many bytes of the file are read.
  std::function<void(int64_t num_documents, int64_t bytes)> progress;
};

// Rows of some files that a person should look at. Texts are no rows.
struct DocumentFindings {
  OddRows unknown_roles;
  OddRows without_learnt;
  std::vector<int64_t> row_tokens;  // of rows with parts that are not learnt
  int64_t longest_tokens = 0;
  std::string longest_place;
  std::string first_chat = {};  // as its document has it

  void add(DocumentFindings more);

  // One for each kind of odd rows. Long ones depend on the run (cut_rows_text()).
  std::vector<std::string> sentences() const;
};

DocumentFindings encode_documents(const TextFile& file, const std::string& field,
                                  const Tokenizer& tokenizer, const TokenSink& sink);

}  // namespace fsdp
