#include "fsdp/data/word_encoder.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>

#include "fsdp/base/check.h"
#include "fsdp/base/text.h"

namespace fsdp {

namespace {

// When the words take more, they are forgotten: a text may have no two that are the same.
constexpr int64_t kMaxTableBytes = int64_t{256} << 20;
constexpr size_t kBytesOfEntry = 160;  // beside the word's own and its ids

constexpr bool is_letter_byte(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
constexpr bool is_digit_byte(char c) { return c >= '0' && c <= '9'; }
constexpr bool is_ascii(char c) { return static_cast<unsigned char>(c) < 0x80; }
constexpr bool is_blank_byte(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }
constexpr bool is_printed(char c) { return c > ' ' && c < 0x7f; }

// Whether the character that ends before `at`, which is not ASCII, is none of Unicode's white
// space. Leads of three ranges that have some are taken for white space.
bool ends_word(std::string_view text, size_t at) {
  size_t lead = at - 1;
  while (lead > 0 && (static_cast<unsigned char>(text[lead]) & 0xC0) == 0x80) --lead;
  const auto first = static_cast<unsigned char>(text[lead]);
  return first >= 0xC3 && first != 0xE1 && first != 0xE2 && first != 0xE3;
}

// Note [Certain cuts]: see WORD_FORMS in python_worker.py. No form goes on from a letter or digit
// to other ASCII (but an apostrophe: 's), or from anything to a space behind it; of several blanks
// before a word the last one is the word's; and where line breaks have a form, it ends after them
// (or after a slash that follows).
bool is_cut(std::string_view text, size_t at, bool ends_lines) {
  const char before = text[at - 1];
  const char next = text[at];
  if (next == ' ') {
    if (is_blank_byte(before)) return at + 1 < text.size() && is_printed(text[at + 1]);
    return is_ascii(before) ? is_printed(before) : ends_word(text, at);
  }
  if (before == '\n') return ends_lines && is_printed(next) && next != '/';
  if (!is_ascii(next) || next == '\'' || is_letter_byte(next)) return false;
  return is_letter_byte(before) || (is_digit_byte(before) && !is_digit_byte(next));
}

bool is_utf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    if (is_ascii(text[at])) {
      ++at;
      continue;
    }
    const size_t length = decode_utf8(text.substr(at)).num_bytes;
    if (length == 0) return false;
    at += length;
  }
  return true;
}

std::vector<uint32_t> numbers_in(std::string_view payload) {
  std::vector<uint32_t> numbers(payload.size() / sizeof(uint32_t));
  std::memcpy(numbers.data(), payload.data(), numbers.size() * sizeof(uint32_t));
  return numbers;
}

// Whether a part with a border inside is learnt is decided for each of its tokens. One of a space
// alone belongs to the byte after it (trim_offsets of tokenizers), so the end may matter, too.
bool has_border(std::string_view text, size_t begin, size_t end,
                const std::vector<std::pair<size_t, size_t>>& learnt) {
  const size_t last = text[end - 1] == ' ' ? end : end - 1;
  return std::any_of(learnt.begin(), learnt.end(), [&](const auto& span) {
    return (span.first > begin && span.first <= last) ||
           (span.second > begin && span.second <= last);
  });
}

}  // namespace

WordCutter::WordCutter(std::vector<std::string> whole, bool ends_lines) : ends_lines_(ends_lines) {
  std::sort(whole.begin(), whole.end(), [](const std::string& a, const std::string& b) {
    return a.size() != b.size() ? a.size() > b.size() : a < b;
  });
  for (std::string& each : whole)
    by_first_byte_[static_cast<unsigned char>(each.at(0))].push_back(std::move(each));
}

std::vector<std::string_view> WordCutter::cut(std::string_view text) const {
  std::vector<std::string_view> parts;
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t length = whole_token_at(text, at);
    if (length > 0) {
      cut_segment(text.substr(begin, at - begin), parts);
      parts.push_back(text.substr(at, length));
      begin = at + length;
    }
    at += std::max<size_t>(length, 1);
  }
  cut_segment(text.substr(begin), parts);
  return parts;
}

