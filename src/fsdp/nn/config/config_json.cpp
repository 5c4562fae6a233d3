#include "fsdp/nn/config/config_json.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "fsdp/base/check.h"
#include "fsdp/base/json_fields.h"
#include "fsdp/base/text.h"
#include "fsdp/nn/config/config_fields.h"

namespace fsdp {

namespace {

using Json = nlohmann::ordered_json;

// --- reading -------------------------------------------------------------------------------------

// Values that the file does not have stay what they are: those of the family.
class FieldReader final : public FieldWalk {
 public:
  // needed_by: who needs required fields; "": every file has them.
  explicit FieldReader(const JsonFields& fields, std::string needed_by = "")
      : fields_(fields), needed_by_(std::move(needed_by)) {}

  // The first field that is not computed, worded like the errors of JsonFields; "": none.
  const std::string& not_computed() const { return not_computed_; }

  void integer(const Field& field, int64_t& value, IntegerRange) override {
    check_presence(field);
    value = field.presence == Presence::kRequired
                ? fields_.integer(field.name)
                : fields_.integer_or(field.name, field.absent.value_or(value));
  }
  void number(const Field& field, double& value, NumberRule) override {
    check_presence(field);
    value = fields_.number_or(field.name, value);
  }
  void flag(const Field& field, bool& value) override {
    value = fields_.boolean_or(field.name, value);
  }
  void integer_or_null(const Field& field, int64_t& value) override {
    value = fields_.is_null(field.name) ? 0 : fields_.integer_or(field.name, value);
  }
  void other(const Field&, const std::function<void(const JsonFields&)>& read,
             const std::function<Json()>&) override {
    read(fields_);
  }

  // Version 5 of the package keeps everything in "rope_parameters", earlier ones in two fields.
  void rope(LlamaConfig& c, bool is_partial) override {
    c.rope_theta = fields_.number_or("rope_theta", c.rope_theta);
    for (const char* field : {"rope_scaling", "rope_parameters"}) {
      if (!fields_.has(field)) continue;
      const JsonFields rope = fields_.object(field);
      c.rope_theta = rope.number_or("rope_theta", c.rope_theta);
      if (!is_partial && rope.number_or("partial_rotary_factor", 1.0) != 1.0)
        note_not_computed(rope, "partial_rotary_factor", "only 1 is computed");
      read_scaling(rope, c);
      return;
    }
  }

  void only(const char* name, const Json& value, Written, const char* rule) override {
    if (!fields_.has(name) || is_in_file(name, value)) return;
    note_not_computed(fields_, name, rule ? rule : concat("only ", value.dump(), " is computed"));
  }

 private:
  void check_presence(const Field& field) const {
    if (field.presence == Presence::kRequired && !needed_by_.empty() && !fields_.has(field.name))
      fields_.refuse(field.name, concat("\"", needed_by_, "\" scaling needs it; add it"));
  }

  bool is_in_file(const char* name, const Json& value) const {
    if (value.is_string()) return fields_.text(name) == value.get<std::string>();
    if (value.is_boolean()) return fields_.boolean_or(name, false) == value.get<bool>();
    if (value.is_number()) return fields_.number_or(name, 0.0) == value.get<double>();
    return value.is_array() && fields_.array(name).empty();
  }

  template <typename Scaling>
  static Scaling read_as(const JsonFields& rope, const char* type) {
    Scaling scaling;
    FieldReader reader(rope, type);
    walk_fields(reader, scaling);
    return scaling;
  }

  void read_scaling(const JsonFields& rope, LlamaConfig& c) {
    // Until version 4.43 the package wrote "type".
    const char* field = rope.has("rope_type") ? "rope_type" : "type";
    const std::string type = rope.text_or(field, "default");
    if (type == "llama3") {
      c.rope_scaling = read_as<Llama3RopeScaling>(rope, "llama3");
    } else if (type == "yarn") {
      c.rope_scaling = read_as<YarnRopeScaling>(rope, "yarn");
      if (!rope.boolean_or("truncate", true))
        note_not_computed(rope, "truncate", "only true is computed");
    } else if (type != "default") {
      note_not_computed(rope, field, "only \"default\", \"llama3\" and \"yarn\" are computed");
    }
  }

  void note_not_computed(const JsonFields& fields, const char* field, const std::string& rule) {
    if (!not_computed_.empty()) return;
    try {
      fields.refuse(field, rule);
    } catch (const UsageError& error) {
      not_computed_ = error.what();
    }
  }

  const JsonFields& fields_;
  const std::string needed_by_;
  std::string not_computed_;
};

std::string& not_computed_of(LlamaConfig& c) { return c.not_computed; }
std::string& not_computed_of(NemotronHConfig& c) { return c.not_computed; }
template <typename Config>
std::string& not_computed_of(Config& c) {
  return c.decoder.not_computed;
}

// --- writing -------------------------------------------------------------------------------------

// Positions are written in the two fields that every version of the package reads.
class FieldWriter final : public FieldWalk {
 public:
  struct WrittenField {
    std::string name;
    Json value;
    Matters matters;
  };

