// Whole documents packed into windows, where a stretch of a corpus would cut them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fsdp/data/corpus.h"
#include "fsdp/data/token_windows.h"

namespace fsdp {

// A document of a corpus, its end included.
struct DocumentRange {
  int64_t first_token = 0;
  int64_t num_tokens = 0;
  bool has_end = true;  // the last one of a token file may lack it
  bool is_text = true;  // all of it is learnt; else it is a row with parts that are not
};

// UsageError where no token ends documents.
std::vector<DocumentRange> documents_in(const Corpus& corpus, const TokenWindows::Range& range);

// The lengths of rows that have parts which are not learnt, the ends of their documents included.
// A token file without ends of documents does not tell its rows, so they are left out.
std::vector<int64_t> row_lengths(const Corpus& corpus);

// "3 rows are longer than ... and cut; ..."; "" where none is.
std::string cut_rows_text(const Corpus& corpus, int64_t sequence);

// Windows of at most `sequence` tokens: documents are taken in a shuffled order, and each goes to
// the first of the newest windows that has room for it. A longer row has a window of its own, which
// has its beginning. A longer text is cut: a piece is predicted by a whole window, and the rest is
// a document like others. What has no end has a window of its own, since nothing may follow it. A
// function of the documents and the sequence alone, so that all ranks and resumed runs have the
// same windows.
class PackedDocuments {
 public:
  explicit PackedDocuments(int64_t sequence) : sequence_(sequence) {}

  // Appends windows with these.
  void add(std::span<const DocumentRange> documents);

  int64_t num_windows() const { return static_cast<int64_t>(begins_.size()) - 1; }

  // The documents in a window, cut to what it has of them.
  std::span<const DocumentRange> window(int64_t number) const;

 private:
  int64_t sequence_;
  std::vector<DocumentRange> documents_;  // window after window
  std::vector<size_t> begins_ = {0};      // of windows in documents_
};

}  // namespace fsdp