// For the tokenizer a text ends where a whole token begins.
void WordCutter::cut_segment(std::string_view text, std::vector<std::string_view>& parts) const {
  size_t begin = 0;
  for (size_t at = 1; at < text.size(); ++at) {
    if (!is_cut(text, at, ends_lines_)) continue;
    parts.push_back(text.substr(begin, at - begin));
    begin = at;
  }
  if (begin < text.size()) parts.push_back(text.substr(begin));
}

size_t WordCutter::whole_token_at(std::string_view text, size_t at) const {
  for (const std::string& each : by_first_byte_[static_cast<unsigned char>(text[at])])
    if (text.compare(at, each.size(), each) == 0) return each.size();
  return 0;
}

std::unique_ptr<WordEncoder> WordEncoder::open(const PythonWorker& worker,
                                               std::optional<int64_t> end_of_document) {
  const nlohmann::json rules = worker.ask({{"action", "word_rules"}}).head;
  if (rules.empty()) return nullptr;
  return std::unique_ptr<WordEncoder>(new WordEncoder(worker, rules, end_of_document));
}

WordEncoder::WordEncoder(const PythonWorker& worker, const nlohmann::json& rules,
                         std::optional<int64_t> end_of_document)
    : worker_(worker),
      cutter_(rules.at("whole").get<std::vector<std::string>>(),
              rules.at("ends_lines").get<bool>()),
      before_(rules.at("before").get<std::vector<int64_t>>()),
      after_(rules.at("after").get<std::vector<int64_t>>()),
      end_of_document_(end_of_document) {}

std::vector<EncodedDocument> WordEncoder::encode(std::span<const Document> documents) {
  for (const Document& each : documents)
    if (!each.is_chat && !is_utf8(each.text)) return {};
  std::string rendered;
  std::vector<Text> texts = texts_of(documents, rendered);
  const std::lock_guard lock(mutex_);
  if (table_bytes_ > kMaxTableBytes) {
    table_.clear();
    table_bytes_ = 0;
  }
  for (Text& each : texts) cut(each);
  learn_words();
  std::vector<EncodedDocument> encoded;
  for (size_t i = 0; i < texts.size(); ++i) encoded.push_back(assemble(documents[i], texts[i]));
  return encoded;
}

std::vector<WordEncoder::Text> WordEncoder::texts_of(std::span<const Document> documents,
                                                     std::string& rendered) const {
  std::vector<Text> texts(documents.size());
  nlohmann::json lengths = nlohmann::json::array();
  std::string chats;
  std::vector<size_t> numbers;
  for (size_t i = 0; i < documents.size(); ++i) {
    const Document& document = documents[i];
    if (document.is_chat) {
      lengths.push_back(document.text.size());
      chats += document.text;
      numbers.push_back(i);
      continue;
    }
    texts[i].text = document.text;
    if (document.prompt_bytes > 0)
      texts[i].learnt = {{document.prompt_bytes, document.text.size()}};
  }
  if (numbers.empty()) return texts;
  PythonWorker::Message answer;
  try {
    answer = worker_.ask({{"action", "render"}, {"chats", lengths}}, chats);
  } catch (const WorkerError& error) {
    if (error.document() < 0) throw;
    throw WorkerError(error.what(),
                      static_cast<int64_t>(numbers.at(static_cast<size_t>(error.document()))));
  }
  rendered = std::move(answer.payload);
  size_t begin = 0;
  for (size_t i = 0; i < numbers.size(); ++i) {
    Text& text = texts[numbers[i]];
    const auto length = answer.head.at("lengths").at(i).get<size_t>();
    text.text = std::string_view(rendered).substr(begin, length);
    begin += length;
    const auto edges = answer.head.at("turns").at(i).get<std::vector<size_t>>();
    for (size_t edge = 0; edge + 1 < edges.size(); edge += 2)
      text.learnt.emplace_back(edges[edge], edges[edge + 1]);
  }
  return texts;
}

