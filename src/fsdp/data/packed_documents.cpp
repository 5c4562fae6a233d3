#include "fsdp/data/packed_documents.h"

#include <algorithm>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"
#include "fsdp/data/batches.h"
#include "fsdp/data/documents.h"

namespace fsdp {

namespace {

constexpr int64_t kTokensAtATime = int64_t{1} << 16;
// Windows that a document may go to: enough that little room is left over, few enough to look at.
constexpr size_t kOpenWindows = 64;

}  // namespace

std::vector<DocumentRange> documents_in(const Corpus& corpus, const TokenWindows::Range& range) {
  if (!corpus.end_of_document())
    throw UsageError(
        "documents cannot be packed whole, because no token ends them in the data (end of document "
        "none); pack it with such a token, or join them (--documents joined)");
  std::vector<DocumentRange> documents;
  std::vector<int64_t> tokens;
  std::vector<uint8_t> learnt;
  bool is_text = true;
  const int64_t end = range.first_token + range.num_tokens;
  int64_t begin = range.first_token;
  for (int64_t first = begin; first < end; first += kTokensAtATime) {
    tokens.resize(static_cast<size_t>(std::min(kTokensAtATime, end - first)));
    learnt.resize(tokens.size());
    corpus.read(first, tokens, learnt);
    for (size_t i = 0; i < tokens.size(); ++i) {
      is_text = is_text && learnt[i] != 0;
      if (tokens[i] != *corpus.end_of_document()) continue;
      const int64_t next = first + static_cast<int64_t>(i) + 1;
      documents.push_back({begin, next - begin, true, is_text});
      begin = next;
      is_text = true;
    }
  }
  if (begin < end) documents.push_back({begin, end - begin, false, is_text});
  return documents;
}

std::vector<int64_t> row_lengths(const Corpus& corpus) {
  if (!corpus.has_mask()) return {};
  if (!corpus.end_of_document()) return corpus.findings().row_tokens;
  std::vector<int64_t> lengths;
  for (const DocumentRange& each : documents_in(corpus, {0, corpus.num_tokens()}))
    if (!each.is_text) lengths.push_back(each.num_tokens);
  return lengths;
}

std::string cut_rows_text(const Corpus& corpus, int64_t sequence) {
  const std::vector<int64_t> lengths = row_lengths(corpus);
  const auto num_cut = std::count_if(lengths.begin(), lengths.end(),
                                     [=](int64_t tokens) { return tokens > sequence; });
  if (num_cut == 0) return "";
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  // Packed files do not say where their rows came from.
  const DocumentFindings& findings = corpus.findings();
  return concat(
      counted_text(num_cut, "row"), num_cut == 1 ? " is" : " are", " longer than --sequence ",
      sequence, " and cut; the longest has ", grouped_text(longest), " tokens",
      findings.longest_tokens == longest ? concat(" (", findings.longest_place, ")") : "");
}

namespace {

// Documents as windows have them. Pieces of a text share one token, as neighbouring windows do: the
// last target of one is the first input of the next.
std::vector<DocumentRange> cut_to_windows(std::span<const DocumentRange> documents,
                                          int64_t sequence) {
  std::vector<DocumentRange> pieces;
  for (const DocumentRange& each : documents) {
    DocumentRange rest = each;
    for (; rest.is_text && rest.num_tokens > sequence; rest.num_tokens -= sequence) {
      pieces.push_back({rest.first_token, sequence + 1, false});
      rest.first_token += sequence;
    }
    if (rest.num_tokens == 1 && each.num_tokens > 1) continue;  // the last target already
    rest.num_tokens = std::min(rest.num_tokens, sequence);
    pieces.push_back(rest);
  }
  return pieces;
}

}  // namespace

void PackedDocuments::add(std::span<const DocumentRange> whole) {
  const std::vector<DocumentRange> documents = cut_to_windows(whole, sequence_);
  if (documents.empty()) return;
  struct Open {
    size_t window = 0;
    int64_t room = 0;
  };
  std::vector<std::vector<DocumentRange>> windows;
  std::vector<Open> open;
  const Permutation order(static_cast<int64_t>(documents.size()), 0, 0);
  for (int64_t i = 0; i < order.size(); ++i) {
    const DocumentRange& document = documents[static_cast<size_t>(order(i))];
    const bool is_alone = !document.has_end || document.num_tokens >= sequence_;
    const auto found = std::find_if(open.begin(), open.end(), [&](const Open& each) {
      return !is_alone && each.room >= document.num_tokens;
    });
    if (found != open.end()) {
      windows[found->window].push_back(document);
      found->room -= document.num_tokens;
      if (found->room == 0) open.erase(found);
      continue;
    }
    windows.push_back({document});
    if (is_alone) continue;
    if (open.size() == kOpenWindows) open.erase(open.begin());
    open.push_back({windows.size() - 1, sequence_ - document.num_tokens});
  }
  for (const std::vector<DocumentRange>& window : windows) {
    documents_.insert(documents_.end(), window.begin(), window.end());
    begins_.push_back(documents_.size());
  }
}

std::span<const DocumentRange> PackedDocuments::window(int64_t number) const {
  FSDP_ASSERT(number >= 0 && number < num_windows(), number, " of ", num_windows());
  const size_t begin = begins_[static_cast<size_t>(number)];
  return std::span(documents_).subspan(begin, begins_[static_cast<size_t>(number) + 1] - begin);
}

}  // namespace fsdp
