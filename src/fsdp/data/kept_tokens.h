// Tokens of text that are kept in a directory, so that a text is tokenised once: by one rank of a
// run, and not again when the run goes on.
//
// Each path of --data has a packed token file, NAME-PATH-KEY.tokens, and beside it what was found
// in its rows, NAME-PATH-KEY.json. The key is made of all that decides the tokens: the files, by
// path, length and times, the tokenizer with its chat template, the field, and the version of this
// program. Whatever is missing, damaged or of another key is tokenised again.
#pragma once

#include <optional>
#include <string>

#include "fsdp/data/documents.h"
#include "fsdp/data/text_files.h"
#include "fsdp/data/token_file.h"
#include "fsdp/data/tokenizer.h"

namespace fsdp {

class KeptTokens {
 public:
  // `path` has the `files`; `kind` is the header of their tokens.
  KeptTokens(std::string directory, const std::string& path, const TextFiles& files,
             const Tokenizer& tokenizer, const std::string& field, const TokenHeader& kind);

  struct Found {
    TokenFile tokens;
    DocumentFindings findings;
  };
  // Verified; nullopt if there are none.
  std::optional<Found> find() const;

  // A TokenFileWriter writes them to this path.
  const std::string& path() const { return path_; }

  // The file is there; with this it is complete. Removes older tokens of the same path.
  void complete(const DocumentFindings& findings) const;

 private:
  std::string directory_;
  std::string stem_;  // of the path: "chats.jsonl-0123456789abcdef-"
  std::string path_;
};

}  // namespace fsdp
