#include "support/reduction_cases.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "support/rank_pattern.h"

#include "fsdp/comm/communicator.h"

namespace fsdp::testing {

namespace {

at::Tensor combine(const at::Tensor& a, const at::Tensor& b, ReduceOp op) {
  if (op == ReduceOp::kMax) return at::maximum(a, b);
  return op == ReduceOp::kMin ? at::minimum(a, b) : a + b;
}

}  // namespace

at::Tensor combined_in_a_tree(std::vector<at::Tensor> values, ReduceOp op) {
  while (values.size() > 1) {
    std::vector<at::Tensor> above;
    for (size_t i = 0; i < values.size(); i += 2)
      above.push_back(i + 1 < values.size() ? combine(values[i], values[i + 1], op) : values[i]);
    values = above;
  }
  return values.front();
}

namespace {

const std::vector<at::ScalarType> kReducible = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf,
                                                at::kLong,  at::kInt,    at::kByte};

// The definition: combine groups in the accumulation type, then their results; scale once, round
// once.
at::Tensor reference(const Communicator& comm, const std::function<at::Tensor(int)>& input_of,
                     at::ScalarType acc, const Reduction& reduction, at::ScalarType result) {
  std::vector<at::Tensor> groups;
  for (int begin = 0; begin < comm.size(); begin += comm.sum_group()) {
    std::vector<at::Tensor> members;
    for (int rank = begin; rank < begin + comm.sum_group(); ++rank)
      members.push_back(input_of(rank).to(acc));
    groups.push_back(combined_in_a_tree(std::move(members), reduction.op));
  }
  at::Tensor combined = combined_in_a_tree(std::move(groups), reduction.op);
  double scale = reduction.scale;
  if (reduction.op == ReduceOp::kAvg) scale /= comm.size();
  if (scale != 1.0) combined = combined * at::full({1}, scale, combined.options());
  return rounded_once(combined, result);
}

at::ScalarType accumulation_of(at::ScalarType wire, at::ScalarType result) {
  if (!at::isFloatingType(wire)) return at::kLong;
  return wire == at::kDouble || result == at::kDouble ? at::kDouble : at::kFloat;
}

struct ReduceCase {
  at::ScalarType wire;
  at::ScalarType result;
  Reduction reduction;
  std::span<const int64_t> counts;
  bool in_place = false;
};

void check_reduce_scatter(Communicator& comm, at::Device device, const ReduceCase& claim) {
  const int64_t total = sum(claim.counts);
  int64_t offset = 0;
  for (int rank = 0; rank < comm.rank(); ++rank) offset += claim.counts[static_cast<size_t>(rank)];
  const int64_t mine = claim.counts[static_cast<size_t>(comm.rank())];
  const auto share_of = [&](int rank) {
    return rank_pattern(rank, total, claim.wire).narrow(0, offset, mine);
  };
  at::Tensor input = rank_pattern(comm.rank(), total, claim.wire).to(device);
  at::Tensor output = claim.in_place ? input.narrow(0, offset, mine)
                                     : at::zeros({mine}, at::device(device).dtype(claim.result));
  comm.reduce_scatter(output, input, claim.reduction, "reduce", claim.counts).wait();
  const at::ScalarType acc =
      claim.reduction.accumulate.value_or(accumulation_of(claim.wire, claim.result));
  EXPECT_TRUE(same_bytes(output, reference(comm, share_of, acc, claim.reduction, claim.result)))
      << claim.wire << " into " << claim.result << " by " << name_of(claim.reduction.op)
      << " scaled by " << claim.reduction.scale << " of " << total
      << (claim.in_place ? " in place" : "");
}

void reduces_every_dtype_in_one_order(World& world, at::Device device) {
  Communicator& comm = world.communicator();
  for (const at::ScalarType dtype : kReducible) {
    for (const int64_t numel : kSizes) {
      const std::vector<int64_t> counts(static_cast<size_t>(comm.size()), numel);
      check_reduce_scatter(comm, device, {dtype, dtype, {}, counts});
      check_reduce_scatter(comm, device, {dtype, dtype, {.op = ReduceOp::kMax}, counts, true});
      check_reduce_scatter(comm, device, {dtype, dtype, {.op = ReduceOp::kMin}, counts});
      if (!at::isFloatingType(dtype)) continue;
      check_reduce_scatter(comm, device, {dtype, dtype, {.op = ReduceOp::kAvg}, counts, true});
      check_reduce_scatter(comm, device, {dtype, dtype, {.scale = 0.3}, counts});
    }
    const std::vector<int64_t> uneven = uneven_counts(comm.size(), 300);
    check_reduce_scatter(comm, device, {dtype, dtype, {}, uneven});
    check_reduce_scatter(comm, device, {dtype, dtype, {}, uneven, true});
  }
}

// One share is odd, and longer than a backend moves at a time (MPI: 1 MiB per rank).
void reduces_large_uneven_shares(World& world, at::Device device) {
  Communicator& comm = world.communicator();
  std::vector<int64_t> counts = uneven_counts(comm.size(), 1000);
  counts.back() = 600001;
  check_reduce_scatter(comm, device, {at::kBFloat16, at::kFloat, {.op = ReduceOp::kAvg}, counts});
  check_reduce_scatter(comm, device, {at::kFloat, at::kFloat, {}, counts, true});
}

void reduces_any_wire_into_any_output(World& world, at::Device device) {
  Communicator& comm = world.communicator();
  const std::vector<int64_t> counts = uneven_counts(comm.size(), 700);
  const std::vector<at::ScalarType> floating = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};
  for (const at::ScalarType wire : floating)
    for (const at::ScalarType result : floating)
      check_reduce_scatter(comm, device, {wire, result, {.op = ReduceOp::kAvg}, counts});
  const Reduction wide = {.scale = 0.7, .accumulate = at::kDouble};
  check_reduce_scatter(comm, device, {at::kBFloat16, at::kDouble, wide, counts});
  check_reduce_scatter(comm, device, {at::kHalf, at::kHalf, wide, counts});
}

