#include "fsdp/python/bindings.h"

#include <algorithm>
#include <concepts>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/option_values.h"
#include "fsdp/base/text.h"
#include "fsdp/optim/option_fields.h"
#include "fsdp/shard/module_roles.h"
#include "fsdp/shard/option_fields.h"

namespace fsdp {

namespace py = pybind11;

namespace {

std::string shown_value(const py::handle& value) {
  return concat(py::repr(value).cast<std::string>(), " (",
                py::type::of(value).attr("__name__").cast<std::string>(), ")");
}

[[noreturn]] void refuse_keyword(const std::string& name, const py::handle& value,
                                 const std::string& rule) {
  throw UsageError(concat(name, " is ", shown_value(value), "; ", rule));
}

// Keywords are taken one by one; one that nobody took is unknown.
class Keywords {
 public:
  explicit Keywords(const py::dict& values) : values_(values) {}

  void take(const char* name, bool& field) {
    with(name, [&](const py::handle& value) {
      if (!py::isinstance<py::bool_>(value))
        refuse_keyword(name, value, "it must be True or False");
      field = value.cast<bool>();
    });
  }

  template <std::integral Number>
  requires(!std::same_as<Number, bool>) void take(const char* name, Number& field) {
    with(name, [&](const py::handle& value) {
      const std::string rule = "it must be a whole number of at most 63 bits";
      if (py::isinstance<py::bool_>(value) || !PyIndex_Check(value.ptr()))
        refuse_keyword(name, value, rule);
      try {
        field = value.cast<Number>();
      } catch (const py::cast_error&) {
        refuse_keyword(name, value, rule);
      }
    });
  }

  void take(const char* name, double& field) {
    with(name, [&](const py::handle& value) { field = number(name, value); });
  }

  void take(const char* name, std::optional<at::ScalarType>& field) {
    with(name, [&](const py::handle& value) {
      field = value.is_none() ? std::nullopt : std::optional(dtype(name, value, " or None"));
    });
  }

  void take(const char* name, at::ScalarType& field) {
    with(name, [&](const py::handle& value) { field = dtype(name, value, ""); });
  }

  void take(const char* name, std::optional<c10::Device>& field) {
    with(name, [&](const py::handle& value) {
      if (value.is_none()) return;
      try {
        field = py::isinstance<py::str>(value) ? c10::Device(value.cast<std::string>())
                                               : value.cast<c10::Device>();
      } catch (const std::exception&) {
        refuse_keyword(name, value, "it must be a torch.device, its name, or None");
      }
    });
  }

  template <typename Choice>
  requires std::is_enum_v<Choice>
  void take(const char* name, Choice& field) { take_choice(name, field, choice_names(field)); }

  // torch.optim.Muon's words.
  void take(const char* name, MuonScale& field) {
    take_choice(name, field, {"original", "match_rms_adamw"});
  }

  void take(const char* name, Strategy& field) {
    with(name, [&](const py::handle& value) { field = parse_strategy(text(name, value)); });
  }

  void take(const char* name, Granularity& field) {
    with(name, [&](const py::handle& value) { field = parse_granularity(text(name, value)); });
  }

  void take(const char* name, LossScale& field) {
    with(name, [&](const py::handle& value) {
      if (py::isinstance<py::str>(value)) {
        parse_choice(name, value.cast<std::string>(), std::vector<std::string>{"dynamic"});
        field = LossScale::dynamic();
      } else {
        field = LossScale::fixed(number(name, value));
      }
    });
  }

  // Python knows a group of parameters as a rule: (pattern, weight decay, factor of the rate).
  void take(const char* name, std::vector<ParameterRule>& field) {
    with(name, [&](const py::handle& value) {
      for (const py::handle& each : value) {
        const auto [pattern, weight_decay, scale] =
            each.cast<std::tuple<std::string, double, double>>();
        field.push_back({pattern, weight_decay, scale});
      }
    });
  }

  // A pattern, or several.
  void take(const char* name, std::vector<std::string>& field) {
    with(name, [&](const py::handle& value) {
      if (py::isinstance<py::str>(value)) return field.push_back(value.cast<std::string>());
      if (!py::isinstance<py::sequence>(value))
        refuse_keyword(name, value,
                       "it must be a pattern of names such as '*.experts.*', or a list");
      for (const py::handle& each : value) {
        if (!py::isinstance<py::str>(each))
          refuse_keyword(name, value, "its patterns must be strings such as '*.experts.*'");
        field.push_back(each.cast<std::string>());
      }
    });
  }

