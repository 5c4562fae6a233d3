// Text into tokens and back: bytes, which are built in, or a tokenizer of others (docs/data.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp {

struct TokenHeader;

// A text that becomes tokens, or a piece of one that is too long to be held.
struct Document {
  std::string text;  // of a chat: the JSON object with its "messages"
  // The first bytes are a prompt: the model sees it, and learns what follows.
  size_t prompt_bytes = 0;
  bool is_chat = false;  // the model learns what the assistant says
  bool is_beginning = true;
  bool is_end = true;
  std::string place = {};  // for errors: "rows.jsonl, line 12"
};

struct EncodedDocument {
  std::vector<int64_t> tokens;  // the one that ends the document included
  std::vector<uint8_t> learnt;  // of each token: 1 or 0; empty: all are
};

// Immutable but for the text that is being decoded; any thread may call it.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  // The header of a file of these tokens, without its counts.
  virtual const TokenHeader& kind() const = 0;
  // Differs where documents may have other tokens: by its files, chat template included.
  virtual std::string fingerprint() const = 0;
  // Whether the token that ends documents also ends turns of chats.
  virtual bool ends_turns() const { return false; }
  // Tokens after which a model has said all.
  virtual const std::vector<int64_t>& ends() const = 0;

  // Error that begins with the place of the document that cannot be encoded.
  virtual std::vector<EncodedDocument> encode(std::span<const Document> documents) const = 0;

  // Text that a model goes on with; and a chat, the JSON object with its "messages", that the
  // assistant answers.
  virtual std::vector<int64_t> encode_prompt(std::string_view text) const = 0;
  virtual std::vector<int64_t> encode_chat(std::string_view chat) const = 0;

  // The text of tokens one after the other, of one text at a time. A character whose bytes are not
  // complete is given with the last of them; special tokens have no text.
  virtual void begin_text(std::span<const int64_t> prompt) const = 0;
  virtual std::string next_text(std::span<const int64_t> tokens) const = 0;
};

// The tokenizer that is built in: a token is a byte, whether it is valid UTF-8 or not, and one more
// ends a document.
inline constexpr const char* kByteTokenizerName = "bytes";
inline constexpr int64_t kByteVocabulary = 257;
inline constexpr int64_t kByteEndOfDocument = 256;

inline constexpr const char* kTokenizerFileName = "tokenizer.json";

// "bytes", a tokenizer.json of HuggingFace's tokenizers, or a directory with one, which needs the
// Python package of that name. `end_of_document`: the token that ends a document; "": what the
// tokenizer's files say. Error or UsageError that names the path.
std::shared_ptr<const Tokenizer> open_tokenizer(const std::string& path,
                                                const std::string& end_of_document = "");

}  // namespace fsdp
