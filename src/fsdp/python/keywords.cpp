#include "fsdp/python/keywords.h"

#include <algorithm>
#include <concepts>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/option_values.h"
#include "fsdp/base/text.h"
#include "fsdp/shard/parallel_module.h"

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

  // Calls `set` with the keyword's value, if it is there.
  template <typename Set>
  void with(const char* name, const Set& set) {
    known_.emplace_back(name);
    if (values_.contains(name)) set(values_[name]);
  }

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

  // The value is one of `names`, in the order of the enum.
  template <typename Choice>
  void take_choice(const char* name, Choice& field, const std::vector<std::string>& names) {
    with(name, [&](const py::handle& value) {
      if (!py::isinstance<py::str>(value))
        refuse_keyword(name, value, concat("it must be one of '", join(names, "', '"), "'"));
      field = static_cast<Choice>(parse_choice(name, value.cast<std::string>(), names));
    });
  }

  std::string text(const char* name, const py::handle& value) const {
    if (!py::isinstance<py::str>(value)) refuse_keyword(name, value, "it must be a string");
    return value.cast<std::string>();
  }

  double number(const char* name, const py::handle& value) const {
    if (py::isinstance<py::bool_>(value) || !PyNumber_Check(value.ptr()))
      refuse_keyword(name, value, "it must be a number");
    try {
      return py::float_(py::reinterpret_borrow<py::object>(value));
    } catch (const py::error_already_set&) {
      refuse_keyword(name, value, "it must be a number");
    }
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

void take_precision(Keywords& keywords, PrecisionPolicy& precision) {
  keywords.take("params", precision.params);
  keywords.take("main_params", precision.main_params);
  keywords.take_choice("main_storage", precision.main_storage, {"separate", "split"});
  keywords.take("main_grads", precision.main_grads);
  keywords.take("grad_comm", precision.grad_comm);
}

void take_step(Keywords& keywords, StepOptions& step) {
  keywords.take("max_norm", step.max_norm);
  keywords.take("measures_norm", step.measures_norm);
  keywords.take_choice("on_nonfinite", step.on_nonfinite, {"update", "skip"});
  keywords.with("loss_scale", [&](const py::handle& value) {
    if (py::isinstance<py::str>(value)) {
      parse_choice("loss_scale", value.cast<std::string>(), std::vector<std::string>{"dynamic"});
      step.loss_scale = LossScale::dynamic();
    } else {
      step.loss_scale = LossScale::fixed(keywords.number("loss_scale", value));
    }
  });
  keywords.take("loss_scale_interval", step.loss_scale.interval);
  keywords.take_choice("updates", step.updates, {"hidden", "blocking"});
  keywords.take_choice("without_gradient", step.without_gradient, {"skip", "update"});
  keywords.take_choice("rounding", step.rounding, {"nearest", "stochastic"});
  keywords.take("seed", step.seed);
  keywords.take("marks_changes", step.marks_changes);
}

// A pattern, or several.
void take_patterns(Keywords& keywords, const char* name, std::vector<std::string>& field) {
  keywords.with(name, [&](const py::handle& value) {
    if (py::isinstance<py::str>(value)) return field.push_back(value.cast<std::string>());
    if (!py::isinstance<py::sequence>(value))
      refuse_keyword(name, value, "it must be a pattern of names such as '*.experts.*', or a list");
    for (const py::handle& each : value) {
      if (!py::isinstance<py::str>(each))
        refuse_keyword(name, value, "its patterns must be strings such as '*.experts.*'");
      field.push_back(each.cast<std::string>());
    }
  });
}

void take_tensor_parameters(Keywords& keywords, std::vector<TensorParameters>& field) {
  constexpr const char* kName = "tensor_parameters";
  keywords.with(kName, [&](const py::handle& value) {
    if (!py::isinstance<py::dict>(value))
      refuse_keyword(kName, value,
                     "it must be a dict of patterns of names, such as {'*.up.weight': TpShard(0)}");
    for (const auto& [pattern, placement] : value.cast<py::dict>()) {
      try {
        field.push_back({pattern.cast<std::string>(), placement.cast<TpPlacement>()});
      } catch (const py::cast_error&) {
        throw UsageError(concat(kName, " has ", shown_value(placement), " for ",
                                py::repr(pattern).cast<std::string>(),
                                "; it takes patterns of names with TpShard(dim), TpPartial() or "
                                "TpEqual()"));
      }
    }
  });
}

// A pattern, several, or a dict of them with the rows of their matrices.
void take_matrices(Keywords& keywords, WholeMatrices& field) {
  constexpr const char* kName = "matrices";
  keywords.with(kName, [&](const py::handle& value) {
    const auto refuse = [&] {
      refuse_keyword(kName, value,
                     "it must be a pattern of names such as 'model.layers.*', a list of them, or a "
                     "dict of them with the rows of their matrices, such as {'*.qkv.weight': [64, "
                     "16, 16]}");
    };
    if (py::isinstance<py::str>(value)) {
      field.named.push_back({value.cast<std::string>()});
      return;
    }
    try {
      if (py::isinstance<py::dict>(value)) {
        for (const auto& [pattern, rows] : value.cast<py::dict>())
          field.named.push_back(
              {pattern.cast<std::string>(),
               rows.is_none() ? std::vector<int64_t>() : rows.cast<std::vector<int64_t>>()});
      } else {
        for (const std::string& pattern : value.cast<std::vector<std::string>>())
          field.named.push_back({pattern});
      }
    } catch (const py::cast_error&) {
      refuse();
    }
  });
  take_patterns(keywords, "matrices_except", field.except);
}

// What all optimizers have; Python knows a group of parameters as a rule: (pattern, weight decay,
// factor of the rate).
template <typename Options>
void take_common(Keywords& keywords, Options& options) {
  keywords.take("lr", options.lr);
  keywords.take("weight_decay", options.weight_decay);
  keywords.with("rules", [&](const py::handle& value) {
    for (const py::handle& each : value) {
      const auto [pattern, weight_decay, scale] =
          each.cast<std::tuple<std::string, double, double>>();
      options.rules.push_back({pattern, weight_decay, scale});
    }
  });
  take_step(keywords, options.step);
}

// Of AdamW, and of what Muon leaves to it.
template <typename Options>
void take_adamw(Keywords& given, Options& options) {
  given.take("beta1", options.beta1);
  given.take("beta2", options.beta2);
  given.take("eps", options.eps);
  given.take("first_moment", options.first_moment);
  given.take("second_moment", options.second_moment);
}

}  // namespace

