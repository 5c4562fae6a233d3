// The fields of config.json, once for each family of models: readers, writers, checks and
// comparisons walk them.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "fsdp/nn/config/model_config.h"

namespace fsdp {

class JsonFields;

// The part of a model that depends on a field.
enum class Matters : uint8_t {
  kForTensors,
  kForResults,   // not the tensors
  kForTraining,  // not the results either, but for rounding
};

enum class Presence : uint8_t {
  kOptional,  // absent in a file: what the family's class says
  kRequired,
  kUnlessZero,  // written if it is not 0; absent: 0
};

struct Field {
  const char* name;
  Matters matters = Matters::kForTensors;
  Presence presence = Presence::kOptional;
  std::optional<int64_t> absent = {};  // the value of a file without it; not given: as it was
};

struct IntegerRange {
  int64_t least = 1;
  int64_t most = kMaxDim;
};
inline constexpr IntegerRange kDimOrNone{0, kMaxDim};

enum class NumberRule : uint8_t { kAboveZero, kFromZero };

class FieldWalk {
 public:
  using Json = nlohmann::ordered_json;

  virtual ~FieldWalk() = default;
  virtual void integer(const Field& field, int64_t& value, IntegerRange range = {}) = 0;
  virtual void number(const Field& field, double& value, NumberRule rule) = 0;
  virtual void flag(const Field& field, bool& value) = 0;
  // Null stands for 0.
  virtual void integer_or_null(const Field& field, int64_t& value) = 0;
  // A form of its own. Empty `write`: not written.
  virtual void other(const Field& field, const std::function<void(const JsonFields&)>& read,
                     const std::function<Json()>& write) = 0;
  // rope_theta and rope_scaling; is_partial: the family itself reads partial_rotary_factor.
  virtual void rope(LlamaConfig& config, bool is_partial) = 0;

  // A field of which one value is computed. `rule`: what errors say, if it is not that.
  enum class Written : uint8_t { kYes, kNo };
  virtual void only(const char*, const Json&, Written, const char* /*rule*/ = nullptr) {}
  // A member that the family's files have no field for, and the only value that they can mean.
  virtual void lacks(const char*, const Json& /*value*/, const Json& /*only*/) {}
};

// How a family's published configurations are called, and what those mean that leave fields out.
struct ModelFamily {
  const char* model_type;
  const char* model_class;
  ModelConfig absent;
};

const std::vector<ModelFamily>& model_families();
const ModelFamily& family_of(const ModelConfig& config);

void walk_fields(FieldWalk& walk, ModelConfig& config);
void walk_fields(FieldWalk& walk, Llama3RopeScaling& scaling);
void walk_fields(FieldWalk& walk, YarnRopeScaling& scaling);

}  // namespace fsdp
