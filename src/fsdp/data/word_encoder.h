// Texts into tokens for tokenizers that cut them into words: each different word is encoded once.
//
// A tokenizer of the GPT kind cuts a text before it encodes the parts. WordEncoder cuts at some of
// the same places, those that are certain whatever stands around them, so a part's tokens are the
// same in every text: the worker is asked for a part that was not seen yet, and a table has others.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "fsdp/data/python_worker.h"
#include "fsdp/data/tokenizer.h"

namespace fsdp {

// Cuts a text where a tokenizer of the GPT kind does, whatever stands around the place: before the
// space of a word, and where ASCII letters or digits end with other ASCII.
class WordCutter {
 public:
  // `whole`: tokens that stand for themselves, such as <|im_end|>; the longest that fits is a part.
  // `ends_lines`: whether the tokenizer cuts after line breaks, too.
  WordCutter(std::vector<std::string> whole, bool ends_lines);

  // Its parts, in order; together they are the text.
  std::vector<std::string_view> cut(std::string_view text) const;

 private:
  void cut_segment(std::string_view text, std::vector<std::string_view>& parts) const;
  size_t whole_token_at(std::string_view text, size_t at) const;  // its bytes; 0: none

  std::array<std::vector<std::string>, 256> by_first_byte_;  // the longest first
  bool ends_lines_;
};

class WordEncoder {
 public:
  // nullptr for a tokenizer that must see whole texts. The worker must outlive it.
  static std::unique_ptr<WordEncoder> open(const PythonWorker& worker,
                                           std::optional<int64_t> end_of_document);

  // Like Tokenizer::encode(), but for the errors, which are WorkerErrors. Texts that are not UTF-8
  // are none of its own: it returns no documents for them.
  std::vector<EncodedDocument> encode(std::span<const Document> documents);

 private:
  using Place = std::pair<size_t, size_t>;  // first byte, and the one after the last

  struct Word {
    std::vector<int64_t> ids;
    std::vector<Place> places;  // of the ids in the word; empty: not asked for yet
  };
  struct Hash : std::hash<std::string_view> {
    using is_transparent = void;
  };
  using Table = std::unordered_map<std::string, Word, Hash, std::equal_to<>>;

  struct Part {
    const Word* word = nullptr;
    Place place;                // in its text
    bool is_at_border = false;  // of what is learnt
  };

  struct Text {
    std::string_view text;
    std::vector<Place> learnt;
    std::vector<Part> parts;
  };

  WordEncoder(const PythonWorker& worker, const nlohmann::json& rules,
              std::optional<int64_t> end_of_document);

  // The texts of documents, chats as their template has them.
  std::vector<Text> texts_of(std::span<const Document> documents, std::string& rendered) const;
  void cut(Text& text);
  void learn_words();
  void ask(const std::vector<Table::value_type*>& words, bool with_places);
  EncodedDocument assemble(const Document& document, const Text& text) const;

  const PythonWorker& worker_;
  const WordCutter cutter_;
  const std::vector<int64_t> before_;  // a text that is no chat
  const std::vector<int64_t> after_;
  const std::optional<int64_t> end_of_document_;

  std::mutex mutex_;  // guards the rest
  Table table_;
  int64_t table_bytes_ = 0;
  std::vector<Table::value_type*> unknown_;
  std::vector<Table::value_type*> without_places_;
};

}  // namespace fsdp
