#include "fsdp/checkpoint/model_config.h"

#include "fsdp/base/error.h"
#include "fsdp/base/json_fields.h"

namespace fsdp {

namespace {

std::string_view torch_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return "float64";
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat8E4M3:
      return "float8_e4m3fn";
    case DType::kFloat8E5M2:
      return "float8_e5m2";
    case DType::kInt64:
      return "int64";
    case DType::kInt32:
      return "int32";
    case DType::kUInt8:
      return "uint8";
  }
  return "";
}

}  // namespace

std::string model_type_of(std::string_view config, const std::string& source) {
  const nlohmann::json document = parse_json(config, source);
  return JsonFields(document, source, "").text_or("model_type", "");
}

bool ties_word_embeddings(std::string_view config, const std::string& source) {
  const nlohmann::json document = parse_json(config, source);
  return JsonFields(document, source, "").boolean_or("tie_word_embeddings", false);
}

std::optional<DType> published_dtype(std::string_view config, const std::string& source) {
  const nlohmann::json document = parse_json(config, source);
  const JsonFields fields(document, source, "");  // an object
  for (const char* field : {"dtype", "torch_dtype"}) {
    if (!fields.has(field)) continue;
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16})
      if (document[field] == torch_name(dtype)) return dtype;
    return std::nullopt;
  }
  return std::nullopt;
}

std::string with_stored_dtype(std::string_view config, const std::string& source, DType dtype) {
  const nlohmann::json checked = parse_json(config, source);
  const JsonFields fields(checked, source, "");  // an object
  // Once more, since only this kind keeps the order of the fields.
  nlohmann::ordered_json document = nlohmann::ordered_json::parse(config);
  for (const char* field : {"torch_dtype", "dtype"}) document[field] = torch_name(dtype);
  return document.dump(2) + "\n";
}

}  // namespace fsdp