  const std::vector<WrittenField>& fields() const { return written_; }
  Json json() const {
    Json json;
    for (const WrittenField& field : written_) json[field.name] = field.value;
    return json;
  }

  void add(const Field& field, Json value) {
    written_.push_back({field.name, std::move(value), field.matters});
  }

  void integer(const Field& field, int64_t& value, IntegerRange) override {
    if (field.presence != Presence::kUnlessZero || value != 0) add(field, value);
  }
  void number(const Field& field, double& value, NumberRule) override {
    if (field.presence != Presence::kUnlessZero || value != 0.0) add(field, value);
  }
  void flag(const Field& field, bool& value) override { add(field, value); }
  void integer_or_null(const Field& field, int64_t& value) override {
    add(field, value > 0 ? Json(value) : Json(nullptr));
  }
  void other(const Field& field, const std::function<void(const JsonFields&)>&,
             const std::function<Json()>& write) override {
    if (write) add(field, write());
  }
  void rope(LlamaConfig& c, bool) override {
    add({"rope_theta", Matters::kForResults}, c.rope_theta);
    Json scaling = nullptr;
    if (auto* llama3 = std::get_if<Llama3RopeScaling>(&c.rope_scaling))
      scaling = scaling_json("llama3", *llama3);
    if (auto* yarn = std::get_if<YarnRopeScaling>(&c.rope_scaling))
      scaling = scaling_json("yarn", *yarn);
    add({"rope_scaling", Matters::kForResults}, std::move(scaling));
  }
  void only(const char* name, const Json& value, Written written, const char*) override {
    if (written == Written::kYes) add({name}, value);
  }

 private:
  template <typename Scaling>
  static Json scaling_json(const char* type, Scaling& scaling) {
    FieldWriter writer;
    writer.add({"rope_type"}, type);
    walk_fields(writer, scaling);
    return writer.json();
  }

  std::vector<WrittenField> written_;
};

std::vector<FieldWriter::WrittenField> written_fields(ModelConfig config) {
  check_trainable(config);
  const ModelFamily& family = family_of(config);
  FieldWriter writer;
  writer.add({"model_type"}, family.model_type);
  writer.add({"architectures", Matters::kForTraining}, Json::array({family.model_class}));
  walk_fields(writer, config);
  return writer.fields();
}

}  // namespace

std::vector<std::string> known_model_types() {
  std::vector<std::string> types;
  for (const ModelFamily& family : model_families()) types.emplace_back(family.model_type);
  return types;
}

ModelConfig read_model_config(const JsonFields& fields) {
  const std::string model_type = fields.text("model_type");
  for (const ModelFamily& family : model_families()) {
    if (family.model_type != model_type) continue;
    ModelConfig config = family.absent;
    FieldReader reader(fields);
    walk_fields(reader, config);
    std::visit([&](auto& c) { not_computed_of(c) = reader.not_computed(); }, config);
    return config;
  }
  fields.refuse("model_type", concat("known are ", join(known_model_types(), ", ")));
}

ModelConfig parse_model_config(std::string_view json_text, const std::string& source) {
  const nlohmann::json document = parse_json(json_text, source);
  return read_model_config(JsonFields(document, source, ""));
}

std::string config_json(const ModelConfig& config) {
  Json json;
  for (const auto& field : written_fields(config)) json[field.name] = field.value;
  return json.dump(2) + "\n";
}

std::vector<FieldDifference> differing_fields(const ModelConfig& before, const ModelConfig& now,
                                              ModelAspect aspect) {
  const auto old_fields = written_fields(before);
  const auto new_fields = written_fields(now);
  std::vector<FieldDifference> differences;
  const auto text_of = [](const auto& fields, const std::string& name) {
    const auto field = std::find_if(fields.begin(), fields.end(),
                                    [&](const auto& each) { return each.name == name; });
    return field == fields.end() ? std::string("none") : field->value.dump();
  };
  const auto compare = [&](const FieldWriter::WrittenField& field) {
    if (field.matters == Matters::kForTraining) return;
    if (field.matters == Matters::kForResults && aspect == ModelAspect::kTensors) return;
    const FieldDifference each{field.name, text_of(old_fields, field.name),
                               text_of(new_fields, field.name)};
    if (each.before != each.now) differences.push_back(each);
  };
  for (const auto& field : old_fields) {
    compare(field);
    if (field.name == "model_type" && !differences.empty()) return differences;  // others follow
  }
  for (const auto& field : new_fields)
    if (text_of(old_fields, field.name) == "none") compare(field);
  return differences;
}

}  // namespace fsdp
