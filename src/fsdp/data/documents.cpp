#include "fsdp/data/documents.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>
#include <string_view>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/data/json_rows.h"
#include "fsdp/data/python_worker.h"

namespace fsdp {
namespace {

constexpr size_t kTextAtATime = size_t{4} << 20;

// Reads a file from its beginning to its end.
class Pieces {
 public:
  explicit Pieces(const std::string& path) : reader_(path) {}

  bool is_at_end() const { return offset_ == reader_.bytes(); }

  // Appends the next bytes.
  void read(std::string& text) {
    const auto count = std::min(static_cast<int64_t>(kTextAtATime), reader_.bytes() - offset_);
    const size_t before = text.size();
    text.resize(before + static_cast<size_t>(count));
    reader_.read(offset_, std::as_writable_bytes(std::span(text).subspan(before)));
    offset_ += count;
  }

 private:
  FileReader reader_;
  int64_t offset_ = 0;
};

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
  Pieces pieces(path);
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

// Collects documents until they are worth a call.
class Batch {
 public:
  explicit Batch(const TakeDocuments& take) : take_(take) {}

  void add(Document document, int64_t bytes) {
    text_bytes_ += document.text.size();
    bytes_ += bytes;
    documents_.push_back(std::move(document));
    if (text_bytes_ >= kTextAtATime) finish();
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

bool is_blank(std::string_view line) {
  return line.find_first_not_of(" \t\r") == std::string_view::npos;
}

void read_json_lines(const std::string& path, const std::string& field, const TakeDocuments& take) {
  Pieces pieces(path);
  RowReader rows(path, "line", field);
  Batch batch(take);
  std::string text;
  for (int64_t number = 0; !pieces.is_at_end();) {
    pieces.read(text);
    size_t begin = 0;
    while (begin < text.size()) {
      size_t end = text.find('\n', begin);
      if (end == std::string::npos) {
        if (!pieces.is_at_end()) break;  // the line goes on
        end = text.size();
      }
      const std::string_view line = std::string_view(text).substr(begin, end - begin);
      ++number;
      if (!is_blank(line))
        batch.add(rows.read(line, number), static_cast<int64_t>(line.size() + 1));
      begin = end + 1;
    }
    text.erase(0, std::min(begin, text.size()));
  }
  batch.finish();
}

// The worker makes JSON lines of the rows.
void read_parquet(const TextFile& file, const std::string& field, const TakeDocuments& take) {
  const PythonWorker worker("pyarrow", file.path);
  static_cast<void>(
      worker.ask({{"action", "open_parquet"}, {"path", file.path}, {"field", field}}));
  RowReader rows(file.path, "row", field);
  Batch batch(take);
  for (int64_t number = 0;;) {
    const PythonWorker::Message answer = worker.ask({{"action", "read_parquet"}});
    if (answer.head.at("is_last").get<bool>()) break;
    std::string_view lines = answer.payload;
    while (!lines.empty()) {
      const std::string_view line = lines.substr(0, lines.find('\n'));
      lines.remove_prefix(std::min(lines.size(), line.size() + 1));
      ++number;
      // How far the file is read is not known; its rows are counted as what they became.
      batch.add(rows.read(line, number), static_cast<int64_t>(line.size()));
    }
  }
  batch.finish();
}

}  // namespace

void read_documents(const TextFile& file, const std::string& field, const TakeDocuments& take) {
  switch (file.form) {
    case FileForm::kText:
      return read_text(file.path, take);
    case FileForm::kJsonLines:
      return read_json_lines(file.path, field, take);
    case FileForm::kParquet:
      return read_parquet(file, field, take);
  }
}

TokenHeader kind_of_text(const Tokenizer& tokenizer, bool has_mask) {
  TokenHeader kind = tokenizer.kind();
  if (has_mask) {
    kind.token_bytes = masked_token_bytes_for(kind.vocabulary);
    kind.num_learnt = 0;
    // Chats would be cut between their turns.
    if (tokenizer.ends_turns()) kind.end_of_document.reset();
  }
  return kind;
}

void encode_documents(const TextFile& file, const std::string& field, const Tokenizer& tokenizer,
                      const TokenSink& sink) {
  read_documents(file, field, [&](const std::vector<Document>& documents, int64_t bytes) {
    for (const EncodedDocument& each : tokenizer.encode(documents)) {
      const std::span<const int64_t> tokens = each.tokens;
      if (each.learnt.empty()) sink.tokens(tokens, Learnt::kYes);
      for (size_t begin = 0; begin < each.learnt.size();) {
        const auto first = each.learnt.begin() + static_cast<int64_t>(begin);
        const auto end = std::find(first, each.learnt.end(), static_cast<uint8_t>(1 - *first));
        const auto count = static_cast<size_t>(end - first);
        sink.tokens(tokens.subspan(begin, count), *first == 1 ? Learnt::kYes : Learnt::kNo);
        begin += count;
      }
    }
    const auto is_end = [](const Document& document) { return document.is_end; };
    sink.progress(std::count_if(documents.begin(), documents.end(), is_end), bytes);
  });
}

}  // namespace fsdp
