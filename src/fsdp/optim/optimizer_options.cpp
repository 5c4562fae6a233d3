#include "fsdp/optim/optimizer_options.h"

#include <cmath>

#include "fsdp/base/error.h"

namespace fsdp {

void StepOptions::validate() const {
  const auto check = [](bool is_good, const char* field, double value, const char* fix) {
    if (!is_good) throw UsageError(concat("step.", field, " is ", value, "; ", fix));
  };
  check(max_norm >= 0.0 && std::isfinite(max_norm), "max_norm", max_norm,
        "use a positive number, or 0 for no clipping");
  check(loss_scale.initial > 0.0 && std::isfinite(loss_scale.initial), "loss_scale.initial",
        loss_scale.initial, "use a positive number, or 1 for no scaling");
  check(loss_scale.backoff > 0.0 && loss_scale.backoff <= 1.0, "loss_scale.backoff",
        loss_scale.backoff, "use a number above 0 and up to 1");
  check(loss_scale.growth >= 1.0 && std::isfinite(loss_scale.growth), "loss_scale.growth",
        loss_scale.growth, "use a number of 1 or more");
  check(loss_scale.interval >= 1, "loss_scale.interval", static_cast<double>(loss_scale.interval),
        "use 1 or more steps");
}

}  // namespace fsdp
