#include "fsdp/data/tokenizer.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/hmac_sha256.h"
#include "fsdp/data/python_worker.h"
#include "fsdp/data/token_file.h"
#include "fsdp/data/word_encoder.h"

namespace fsdp {

namespace {

// --- a tokenizer of others -----------------------------------------------------------------------

using Json = nlohmann::json;

constexpr int64_t kMaxTokenizerBytes = int64_t{1} << 30;

// "hf-bpe-0123456789abcdef": the model, and the beginning of the file's SHA-256. The file decides
// what the tokens mean, wherever it lies; so its path is no part of the name.
std::string tokenizer_name(const std::string& model, const std::string& path) {
  const std::string text = read_text_file(path, kMaxTokenizerBytes);
  const Digest digest = sha256(std::as_bytes(std::span(text)));
  return concat("hf-", model, "-", hex_text(digest, 8));
}

// The files beside a tokenizer.json that say how its chats and documents are framed.
std::string fingerprint_beside(const std::string& path) {
  std::string text;
  for (const char* name : {"special_tokens_map.json", "tokenizer_config.json",
                           "chat_template.jinja", "chat_template.json"}) {
    const std::string file = concat(directory_of(path), "/", name);
    text += concat(name, "\n");
    if (is_regular_file(file)) text += read_text_file(file, kMaxTokenizerBytes);
  }
  return hex_text(sha256(std::as_bytes(std::span(text))), 8);
}

std::vector<int64_t> ids_of(std::string_view payload) {
  std::vector<int64_t> ids(payload.size() / sizeof(uint32_t));
  for (size_t i = 0; i < ids.size(); ++i) {
    uint32_t id = 0;
    std::memcpy(&id, payload.data() + i * sizeof id, sizeof id);
    ids[i] = id;
  }
  return ids;
}

std::string payload_of(std::span<const int64_t> ids) {
  std::string payload(ids.size() * sizeof(uint32_t), '\0');
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto id = static_cast<uint32_t>(ids[i]);
    std::memcpy(payload.data() + i * sizeof id, &id, sizeof id);
  }
  return payload;
}

// The tokens of all documents, four bytes each, and then a byte for each token of masked ones.
std::vector<EncodedDocument> encoded_documents(const PythonWorker::Message& answer,
                                               size_t num_documents) {
  const auto counts = answer.head.at("counts").get<std::vector<size_t>>();
  FSDP_CHECK(counts.size() == num_documents, "the tokenizer encoded ", counts.size(), " of ",
             num_documents, " documents; use the pinned version of the package tokenizers");
  std::vector<EncodedDocument> documents(counts.size());
  std::string_view rest = answer.payload;
  const auto take = [&](size_t bytes) {
    FSDP_CHECK(bytes <= rest.size(), "the tokenizer's answer is cut short");
    const std::string_view taken = rest.substr(0, bytes);
    rest.remove_prefix(bytes);
    return taken;
  };
  for (size_t i = 0; i < counts.size(); ++i)
    documents[i].tokens = ids_of(take(counts[i] * sizeof(uint32_t)));
  for (const Json& each : answer.head.at("masked")) {
    EncodedDocument& document = documents.at(each.get<size_t>());
    const std::string_view mask = take(document.tokens.size());
    document.learnt.assign(mask.begin(), mask.end());
  }
  return documents;
}

// A tokenizer.json of HuggingFace's package tokenizers, which encodes and decodes in a process of
// its own.
class WorkerTokenizer final : public Tokenizer {
 public:
  // `path`: the tokenizer.json; other files of the model are looked for beside it.
  WorkerTokenizer(const std::string& path, const std::string& end_of_document)
      : worker_("tokenizers", path) {
    const Json facts =
        worker_.ask({{"action", "open"}, {"path", path}, {"end", end_of_document}}).head;
    kind_.vocabulary = facts.at("vocabulary").get<int64_t>();
    kind_.token_bytes = token_bytes_for(kind_.vocabulary);
    if (!facts.at("end_of_document").is_null())
      kind_.end_of_document = facts.at("end_of_document").get<int64_t>();
    kind_.tokenizer = tokenizer_name(facts.at("model").get<std::string>(), path);
    fingerprint_ = concat(kind_.tokenizer, " ", fingerprint_beside(path), " ", end_of_document);
    ends_turns_ = facts.at("ends_turns").get<bool>();
    ends_ = facts.at("ends").get<std::vector<int64_t>>();
  }

  const TokenHeader& kind() const override { return kind_; }
  std::string fingerprint() const override { return fingerprint_; }
  bool ends_turns() const override { return ends_turns_; }
  const std::vector<int64_t>& ends() const override { return ends_; }
  std::vector<EncodedDocument> encode(std::span<const Document> documents) const override {
    try {
      std::call_once(words_opened_,
                     [&] { words_ = WordEncoder::open(worker_, kind_.end_of_document); });
      if (words_)
        if (std::vector<EncodedDocument> encoded = words_->encode(documents); !encoded.empty())
          return encoded;
      return encode_whole(documents);
    } catch (const WorkerError& error) {
      if (error.document() < 0) throw;
      throw Error(
          concat(documents[static_cast<size_t>(error.document())].place, ": ", error.what()));
    }
  }

