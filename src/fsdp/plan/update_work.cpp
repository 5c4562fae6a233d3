#include "fsdp/plan/update_work.h"

#include <algorithm>
#include <array>

#include "fsdp/base/text.h"

namespace fsdp {

namespace {

// An update that moves other bytes than the measured one is as fast per byte.
struct UpdateWork {
  const char* work;
  int64_t bytes;  // read and written per element, with an fp32 gradient and fp32 moments
};

UpdateWork update_work(const GroupTypes& types) {
  if (types.split) return {"update split", 28};
  // Quantised weights are made of the main ones afterwards.
  const bool has_two = types.main_weight && !types.is_quantized();
  return has_two ? UpdateWork{"update separate", 30} : UpdateWork{"update fp32", 28};
}

UpdateWork offloaded_work(const GroupTypes& types) {
  return {"offloaded update", types.main_weight ? 30 : 28};
}

// Bytes of the types that the measured update does not have.
int64_t other_bytes(const GroupTypes& types) {
  constexpr int64_t kMeasured = 4;
  const auto moment = [](const std::optional<DType>& type) {
    return 2 * ((type ? element_bytes(*type) : 0) - kMeasured);
  };
  int64_t bytes = element_bytes(types.main_grad) - kMeasured + moment(types.first_moment) +
                  moment(types.second_moment);
  if (!types.main_weight) bytes += 2 * (element_bytes(types.weight) - kMeasured);
  return bytes;
}

double us_of_bytes(const UpdateWork& work, const GroupTypes& types, int64_t numel,
                   const RateTable& rates) {
  if (numel == 0) return 0.0;
  const double share =
      static_cast<double>(work.bytes + other_bytes(types)) / static_cast<double>(work.bytes);
  return share * rates.us(work.work, std::array{numel});
}

}  // namespace

double update_us(const GroupTypes& types, int64_t numel, const RateTable& rates) {
  return us_of_bytes(update_work(types), types, numel, rates);
}

double offloaded_update_us(const GroupTypes& types, int64_t numel, const RateTable& rates) {
  return us_of_bytes(offloaded_work(types), types, numel, rates);
}

double codes_us(const GroupPlan& group, int64_t numel, const RateTable& rates) {
  if (!group.types.is_quantized() || numel == 0) return 0.0;
  const std::string work = concat("codes of weights ", row_of(group.types.recipe).name);
  const double share =
      static_cast<double>(numel) / static_cast<double>(group.layout.padded_numel());
  double us = 0.0;
  for (const std::vector<int64_t>& shape : group.layout.request().shapes) {
    const int64_t matrix = shape[0] * shape[1];
    // A rank has a part of a matrix, or about its share of all of them.
    const int64_t part = std::min(matrix, numel);
    us += share * static_cast<double>(matrix) / static_cast<double>(part) *
          rates.us(work, std::array{part});
  }
  return us;
}

}  // namespace fsdp
