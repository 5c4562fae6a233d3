#include "fsdp/data/packed_documents.h"

#include <algorithm>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/data/batches.h"

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
  const int64_t end = range.first_token + range.num_tokens;
  int64_t begin = range.first_token;
  for (int64_t first = begin; first < end; first += kTokensAtATime) {
    tokens.resize(static_cast<size_t>(std::min(kTokensAtATime, end - first)));
    corpus.read(first, tokens);
    for (size_t i = 0; i < tokens.size(); ++i) {
      if (tokens[i] != *corpus.end_of_document()) continue;
      const int64_t next = first + static_cast<int64_t>(i) + 1;
      documents.push_back({begin, next - begin, true});
      begin = next;
    }
  }
  if (begin < end) documents.push_back({begin, end - begin, false});
  return documents;
}

void PackedDocuments::add(std::span<const DocumentRange> documents) {
  if (documents.empty()) return;
  struct Open {
    size_t window = 0;
    int64_t room = 0;
  };
  std::vector<std::vector<DocumentRange>> windows;
  std::vector<Open> open;
  const Permutation order(static_cast<int64_t>(documents.size()), 0, 0);
  for (int64_t i = 0; i < order.size(); ++i) {
    DocumentRange document = documents[static_cast<size_t>(order(i))];
    const bool is_alone = !document.has_end || document.num_tokens >= sequence_;
    document.num_tokens = std::min(document.num_tokens, sequence_);
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