  std::vector<int64_t> encode_prompt(std::string_view text) const override {
    return ids_of(worker_.ask({{"action", "prompt"}}, text).payload);
  }

  std::vector<int64_t> encode_chat(std::string_view chat) const override {
    return ids_of(worker_.ask({{"action", "chat"}}, chat).payload);
  }

  // Spaces at the beginning of a text are written otherwise than within it, so the decoder must
  // know what the text begins with.
  void begin_text(std::span<const int64_t> prompt) const override {
    static_cast<void>(decode(prompt, true));
  }

  std::string next_text(std::span<const int64_t> tokens) const override {
    return decode(tokens, false);
  }

 private:
  std::vector<EncodedDocument> encode_whole(std::span<const Document> documents) const {
    Json rows = Json::array();
    std::string texts;
    for (const Document& each : documents) {
      rows.push_back(
          {each.text.size(), each.prompt_bytes, each.is_chat, each.is_beginning, each.is_end});
      texts += each.text;
    }
    return encoded_documents(worker_.ask({{"action", "encode"}, {"documents", rows}}, texts),
                             documents.size());
  }

  std::string decode(std::span<const int64_t> tokens, bool is_first) const {
    return worker_.ask({{"action", "decode"}, {"is_first", is_first}}, payload_of(tokens)).payload;
  }

  PythonWorker worker_;
  mutable std::once_flag words_opened_;  // only what encodes needs them
  mutable std::unique_ptr<WordEncoder> words_;
  TokenHeader kind_;
  std::string fingerprint_;
  bool ends_turns_ = false;
  std::vector<int64_t> ends_;
};

// --- bytes ---------------------------------------------------------------------------------------

class ByteTokenizer final : public Tokenizer {
 public:
  const TokenHeader& kind() const override { return kind_; }
  std::string fingerprint() const override { return kByteTokenizerName; }
  const std::vector<int64_t>& ends() const override { return ends_; }

  std::vector<EncodedDocument> encode(std::span<const Document> documents) const override {
    std::vector<EncodedDocument> encoded;
    for (const Document& each : documents) {
      if (each.is_chat) refuse_chat(each.place + ": ");
      EncodedDocument& out = encoded.emplace_back();
      out.tokens = encode_prompt(each.text);
      if (each.is_end) out.tokens.push_back(kByteEndOfDocument);
      if (each.prompt_bytes == 0) continue;
      out.learnt.assign(out.tokens.size(), 1);
      std::fill_n(out.learnt.begin(), each.prompt_bytes, uint8_t{0});
    }
    return encoded;
  }

  std::vector<int64_t> encode_prompt(std::string_view text) const override {
    const auto* const bytes = reinterpret_cast<const unsigned char*>(text.data());
    return {bytes, bytes + text.size()};
  }

  std::vector<int64_t> encode_chat(std::string_view /*chat*/) const override { refuse_chat(""); }

  void begin_text(std::span<const int64_t> /*prompt*/) const override {}
  std::string next_text(std::span<const int64_t> tokens) const override {
    std::string text;
    for (const int64_t token : tokens) {
      FSDP_CHECK(token >= 0 && token < kByteVocabulary, "token ", token,
                 " is no byte: byte-level tokens are 0 to 255, and 256 ends a document; decode "
                 "with the tokenizer that the model was trained with");
      if (token != kByteEndOfDocument) text.push_back(static_cast<char>(token));
    }
    return text;
  }

 private:
  [[noreturn]] static void refuse_chat(const std::string& place) {
    throw UsageError(concat(place,
                            "a chat needs a chat template, which bytes do not have; give the "
                            "tokenizer of a model for chats, e.g. --tokenizer DIRECTORY"));
  }

  const TokenHeader kind_ = {.token_bytes = token_bytes_for(kByteVocabulary),
                             .vocabulary = kByteVocabulary,
                             .end_of_document = kByteEndOfDocument,
                             .tokenizer = kByteTokenizerName};
  const std::vector<int64_t> ends_ = {kByteEndOfDocument};
};

}  // namespace

std::shared_ptr<const Tokenizer> open_tokenizer(const std::string& path,
                                                const std::string& end_of_document) {
  if (path == kByteTokenizerName) {
    if (!end_of_document.empty())
      throw UsageError(concat("--end-of-document is '", end_of_document,
                              "', but a document of bytes ends with token 256; leave it out, or "
                              "give a --tokenizer"));
    return std::make_shared<ByteTokenizer>();
  }
  const std::string file = is_directory(path) ? concat(path, "/", kTokenizerFileName) : path;
  if (!path_exists(file))
    throw UsageError(concat("--tokenizer is '", path, "', but there is no file '", file,
                            "'; give a tokenizer.json, a directory with one, or bytes"));
  if (!is_regular_file(file))
    throw UsageError(concat("--tokenizer is '", path, "', but '", file,
                            "' is no regular file; write what is in it to one"));
  return std::make_shared<WorkerTokenizer>(file, end_of_document);
}

}  // namespace fsdp