  void take(const char* name, std::vector<TensorParameters>& field) {
    with(name, [&](const py::handle& value) {
      if (!py::isinstance<py::dict>(value))
        refuse_keyword(
            name, value,
            "it must be a dict of patterns of names, such as {'*.up.weight': TpShard(0)}");
      for (const auto& [pattern, placement] : value.cast<py::dict>()) {
        try {
          field.push_back({pattern.cast<std::string>(), placement.cast<TpPlacement>()});
        } catch (const py::cast_error&) {
          throw UsageError(concat(name, " has ", shown_value(placement), " for ",
                                  py::repr(pattern).cast<std::string>(),
                                  "; it takes patterns of names with TpShard(dim), TpPartial() or "
                                  "TpEqual()"));
        }
      }
    });
  }

  // A pattern, several, or a dict of them with the rows of their matrices.
  void take(const char* name, std::vector<MatrixParameters>& field) {
    with(name, [&](const py::handle& value) {
      if (py::isinstance<py::str>(value)) return field.push_back({value.cast<std::string>()});
      try {
        if (py::isinstance<py::dict>(value)) {
          for (const auto& [pattern, rows] : value.cast<py::dict>())
            field.push_back({pattern.cast<std::string>(), rows.is_none()
                                                              ? std::vector<int64_t>()
                                                              : rows.cast<std::vector<int64_t>>()});
        } else {
          for (const std::string& pattern : value.cast<std::vector<std::string>>())
            field.push_back({pattern});
        }
      } catch (const py::cast_error&) {
        refuse_keyword(name, value,
                       "it must be a pattern of names such as 'model.layers.*', a list of them, or "
                       "a dict of them with the rows of their matrices, such as {'*.qkv.weight': "
                       "[64, 16, 16]}");
      }
    });
  }

  void refuse_unknown() const {
    for (const auto& [key, value] : values_) {
      const auto name = key.cast<std::string>();
      if (std::find(known_.begin(), known_.end(), name) != known_.end()) continue;
      const std::string near = nearest(name, known_);
      throw UsageError(concat(
          "'", name, "' is no option",
          near.empty() ? "; there are " + join(known_, ", ") : "; did you mean '" + near + "'?"));
    }
  }

 private:
  // Calls `set` with the keyword's value, if it is there.
  template <typename Set>
  void with(const char* name, const Set& set) {
    known_.emplace_back(name);
    if (values_.contains(name)) set(values_[name]);
  }

  // The value is one of `names`, in the order of the enum.
  template <typename Choice>
  void take_choice(const char* name, Choice& field, const std::vector<std::string>& names) {
    with(name, [&](const py::handle& value) {
      if (!py::isinstance<py::str>(value))
        refuse_keyword(name, value, concat("it must be one of '", join(names, "', '"), "'"));
      field = static_cast<Choice>(parse_choice(name, value.cast<std::string>(), names));
    });
  }

  static std::string text(const char* name, const py::handle& value) {
    if (!py::isinstance<py::str>(value)) refuse_keyword(name, value, "it must be a string");
    return value.cast<std::string>();
  }

  static double number(const char* name, const py::handle& value) {
    if (py::isinstance<py::bool_>(value) || !PyNumber_Check(value.ptr()))
      refuse_keyword(name, value, "it must be a number");
    try {
      return py::float_(py::reinterpret_borrow<py::object>(value));
    } catch (const py::error_already_set&) {
      refuse_keyword(name, value, "it must be a number");
    }
  }

  static at::ScalarType dtype(const char* name, const py::handle& value, const char* or_none) {
    try {
      if (!py::isinstance<py::str>(value)) return value.cast<at::ScalarType>();
    } catch (const py::cast_error&) {
    }
    refuse_keyword(name, value, concat("it must be a torch.dtype such as torch.float32", or_none));
  }

  const py::dict values_;
  std::vector<std::string> known_;
};

template <typename Options>
Options options_of(const py::dict& keywords, Options options = {}) {
  Keywords given(keywords);
  visit_fields(options, [&](const OptionField& field, auto& value, const auto&) {
    if (field.keyword != nullptr) given.take(field.keyword, value);
  });
  given.refuse_unknown();
  return options;
}

}  // namespace

ShardOptions shard_options(const py::dict& keywords) { return options_of<ShardOptions>(keywords); }

AdamWOptions adamw_options(const py::dict& keywords) { return options_of<AdamWOptions>(keywords); }

SGDOptions sgd_options(const py::dict& keywords) { return options_of<SGDOptions>(keywords); }

MuonOptions muon_options(const py::dict& keywords) { return options_of<MuonOptions>(keywords); }

PrecisionPolicy precision_policy(const PrecisionPolicy& current, const py::dict& keywords) {
  return options_of(keywords, current);
}

}  // namespace fsdp