// Rank 0's share is longer than MPI moves at a time, the others' are small.
std::vector<int64_t> one_long_share(int ranks) {
  std::vector<int64_t> counts(static_cast<size_t>(ranks), 101);
  counts[0] = 600001;
  return counts;
}

// The output is not empty; the reduced share is added to it before the only rounding.
void adds_to_what_is_there(World& world, at::Device device) {
  Communicator& comm = world.communicator();
  const std::vector<int64_t> counts = one_long_share(comm.size());
  const int64_t total = sum(counts);
  const int64_t numel = counts[static_cast<size_t>(comm.rank())];
  const int64_t offset = comm.rank() == 0 ? 0 : counts[0] + 101 * (comm.rank() - 1);
  using Types = std::pair<at::ScalarType, at::ScalarType>;
  for (const auto& [wire, result] :
       {Types(at::kBFloat16, at::kFloat), Types(at::kFloat, at::kBFloat16)}) {
    const Reduction reduction = {.scale = 0.3, .store = Store::kAdd};
    const auto share_of = [&, wire = wire](int rank) {
      return rank_pattern(rank, total, wire).narrow(0, offset, numel);
    };
    const at::Tensor old = rank_pattern(comm.rank(), numel, result, 5);
    at::Tensor output = old.to(device, /*non_blocking=*/false, /*copy=*/true);
    const at::Tensor input = rank_pattern(comm.rank(), total, wire).to(device);
    comm.reduce_scatter(output, input, reduction, "add", counts).wait();
    const at::Tensor added = reference(comm, share_of, at::kFloat, reduction, at::kFloat);
    EXPECT_TRUE(same_bytes(output, rounded_once(old.to(at::kFloat) + added, result)))
        << wire << " " << result;
  }
}

void raises_the_flag_where_a_nonfinite_value_is_stored(World& world, at::Device device) {
  Communicator& comm = world.communicator();
  const std::vector<int64_t> counts = one_long_share(comm.size());
  const auto floats = at::device(device).dtype(at::kFloat);
  for (const double bad : {0.0, std::numeric_limits<double>::infinity()}) {
    for (const Store store : {Store::kWrite, Store::kAdd}) {
      // The last rank's input is bad in the share of rank 0, near its beginning.
      at::Tensor input = at::ones({sum(counts)}, floats.dtype(at::kBFloat16));
      if (comm.rank() == comm.size() - 1) input[3].fill_(bad);
      at::Tensor output = at::zeros({counts[static_cast<size_t>(comm.rank())]}, floats);
      const at::Tensor flag = at::zeros({1}, floats);
      comm.reduce_scatter(output, input, {.store = store, .nonfinite = flag}, "watched", counts)
          .wait();
      EXPECT_EQ(flag.item<float>(), bad != 0 && comm.rank() == 0 ? 1.0f : 0.0f);
    }
  }
  at::Tensor tensor = at::full({1000}, std::numeric_limits<double>::quiet_NaN(), floats);
  const at::Tensor flag = at::zeros({1}, floats);
  comm.all_reduce(tensor, {.nonfinite = flag}, "watched").wait();
  comm.all_reduce(flag, {.op = ReduceOp::kMax}, "anybody").wait();
  EXPECT_EQ(flag.item<float>(), 1.0f);
}

void all_reduces_bitwise_equal_everywhere(World& world, at::Device device) {
  Communicator& comm = world.communicator();
  for (const at::ScalarType dtype : kReducible) {
    for (const int64_t numel : kSizes) {
      at::Tensor tensor = rank_pattern(comm.rank(), numel, dtype).to(device);
      comm.all_reduce(tensor, {}, "all").wait();
      const auto whole = [&](int rank) { return rank_pattern(rank, numel, dtype); };
      const at::Tensor expected = reference(comm, whole, accumulation_of(dtype, dtype), {}, dtype);
      EXPECT_TRUE(same_bytes(tensor, expected)) << dtype << " " << numel;
    }
  }
}

void lets_nan_win_max_and_min(World& world, at::Device device) {
  Communicator& comm = world.communicator();
  for (const ReduceOp op : {ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kSum}) {
    for (int bad = 0; bad < comm.size(); ++bad) {
      at::Tensor tensor =
          at::full({100}, static_cast<double>(comm.rank()), at::device(device).dtype(at::kFloat));
      if (comm.rank() == bad) tensor[41].fill_(std::numeric_limits<double>::quiet_NaN());
      comm.all_reduce(tensor, {.op = op}, "nan").wait();
      EXPECT_EQ(tensor.isnan().sum().item<int64_t>(), 1) << name_of(op);
      EXPECT_TRUE(tensor[41].isnan().item<bool>()) << name_of(op);
    }
  }
}

}  // namespace

std::vector<CommunicatorCase> reduction_cases() {
  return {
      {"ReducesEveryDtypeInOneOrder", reduces_every_dtype_in_one_order},
      {"ReducesLargeUnevenShares", reduces_large_uneven_shares},
      {"ReducesAnyWireIntoAnyOutput", reduces_any_wire_into_any_output},
      {"AddsToWhatIsThere", adds_to_what_is_there},
      {"RaisesTheFlagWhereANonfiniteValueIsStored",
       raises_the_flag_where_a_nonfinite_value_is_stored},
      {"AllReducesBitwiseEqualEverywhere", all_reduces_bitwise_equal_everywhere},
      {"LetsNanWinMaxAndMin", lets_nan_win_max_and_min},
  };
}

}  // namespace fsdp::testing