ShardOptions shard_options(const py::dict& keywords) {
  Keywords given(keywords);
  ShardOptions options;
  given.with("strategy", [&](const py::handle& value) {
    options.strategy = parse_strategy(given.text("strategy", value));
  });
  take_patterns(given, "expert_parameters", options.expert_parameters);
  take_tensor_parameters(given, options.tensor_parameters);
  take_precision(given, options.precision);
  std::vector<std::string> pools;
  for (const PoolKind kind : all_pool_kinds()) pools.emplace_back(name_of(kind));
  given.take_choice("pool", options.pool, pools);
  given.take("prefetch", options.prefetch);
  given.take("pool_budget_bytes", options.pool_budget_bytes);
  given.take_choice("on_move", options.on_move, {"follow", "refuse"});
  given.take_choice("other_units", options.other_units, {"on_demand", "persistent"});
  given.take_choice("user_buffers", options.user_buffers, {"off", "registered", "symmetric"});
  given.take_choice("gradient", options.gradient, {"mean", "sum"});
  given.take_choice("gradient_lifetime", options.gradient_lifetime, {"persistent", "step"});
  given.take("offload", options.offload.fraction);
  given.take("offload_pin", options.offload.pin);
  given.take("offload_overlap", options.offload.overlap);
  given.take("offload_chunk_numel", options.offload.chunk_numel);
  given.take_choice("report_nan", options.report_nan, {"off", "per_parameter"});
  given.take_choice("collectives", options.collectives, {"between_ranks", "always"});
  given.with("granularity", [&](const py::handle& value) {
    options.granularity = parse_granularity(given.text("granularity", value));
  });
  take_matrices(given, options.matrices);
  given.take_choice("initial_values", options.initial_values, {"of_every_rank", "of_rank_zero"});
  given.take("device", options.device);
  given.refuse_unknown();
  return options;
}

AdamWOptions adamw_options(const py::dict& keywords) {
  Keywords given(keywords);
  AdamWOptions options;
  take_adamw(given, options);
  take_common(given, options);
  given.refuse_unknown();
  return options;
}

SGDOptions sgd_options(const py::dict& keywords) {
  Keywords given(keywords);
  SGDOptions options;
  given.take("momentum", options.momentum);
  given.take("nesterov", options.nesterov);
  given.take("momentum_dtype", options.momentum_dtype);
  take_common(given, options);
  given.refuse_unknown();
  return options;
}

MuonOptions muon_options(const py::dict& keywords) {
  Keywords given(keywords);
  MuonOptions options;
  given.take("adamw_rate_scale", options.adamw_rate_scale);
  given.take("momentum", options.momentum);
  given.take("nesterov", options.nesterov);
  given.take_choice("adjust_lr_fn", options.scale, {"original", "match_rms_adamw"});
  given.take("ns_steps", options.iterations);
  given.take("a", options.a);
  given.take("b", options.b);
  given.take("c", options.c);
  given.take("norm_eps", options.norm_eps);
  given.take("products_dtype", options.products_dtype);
  given.take_choice("products", options.products, {"single", "batched"});
  given.take("momentum_dtype", options.momentum_dtype);
  take_adamw(given, options);
  take_common(given, options);
  given.refuse_unknown();
  return options;
}

PrecisionPolicy precision_policy(const PrecisionPolicy& current, const py::dict& keywords) {
  Keywords given(keywords);
  PrecisionPolicy precision = current;
  take_precision(given, precision);
  given.refuse_unknown();
  return precision;
}

}  // namespace fsdp
