#include "fsdp/train/model/model_tokenizer.h"

#include <nlohmann/json.hpp>

#include "fsdp/base/check.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/base/json_fields.h"
#include "fsdp/checkpoint/format/model_files.h"
#include "fsdp/data/byte_tokenizer.h"
#include "fsdp/data/tokenizer.h"

namespace fsdp::train {

std::string tokenizer_path(const std::string& given, std::span<const std::string> origins) {
  if (given != "auto") return given;
  for (const std::string& origin : origins) {
    const std::string directory = is_directory(origin) ? origin : directory_of(origin);
    const std::string path = concat(directory, "/", kTokenizerFileName);
    if (path_exists(path)) return path;
  }
  return kByteTokenizerName;
}

std::vector<int64_t> stored_end_tokens(const std::string& checkpoint) {
  std::vector<int64_t> ends;
  const auto add = [&](const std::string& text, const std::string& source) {
    const nlohmann::json config = parse_json(text, source);
    const nlohmann::json field = config.value("eos_token_id", nlohmann::json());
    // One number, or a list of them.
    for (const nlohmann::json& each : field.is_array() ? field : nlohmann::json::array({field}))
      if (each.is_number_integer()) ends.push_back(each.get<int64_t>());
  };
  for (const ModelFile& file : stored_model_files(checkpoint))
    if (file.name == "generation_config.json") add(file.text, concat(checkpoint, "/", file.name));
  if (const auto config = stored_model_config(checkpoint))
    add(*config, concat(checkpoint, "/config.json"));
  return ends;
}

}  // namespace fsdp::train