void WordEncoder::cut(Text& text) {
  for (const std::string_view part : cutter_.cut(text.text)) {
    auto found = table_.find(part);
    if (found == table_.end()) {
      found = table_.emplace(part, Word()).first;
      unknown_.push_back(&*found);
    }
    const auto begin = static_cast<size_t>(part.data() - text.text.data());
    const size_t end = begin + part.size();
    const bool is_at_border = has_border(text.text, begin, end, text.learnt);
    if (is_at_border && found->second.places.empty()) without_places_.push_back(&*found);
    text.parts.push_back({&found->second, {begin, end}, is_at_border});
  }
}

void WordEncoder::learn_words() {
  try {
    ask(unknown_, false);
    ask(without_places_, true);
  } catch (...) {
    // No word stays without its ids.
    table_.clear();
    table_bytes_ = 0;
    unknown_.clear();
    without_places_.clear();
    throw;
  }
  unknown_.clear();
  without_places_.clear();
}

void WordEncoder::ask(const std::vector<Table::value_type*>& words, bool with_places) {
  if (words.empty()) return;
  nlohmann::json lengths = nlohmann::json::array();
  std::string texts;
  for (const Table::value_type* each : words) {
    lengths.push_back(each->first.size());
    texts += each->first;
  }
  const PythonWorker::Message answer = worker_.ask(
      {{"action", "words"}, {"words", std::move(lengths)}, {"places", with_places}}, texts);
  const auto counts = answer.head.at("counts").get<std::vector<size_t>>();
  const std::vector<uint32_t> numbers = numbers_in(answer.payload);
  size_t num_ids = 0;
  for (const size_t count : counts) num_ids += count;
  FSDP_CHECK(counts.size() == words.size() && numbers.size() == num_ids * (with_places ? 3 : 1),
             "the tokenizer encoded ", counts.size(), " of ", words.size(),
             " words; use the pinned version of the package tokenizers");
  size_t at = 0;
  for (size_t i = 0; i < words.size(); ++i) {
    Word& word = words[i]->second;
    word.ids.assign(numbers.begin() + static_cast<std::ptrdiff_t>(at),
                    numbers.begin() + static_cast<std::ptrdiff_t>(at + counts[i]));
    word.places.clear();
    for (size_t id = at; with_places && id < at + counts[i]; ++id)
      word.places.emplace_back(numbers[num_ids + 2 * id], numbers[num_ids + 2 * id + 1]);
    at += counts[i];
    table_bytes_ += static_cast<int64_t>(kBytesOfEntry + words[i]->first.size() + 8 * counts[i]);
  }
}

EncodedDocument WordEncoder::assemble(const Document& document, const Text& text) const {
  EncodedDocument result;
  std::vector<int64_t>& tokens = result.tokens;
  const bool is_masked = document.is_chat || document.prompt_bytes > 0;
  const bool is_framed = !document.is_chat && (is_masked || document.is_beginning);
  if (is_framed) tokens = before_;
  result.learnt.resize(is_masked ? tokens.size() : 0);
  const auto touches = [&](size_t first, size_t end) {
    return std::any_of(text.learnt.begin(), text.learnt.end(), [&](const Place& span) {
      return first < span.second && std::max(end, first + 1) > span.first;
    });
  };
  for (const Part& part : text.parts) {
    tokens.insert(tokens.end(), part.word->ids.begin(), part.word->ids.end());
    if (!is_masked) continue;
    const size_t begin = part.place.first;
    if (!part.is_at_border)
      result.learnt.resize(tokens.size(), touches(begin, part.place.second) ? 1 : 0);
    else
      for (const Place& place : part.word->places)
        result.learnt.push_back(touches(begin + place.first, begin + place.second) ? 1 : 0);
  }
  if (is_framed) tokens.insert(tokens.end(), after_.begin(), after_.end());
  if (is_masked) result.learnt.resize(tokens.size(), 0);
  if (!document.is_end || !end_of_document_) return result;
  if (tokens.empty() || tokens.back() != *end_of_document_) {
    tokens.push_back(*end_of_document_);
    if (is_masked) result.learnt.push_back(0);
  }
  if (is_masked && !document.is_chat) result.learnt.back() = 1;  // the model ends it itself
  return result;
}

}  // namespace fsdp
