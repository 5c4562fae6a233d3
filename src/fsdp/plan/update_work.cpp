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

double us_of_bytes(const UpdateWork& work, int64_t bytes, int64_t numel, const RateTable& rates) {
  if (numel == 0) return 0.0;
  return static_cast<double>(bytes) / static_cast<double>(work.bytes) *
         rates.us(work.work, std::array{numel});
}

// Muon's passes beside its products: 0 into X, the momentum with the gradient, the norm, the
// quotient, and the weights.
double matrix_passes_us(int64_t numel, const GroupTypes& types, DType products,
                        const RateTable& rates) {
  const int64_t x = element_bytes(products);
  const int64_t momentum = types.first_moment ? 2 * element_bytes(*types.first_moment) : 0;
  const int64_t weight =
      types.main_weight ? (types.split ? 8 : 10) : 2 * element_bytes(types.weight);
  const UpdateWork work = update_work(types);
  constexpr int64_t kSummed = 4;  // bytes of an element whose squares are measured
  return 2 * rates.us("copy", std::array{numel}) +
         us_of_bytes(work, element_bytes(types.main_grad) + momentum + 2 * x, numel, rates) +
         rates.us("squared sum", std::array{numel * x / kSummed}) +
         us_of_bytes(work, x + weight, numel, rates);
}

}  // namespace

double update_us(const GroupTypes& types, int64_t numel, const RateTable& rates) {
  const UpdateWork work = update_work(types);
  return us_of_bytes(work, work.bytes + other_bytes(types), numel, rates);
}

double offloaded_update_us(const GroupTypes& types, int64_t numel, const RateTable& rates) {
  const UpdateWork work = offloaded_work(types);
  return us_of_bytes(work, work.bytes + other_bytes(types), numel, rates);
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

double matrix_us(const OwnedMatrix& matrix, const GroupTypes& types, DType products,
                 const RateTable& rates) {
  constexpr double kIterations = 5;
  const std::string product = concat("product ", name_of(products), " ");
  const int64_t m = std::min(matrix.rows, matrix.columns);
  const bool is_wide = matrix.rows <= matrix.columns;
  // X X^T or X^T X; its square; and that times X.
  const double iteration =
      (is_wide ? rates.us(product + "forward", std::array{m, m, matrix.columns})
               : rates.us(product + "weight gradient", std::array{matrix.rows, m, m})) +
      rates.us(product + "input gradient", std::array{m, m, m}) +
      (is_wide ? rates.us(product + "input gradient", std::array{m, m, matrix.columns})
               : rates.us(product + "input gradient", std::array{matrix.rows, m, m})) +
      2 * rates.us("copy", std::array{m});  // numbers on both diagonals
  return kIterations * iteration + matrix_passes_us(matrix.range.numel(), types, products, rates);
}

MatrixTimes matrix_times(std::span<const GroupPlan> groups, const PlanOptions& options,
                         size_t num_units, const RateTable& rates) {
  MatrixTimes times{.units = std::vector<double>(num_units, 0.0)};
  size_t most = 0;
  for (int64_t rank = 0; rank < options.ranks; ++rank) {
    size_t count = 0;
    double done = 0.0;
    for (const GroupPlan& group : groups) {
      if (!group.has_matrices()) continue;
      for (const OwnedMatrix& matrix :
           matrices_in(group.layout, group.layout.shard_ranges(options.strategy.optimizer,
                                                               place_of(rank, group, options)))) {
        done += matrix_us(matrix, group.types, *options.muon, rates);
        ++count;
      }
      double& last = times.units[static_cast<size_t>(group.unit)];
      last = std::max(last, done);
    }
    most = std::max(most, count);
  }
  size_t all = 0;
  for (const GroupPlan& group : groups)
    if (group.has_matrices())
      for (int64_t tensor = 0; tensor < group.layout.num_tensors(); ++tensor)
        all += group.layout.matrices_of(tensor).size();
  if (all > 0) times.most_of_a_rank = static_cast<double>(most) / static_cast<double>(all);
  double before = 0.0;
  for (double& unit : times.units) {
    const double done = std::max(unit, before);
    unit = done - before;
    before = done;
  }
  return times;
}

}  // namespace fsdp
