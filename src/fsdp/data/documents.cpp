#include "fsdp/data/documents.h"

#include <algorithm>
#include <span>
#include <string_view>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/text.h"
#include "fsdp/data/corpus.h"
#include "fsdp/data/row_files.h"

namespace fsdp {

namespace {

// Where a text is cut: at the end of a line that ends with a letter or digit, where the tokenizers
// of the common models begin a new token in any case. Without one: between characters.
size_t place_to_cut(std::string_view text) {
  const auto is_word = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
  };
  for (size_t at = text.size() - 1; at > text.size() / 2; --at)
    if (text[at] == '\n' && is_word(text[at - 1])) return at;
  size_t at = text.size() - 1;
  while (at > 1 && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) --at;
  return at;
}

void read_text(const std::string& path, const TakeDocuments& take) {
  FilePieces pieces(path);
  std::string rest;
  for (bool is_beginning = true; is_beginning || !rest.empty(); is_beginning = false) {
    if (!pieces.is_at_end()) pieces.read(rest);
    Document document{.text = std::move(rest),
                      .is_beginning = is_beginning,
                      .is_end = pieces.is_at_end(),
                      .place = path};
    rest.clear();
    if (!document.is_end) {
      const size_t cut = place_to_cut(document.text);
      rest = document.text.substr(cut);
      document.text.resize(cut);
    }
    const auto bytes = static_cast<int64_t>(document.text.size());
    take({std::move(document)}, bytes);
  }
}

// Rows take longer than plain text of their length, and a person waits for the next line of
// progress.
constexpr size_t kRowsAtATime = size_t{1} << 18;

// Collects documents until they are worth a call.
class Batch {
 public:
  explicit Batch(const TakeDocuments& take) : take_(take) {}

  void add(Document document, int64_t bytes) {
    text_bytes_ += document.text.size();
    bytes_ += bytes;
    documents_.push_back(std::move(document));
    if (text_bytes_ >= kRowsAtATime) finish();
  }

  void finish() {
    if (!documents_.empty()) take_(documents_, bytes_);
    documents_.clear();
    text_bytes_ = 0;
    bytes_ = 0;
  }

 private:
  const TakeDocuments& take_;
  std::vector<Document> documents_;
  size_t text_bytes_ = 0;
  int64_t bytes_ = 0;
};

}  // namespace

OddRows read_documents(const TextFile& file, const std::string& field, const TakeDocuments& take) {
  if (file.content == FileContent::kText) {
    read_text(file.path, take);
    return {};
  }
  RowReader reader(file.path, file.content == FileContent::kJsonLines ? "line" : "row", field);
  Batch batch(take);
  read_rows(file.path, file.content, field,
            [&](std::string_view row, int64_t number, int64_t bytes) {
              batch.add(reader.read(row, number), bytes);
              return true;
            });
  batch.finish();
  return reader.unknown_roles();
}

DataSources find_sources(std::span<const std::string> paths, const Tokenizer& tokenizer,
                         const TextFileOptions& options) {
  DataSources sources{.texts = std::vector<TextFiles>(paths.size()), .text_kind = tokenizer.kind()};
  bool has_mask = false;
  for (size_t i = 0; i < paths.size(); ++i) {
    if (is_token_file(paths[i])) continue;
    sources.texts[i] = find_text_files({&paths[i], 1}, options);
    has_mask = has_mask || sources.texts[i].has_mask();
  }
  if (!has_mask) return sources;
  TokenHeader& kind = sources.text_kind;
  kind.token_bytes = masked_token_bytes_for(kind.vocabulary);
  kind.num_learnt = 0;
  // Chats would be cut between their turns.
  if (tokenizer.ends_turns()) kind.end_of_document.reset();
  return sources;
}

namespace {

// Gives the tokens of a document in pieces that are learnt, or not. Returns how many are learnt.
int64_t give_tokens(const EncodedDocument& document, const TokenSink& sink) {
  const std::span<const int64_t> tokens = document.tokens;
  if (document.learnt.empty()) {
    sink.tokens(tokens, Learnt::kYes);
    return static_cast<int64_t>(tokens.size());
  }
  int64_t num_learnt = 0;
  for (size_t begin = 0; begin < document.learnt.size();) {
    const auto first = document.learnt.begin() + static_cast<int64_t>(begin);
    const auto end = std::find(first, document.learnt.end(), static_cast<uint8_t>(1 - *first));
    const auto count = static_cast<size_t>(end - first);
    sink.tokens(tokens.subspan(begin, count), *first == 1 ? Learnt::kYes : Learnt::kNo);
    if (*first == 1) num_learnt += static_cast<int64_t>(count);
    begin += count;
  }
  return num_learnt;
}

}  // namespace

DocumentFindings encode_documents(const TextFile& file, const std::string& field,
                                  const Tokenizer& tokenizer, const TokenSink& sink) {
  DocumentFindings findings;
  const auto encode = [&](const std::vector<Document>& documents, int64_t bytes) {
    const std::vector<EncodedDocument> encoded = tokenizer.encode(documents);
    for (size_t i = 0; i < encoded.size(); ++i) {
      const int64_t num_learnt = give_tokens(encoded[i], sink);
      if (!file.has_mask) continue;
      if (num_learnt == 0) findings.without_learnt.add(documents[i].place);
      if (documents[i].is_chat && findings.first_chat.empty())
        findings.first_chat = documents[i].text;
      findings.row_tokens.push_back(static_cast<int64_t>(encoded[i].tokens.size()));
      if (findings.row_tokens.back() > findings.longest_tokens) {
        findings.longest_tokens = findings.row_tokens.back();
        findings.longest_place = documents[i].place;
      }
    }
    const auto is_end = [](const Document& document) { return document.is_end; };
    sink.progress(std::count_if(documents.begin(), documents.end(), is_end), bytes);
  };
  findings.unknown_roles = read_documents(file, field, encode);
  return findings;
}

void DocumentFindings::add(DocumentFindings more) {
  unknown_roles.add(more.unknown_roles);
  without_learnt.add(more.without_learnt);
  row_tokens.insert(row_tokens.end(), more.row_tokens.begin(), more.row_tokens.end());
  if (more.longest_tokens > longest_tokens) {
    longest_tokens = more.longest_tokens;
    longest_place = std::move(more.longest_place);
  }
  if (first_chat.empty()) first_chat = std::move(more.first_chat);
}

std::vector<std::string> DocumentFindings::sentences() const {
  std::vector<std::string> found;
  const auto add = [&](const OddRows& odd, const std::string& what) {
    if (odd.count > 0)
      found.push_back(concat(counted_text(odd.count, "row"), odd.count == 1 ? " has " : " have ",
                             what, "; the first is ", odd.first));
  };
  add(unknown_roles,
      concat("a role that chat templates do not know, such as '", unknown_roles.detail, "'"));
  add(without_learnt, "nothing to learn, such as a chat without an answer");
  return found;
}

}  // namespace fsdp
