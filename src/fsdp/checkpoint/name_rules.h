// How model tensors are named and divided in a checkpoint: rules as data, no code per model.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fsdp/checkpoint/module_fields.h"
#include "fsdp/checkpoint/name_pattern.h"
#include "fsdp/checkpoint/tensor_sections.h"

namespace fsdp {

// One section that a rule makes of a tensor.
struct SectionRule {
  // What it is stored as, in place of what the pattern describes: see NameTemplate.
  std::string name;
  // Along the rule's dim: see FieldSum. "": an equal part of what the other sections leave.
  std::string size = "";

  friend bool operator==(const SectionRule&, const SectionRule&) = default;
};

// A rule with a condition is only for modules whose field has a value.
struct FieldCondition {
  enum class Unknown { kSkip, kApply };

  std::string field;
  // nullopt: any value.
  std::optional<int64_t> equals = std::nullopt;
  // What to do where the field is not stated.
  Unknown unknown = Unknown::kSkip;

  friend bool operator==(const FieldCondition&, const FieldCondition&) = default;
};

struct NameRule {
  // kEveryName: a model's names, and those of a checkpoint, which may be another model's.
  // kModelNames: not those of a checkpoint; for changes that must not be made twice.
  enum class Scope { kEveryName, kModelNames };

  // For people, in messages: "SwiGLU".
  std::string title;
  // Of the tensors it is for: see NamePattern.
  std::string pattern;
  // The dim that is divided.
  int64_t dim = 0;
  // In their order along the dim. A single one without size is a rename, of any tensor.
  std::vector<SectionRule> sections;
  // nullopt: for all modules.
  std::optional<FieldCondition> condition = std::nullopt;
  Scope scope = Scope::kEveryName;

  friend bool operator==(const NameRule&, const NameRule&) = default;
};

// A table of rules. Every rule is applied to what the rules before it made of a tensor; rules whose
// pattern does not describe it leave it as it is. Fields are those of the model tensor's module,
// whatever rules have made of its name.
class NameRules {
 public:
  // No rules: every tensor is one section, itself.
  NameRules() = default;

  // UsageError for a rule that cannot be read.
  explicit NameRules(std::vector<NameRule> rules, ModuleFields fields = {});

  const std::vector<NameRule>& rules() const { return rules_; }
  const ModuleFields& fields() const { return fields_; }

  // What a tensor is stored as: sections that together are exactly the tensor, in its order. Error
  // where its shape or its fields do not fit a rule, and for names that the rules would change
  // again when the checkpoint is read.
  std::vector<TensorSection> sections(const std::string& name,
                                      std::span<const int64_t> shape) const;

  // The same for names read from a checkpoint: its fused tensors are divided like those of the
  // model, so that both sides meet; names that already are what the rules make stay as they are.
  std::vector<TensorSection> sections_of_stored(const std::string& name,
                                                std::span<const int64_t> shape) const;

 private:
  // A rule, read.
  struct Parsed {
    NamePattern pattern;
    std::vector<NameTemplate> names;
    std::vector<std::optional<FieldSum>> sizes;  // nullopt: an equal part
  };

  static Parsed parse(const NameRule& rule);

  // What the pattern of rule `index` found in a name, where its condition holds for the owner.
  std::optional<NameMatch> match(size_t index, const std::string& name,
                                 const std::string& owner) const;
  std::vector<TensorSection> apply(const std::string& name, std::span<const int64_t> shape,
                                   NameRule::Scope names) const;
  // One rule on one section; nothing where it is not for it.
  std::vector<TensorSection> divide(size_t index, const TensorSection& section,
                                    const std::string& owner) const;
  std::vector<int64_t> sizes(size_t index, const TensorSection& section,
                             const std::string& owner) const;
  void check_final(const std::string& stored, const std::string& model) const;

  std::vector<NameRule> rules_;
  ModuleFields fields_;
  std::vector<Parsed> parsed_;  // one per rule
};

struct NamedShape {
  std::string name;
  std::vector<int64_t> shape;
};

// Error when two tensors of a model would be stored under one name.
void check_unique(const NameRules& rules, std::span<const NamedShape> tensors);

}  // namespace fsdp
