// How model tensors are named and divided in a checkpoint: rules as data, no code per model.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace fsdp {

struct NameMatch;
struct TensorSection;

// Fields of the modules that a pattern matches, and of everything inside them.
struct FieldsOfModules {
  // For module paths: `*` is any text (dots too), `?` one character; "decoder.layers.*", "*.mtp".
  std::string modules;
  std::map<std::string, int64_t> values;

  friend bool operator==(const FieldsOfModules&, const FieldsOfModules&) = default;
};

// If several patterns with a field match a module, the one with most letters (all but `*` and `?`)
// counts, and of equally long ones the last.
using ModuleFields = std::vector<FieldsOfModules>;

// One section that a rule cuts from a tensor.
struct SectionRule {
  // The stored name, in place of the text that the pattern matched: name_tables.h has the grammar.
  std::string name;
  // Along the rule's dim: a number, or a sum of fields. "": an equal part of what remains.
  std::string size = "";

  friend bool operator==(const SectionRule&, const SectionRule&) = default;
};

// Limits a rule to modules whose field has a value.
struct FieldCondition {
  enum class Unknown { kSkip, kApply };

  std::string field;
  // nullopt: any value.
  std::optional<int64_t> equals = std::nullopt;
  // For a module that does not state the field.
  Unknown unknown = Unknown::kSkip;

  friend bool operator==(const FieldCondition&, const FieldCondition&) = default;
};

struct NameRule {
  // kEveryName: the model's names, and those of a checkpoint, which may be another model's.
  // kModelNames: the model's only, for changes that must not be made twice.
  enum class Scope { kEveryName, kModelNames };

  // For people, in messages: "SwiGLU".
  std::string title;
  // Matches the names of tensors that the rule changes: name_tables.h has the grammar.
  std::string pattern;
  // The dim that is divided.
  int64_t dim = 0;
  // In their order along the dim. A single section without size renames any tensor.
  std::vector<SectionRule> sections;
  // nullopt: the rule is for all modules.
  std::optional<FieldCondition> condition = std::nullopt;
  Scope scope = Scope::kEveryName;

  friend bool operator==(const NameRule&, const NameRule&) = default;
};

// A table of rules. Each rule is applied to the sections that the rules before it made, and leaves
// those that its pattern does not match. Fields are those of the model tensor's module, whatever
// rules have made of its name.
class NameRules {
 public:
  // No rules: every tensor is one section, itself.
  NameRules() = default;

  // UsageError for a rule that cannot be read.
  explicit NameRules(std::vector<NameRule> rules, ModuleFields fields = {});

  const std::vector<NameRule>& rules() const { return rules_; }
  const ModuleFields& fields() const { return fields_; }

  // The sections a tensor is stored as: together exactly the tensor, in its order. Error if its
  // shape or its fields do not fit a rule, and for names that the rules would change again when the
  // checkpoint is read.
  std::vector<TensorSection> sections(const std::string& name,
                                      std::span<const int64_t> shape) const;

  // Sections of names read from a checkpoint: fused tensors are divided like those of the model,
  // so that both sides match; names that rules have already made stay as they are.
  std::vector<TensorSection> sections_of_stored(const std::string& name,
                                                std::span<const int64_t> shape) const;

 private:
  struct Parsed;

  // The match of rule `index` with a name, if the rule's condition holds for the owner.
  std::optional<NameMatch> match(size_t index, const std::string& name,
                                 const std::string& owner) const;
  std::vector<TensorSection> apply(const std::string& name, std::span<const int64_t> shape,
                                   NameRule::Scope names) const;
  // Applies one rule to one section; empty if the rule is not for it.
  std::vector<TensorSection> divide(size_t index, const TensorSection& section,
                                    const std::string& owner) const;
  std::vector<int64_t> sizes(size_t index, const TensorSection& section,
                             const std::string& owner) const;
  void check_final(const std::string& stored, const std::string& model) const;

  std::vector<NameRule> rules_;
  ModuleFields fields_;
  std::shared_ptr<const std::vector<Parsed>> parsed_;  // one per rule; nullptr without rules
};

struct NamedShape {
  std::string name;
  std::vector<int64_t> shape;
};

// Throws an Error if two tensors of a model would be stored under one name.
void check_unique(const NameRules& rules, std::span<const NamedShape> tensors);

}  // namespace fsdp
