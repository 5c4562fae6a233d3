#include "fsdp/data/worker_tokenizer.h"

#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/hmac_sha256.h"

namespace fsdp {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxTokenizerBytes = int64_t{1} << 30;

// "hf-bpe-0123456789abcdef": the model, and the beginning of the file's SHA-256. The file decides
// what the tokens mean, wherever it lies; so its path is no part of the name.
std::string tokenizer_name(const std::string& model, const std::string& path) {
  const std::string text = read_text_file(path, kMaxTokenizerBytes);
  const Digest digest = sha256(std::as_bytes(std::span(text)));
  std::string name = concat("hf-", model, "-");
  for (size_t i = 0; i < 8; ++i) {
    char code[3];
    std::snprintf(code, sizeof code, "%02x", std::to_integer<unsigned>(digest[i]));
    name += code;
  }
  return name;
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

}  // namespace

WorkerTokenizer::WorkerTokenizer(const std::string& path, const std::string& end_of_document)
    : worker_("tokenizers", path) {
  const Json facts =
      worker_.ask({{"action", "open"}, {"path", path}, {"end", end_of_document}}).head;
  kind_.vocabulary = facts.at("vocabulary").get<int64_t>();
  kind_.token_bytes = token_bytes_for(kind_.vocabulary);
  if (!facts.at("end_of_document").is_null())
    kind_.end_of_document = facts.at("end_of_document").get<int64_t>();
  kind_.tokenizer = tokenizer_name(facts.at("model").get<std::string>(), path);
  ends_turns_ = facts.at("ends_turns").get<bool>();
  ends_ = facts.at("ends").get<std::vector<int64_t>>();
}

std::vector<EncodedDocument> WorkerTokenizer::encode(std::span<const Document> documents) const {
  Json rows = Json::array();
  std::string texts;
  for (const Document& each : documents) {
    rows.push_back(
        {each.text.size(), each.prompt_bytes, each.is_chat, each.is_beginning, each.is_end});
    texts += each.text;
  }
  try {
    return encoded_documents(worker_.ask({{"action", "encode"}, {"documents", rows}}, texts),
                             documents.size());
  } catch (const WorkerError& error) {
    if (error.document() < 0) throw;
    throw Error(concat(documents[static_cast<size_t>(error.document())].place, ": ", error.what()));
  }
}

std::vector<int64_t> WorkerTokenizer::encode_prompt(std::string_view text) const {
  return ids_of(worker_.ask({{"action", "prompt"}}, text).payload);
}

std::vector<int64_t> WorkerTokenizer::encode_chat(std::string_view chat) const {
  return ids_of(worker_.ask({{"action", "chat"}}, chat).payload);
}

// Spaces at the beginning of a text are written otherwise than within it, so the decoder must know
// what the text begins with.
void WorkerTokenizer::begin_text(std::span<const int64_t> prompt) const {
  static_cast<void>(decode(prompt, true));
}

std::string WorkerTokenizer::next_text(std::span<const int64_t> tokens) const {
  return decode(tokens, false);
}

std::string WorkerTokenizer::decode(std::span<const int64_t> tokens, bool is_first) const {
  return worker_.ask({{"action", "decode"}, {"is_first", is_first}}, payload_of(tokens)).payload;
}

}  // namespace fsdp
