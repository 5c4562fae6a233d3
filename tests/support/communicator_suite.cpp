#include "support/communicator_suite.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "fsdp/base/error.h"
#include "support/rank_pattern.h"

namespace fsdp::testing {

namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

const std::vector<int64_t> kSizes = {0, 1, 7, 64, 1000, 5000};
const std::vector<at::ScalarType> kReducible = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf,
                                                at::kLong,  at::kInt,    at::kByte};
const std::vector<at::ScalarType> kMovable = {at::kFloat, at::kBFloat16,      at::kHalf,
                                              at::kByte,  at::kFloat8_e4m3fn, at::kFloat8_e5m2,
                                              at::kBool};

std::vector<int64_t> uneven_counts(int ranks, int64_t base) {
  std::vector<int64_t> counts;
  for (int rank = 0; rank < ranks; ++rank) counts.push_back(rank % 3 == 1 ? 0 : base + 13 * rank);
  return counts;
}

int64_t sum(std::span<const int64_t> values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

at::Tensor movable_pattern(int rank, int64_t numel, at::ScalarType dtype) {
  if (dtype == at::kBool) return rank_pattern(rank, numel, at::kFloat) > 0;
  return rank_pattern(rank, numel, at::kFloat).to(dtype);
}

// The definition: combine in rank order in the accumulation type, scale once, round once.
at::Tensor reference(int ranks, const std::function<at::Tensor(int)>& input_of, at::ScalarType acc,
                     const Reduction& reduction, at::ScalarType result) {
  at::Tensor combined = input_of(0).to(acc);
  for (int rank = 1; rank < ranks; ++rank) {
    const at::Tensor next = input_of(rank).to(acc);
    if (reduction.op == ReduceOp::kMax) {
      combined = at::maximum(combined, next);
    } else if (reduction.op == ReduceOp::kMin) {
      combined = at::minimum(combined, next);
    } else {
      combined = combined + next;
    }
  }
  double scale = reduction.scale;
  if (reduction.op == ReduceOp::kAvg) scale /= ranks;
  if (scale != 1.0) combined = combined * at::full({1}, scale, combined.options());
  return rounded_once(combined, result);
}

at::ScalarType accumulation_of(at::ScalarType wire, at::ScalarType result) {
  if (!at::isFloatingType(wire)) return at::kLong;
  return wire == at::kDouble || result == at::kDouble ? at::kDouble : at::kFloat;
}

// --- moving data -------------------------------------------------------------------------------

void gathers_every_dtype(World& world, at::Device device) {
  Communicator& comm = world.communicator();
  for (const at::ScalarType dtype : kMovable) {
    for (const int64_t numel : kSizes) {
      at::Tensor output = at::zeros({comm.size() * numel}, at::device(device).dtype(dtype));
      comm.all_gather(output, movable_pattern(comm.rank(), numel, dtype).to(device), "gather")
          .wait();
      std::vector<at::Tensor> parts;
      for (int rank = 0; rank < comm.size(); ++rank)
        parts.push_back(movable_pattern(rank, numel, dtype).view(at::kByte));
      EXPECT_TRUE(same_bytes(output.view(at::kByte), at::cat(parts))) << dtype << " " << numel;
    }
  }
}

void gathers_uneven_and_empty_shares(World& world, at::Device device) {
  Communicator& comm = world.communicator();
  const std::vector<int64_t> counts = uneven_counts(comm.size(), 100);
  at::Tensor output = at::zeros({sum(counts)}, at::device(device).dtype(at::kFloat));
  const int64_t mine = counts[static_cast<size_t>(comm.rank())];
  comm.all_gather(output, rank_pattern(comm.rank(), mine, at::kFloat).to(device), "uneven", counts)
      .wait();
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < comm.size(); ++rank)
    parts.push_back(rank_pattern(rank, counts[static_cast<size_t>(rank)], at::kFloat));
  EXPECT_TRUE(same_bytes(output, at::cat(parts)));
}

void gathers_in_place(World& world, at::Device device) {
  Communicator& comm = world.communicator();
  const int64_t numel = 1001;
  at::Tensor output = at::zeros({comm.size() * numel}, at::device(device).dtype(at::kBFloat16));
  at::Tensor own = output.narrow(0, comm.rank() * numel, numel);
  own.copy_(rank_pattern(comm.rank(), numel, at::kBFloat16));
  comm.all_gather(output, own, "in place").wait();
  for (int rank = 0; rank < comm.size(); ++rank)
    EXPECT_TRUE(same_bytes(output.narrow(0, rank * numel, numel),
                           rank_pattern(rank, numel, at::kBFloat16)));
}

// What `from` writes to `to` says so.
at::Tensor letter(int from, int to, int64_t numel) {
  return at::full({numel}, 100.0f * static_cast<float>(from) + static_cast<float>(to), at::kFloat);
}

void check_letters(Communicator& comm, at::Device device,
                   const std::function<int64_t(int from, int to)>& numel_of, bool equal) {
  const int me = comm.rank();
  std::vector<at::Tensor> out;
  std::vector<at::Tensor> expected;
  std::vector<int64_t> send_counts;
  std::vector<int64_t> receive_counts;
  for (int other = 0; other < comm.size(); ++other) {
    send_counts.push_back(numel_of(me, other));
    receive_counts.push_back(numel_of(other, me));
    out.push_back(letter(me, other, send_counts.back()));
    expected.push_back(letter(other, me, receive_counts.back()));
  }
  at::Tensor received = at::zeros({sum(receive_counts)}, at::device(device).dtype(at::kFloat));
  const at::Tensor sent = at::cat(out).to(device);
  if (equal) {
    comm.all_to_all(received, sent, "equal letters").wait();
  } else {
    comm.all_to_all(received, sent, "letters", receive_counts, send_counts).wait();
  }
  EXPECT_TRUE(same_bytes(received, at::cat(expected)));
}

void delivers_every_letter(World& world, at::Device device) {
  Communicator& comm = world.communicator();
  check_letters(
      comm, device, [](int, int) { return 33; }, /*equal=*/true);
  check_letters(
      comm, device, [](int from, int to) { return (from * 5 + to * 3) % 7 * 11; }, /*equal=*/false);
}

void broadcasts_from_every_root(World& world, at::Device device) {
  Communicator& comm = world.communicator();
  for (int root = 0; root < comm.size(); ++root) {
    for (const int64_t numel : kSizes) {
      at::Tensor tensor = rank_pattern(comm.rank(), numel, at::kFloat).to(device);
      comm.broadcast(tensor, root, "from root").wait();
      EXPECT_TRUE(same_bytes(tensor, rank_pattern(root, numel, at::kFloat)))
          << root << " " << numel;
    }
  }
}

// --- reducing ----------------------------------------------------------------------------------

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
  EXPECT_TRUE(
      same_bytes(output, reference(comm.size(), share_of, acc, claim.reduction, claim.result)))
      << claim.wire << " into " << claim.result << " by " << name_of(claim.reduction.op)
      << " scaled by " << claim.reduction.scale << " of " << total
      << (claim.in_place ? " in place" : "");
}

void reduces_every_dtype_in_rank_order(World& world, at::Device device) {
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

// One share is longer than what a backend may move at a time (MPI: 1 MiB per rank), and odd.
void reduces_large_uneven_shares(World& world, at::Device device) {
  Communicator& comm = world.communicator();
  std::vector<int64_t> counts = uneven_counts(comm.size(), 1000);
  counts.back() = 600001;
  check_reduce_scatter(comm, device, {at::kBFloat16, at::kFloat, {.op = ReduceOp::kAvg}, counts});
  check_reduce_scatter(comm, device, {at::kFloat, at::kFloat, {}, counts, true});
}

void reduces_into_the_accumulation_type(World& world, at::Device device) {
  Communicator& comm = world.communicator();
  const std::vector<int64_t> counts(static_cast<size_t>(comm.size()), 5000);
  for (const at::ScalarType wire : {at::kBFloat16, at::kHalf, at::kFloat}) {
    check_reduce_scatter(comm, device, {wire, at::kFloat, {.scale = 0.7}, counts});
    const Reduction wide = {.scale = 0.7, .accumulate = at::kDouble};
    check_reduce_scatter(comm, device, {wire, at::kDouble, wide, counts});
    check_reduce_scatter(comm, device, {wire, wire, wide, counts});
  }
}

void reduces_any_wire_into_any_output(World& world, at::Device device) {
  Communicator& comm = world.communicator();
  const std::vector<int64_t> counts = uneven_counts(comm.size(), 700);
  const std::vector<at::ScalarType> floating = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};
  for (const at::ScalarType wire : floating)
    for (const at::ScalarType result : floating)
      check_reduce_scatter(comm, device, {wire, result, {.op = ReduceOp::kAvg}, counts});
}

// The output holds something; the reduced share is added to it before the one rounding. Larger than
// what MPI moves at a time, so that pieces are added where they belong.
void adds_to_what_is_there(World& world, at::Device device) {
  Communicator& comm = world.communicator();
  const int64_t numel = 300001;
  const int64_t total = comm.size() * numel;
  for (const at::ScalarType wire : {at::kFloat, at::kBFloat16}) {
    for (const at::ScalarType result : {at::kFloat, at::kBFloat16, at::kDouble}) {
      const at::ScalarType acc = accumulation_of(wire, result);
      const Reduction reduction = {.scale = 0.3, .store = Store::kAdd};
      const auto share_of = [&](int rank) {
        return rank_pattern(rank, total, wire).narrow(0, comm.rank() * numel, numel);
      };
      const at::Tensor old = rank_pattern(comm.rank(), numel, result, 5);
      at::Tensor output = old.to(device, /*non_blocking=*/false, /*copy=*/true);
      const at::Tensor input = rank_pattern(comm.rank(), total, wire).to(device);
      comm.reduce_scatter(output, input, reduction, "add").wait();
      const at::Tensor sum = reference(comm.size(), share_of, acc, reduction, acc);
      EXPECT_TRUE(same_bytes(output, rounded_once(old.to(acc) + sum, result)))
          << wire << " " << result;
    }
  }
}

void raises_the_flag_where_a_nonfinite_value_is_stored(World& world, at::Device device) {
  Communicator& comm = world.communicator();
  const int64_t numel = 600011;  // MPI: in several pieces
  const auto floats = at::device(device).dtype(at::kFloat);
  for (const double bad : {0.0, std::numeric_limits<double>::infinity()}) {
    for (const Store store : {Store::kWrite, Store::kAdd}) {
      // The last rank's input is bad in the share of rank 0, near its beginning.
      at::Tensor input = at::ones({comm.size() * numel}, floats.dtype(at::kBFloat16));
      if (comm.rank() == comm.size() - 1) input[3].fill_(bad);
      at::Tensor output = at::zeros({numel}, floats);
      const at::Tensor flag = at::zeros({1}, floats);
      comm.reduce_scatter(output, input, {.store = store, .nonfinite = flag}, "watched").wait();
      EXPECT_EQ(flag.item<float>(), bad != 0 && comm.rank() == 0 ? 1.0f : 0.0f);
    }
  }
  at::Tensor tensor = at::full({1000}, std::numeric_limits<double>::quiet_NaN(), floats);
  const at::Tensor flag = at::zeros({1}, floats);
  comm.all_reduce(tensor, {.nonfinite = flag}, "watched").wait();
  comm.all_reduce(flag, {.op = ReduceOp::kMax}, "anybody").wait();
  EXPECT_EQ(flag.item<float>(), 1.0f);
}

// bf16 has 8 significant bits: rounding once changes a value by at most 2^-8 of itself. Summing in
// bf16 instead would lose that much at every rank. The fp32 sum's own error (2^-24 per addition) is
// the allowance.
void rounds_narrow_sums_at_most_once(World& world, at::Device device) {
  Communicator& comm = world.communicator();
  const int64_t numel = 20000;
  const int64_t total = comm.size() * numel;
  const auto share_of = [&](int rank) {
    // All positive, so that the relative error is meaningful at every element.
    return rank_pattern(rank, total, at::kBFloat16).abs().narrow(0, comm.rank() * numel, numel);
  };
  const at::Tensor exact = reference(comm.size(), share_of, at::kDouble, {}, at::kDouble);
  const at::Tensor input = rank_pattern(comm.rank(), total, at::kBFloat16).abs().to(device);
  const auto worst_error = [&](at::ScalarType result) {
    at::Tensor output = at::zeros({numel}, at::device(device).dtype(result));
    comm.reduce_scatter(output, input, {}, "narrow").wait();
    const at::Tensor error = (output.cpu().to(at::kDouble) - exact).abs();
    return (error / exact.clamp_min(1e-30)).max().item<double>();
  };
  const double wide_sum = comm.size() * std::ldexp(1.0, -24);
  EXPECT_LE(worst_error(at::kBFloat16), std::ldexp(1.0, -8) + wide_sum);
  EXPECT_LE(worst_error(at::kFloat), wide_sum);
}

void all_reduces_bitwise_equal_everywhere(World& world, at::Device device) {
  Communicator& comm = world.communicator();
  for (const at::ScalarType dtype : kReducible) {
    for (const int64_t numel : kSizes) {
      at::Tensor tensor = rank_pattern(comm.rank(), numel, dtype).to(device);
      comm.all_reduce(tensor, {}, "all").wait();
      const auto whole = [&](int rank) { return rank_pattern(rank, numel, dtype); };
      const at::Tensor expected =
          reference(comm.size(), whole, accumulation_of(dtype, dtype), {}, dtype);
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

// --- order and overlap -------------------------------------------------------------------------

void keeps_order_with_many_in_flight(World& world, at::Device device) {
  Communicator& comm = world.communicator();
  constexpr int kCalls = 100;
  std::vector<at::Tensor> tensors;
  std::vector<Work> works;
  for (int call = 0; call < kCalls; ++call) {
    tensors.push_back(at::full({257}, static_cast<double>(comm.rank() + call),
                               at::device(device).dtype(at::kFloat)));
    works.push_back(comm.all_reduce(tensors.back(), {}, "call " + std::to_string(call)));
  }
  const int ranks = comm.size();
  for (int call = kCalls - 1; call >= 0; --call) {
    works[static_cast<size_t>(call)].wait();
    const int expected = ranks * (ranks - 1) / 2 + ranks * call;
    EXPECT_TRUE((tensors[static_cast<size_t>(call)] == expected).all().item<bool>());
  }
}

// If enqueuing waited for the others, even ranks would wait in `first` for odd ranks that wait in
// `second`.
void enqueues_without_waiting(World& world, at::Device device) {
  Communicator& comm = world.communicator();
  const std::vector<int> together(static_cast<size_t>(comm.size()), 0);
  const auto first = comm.split(together, "first");
  const auto second = comm.split(together, "second");
  const auto ones = [&] { return at::ones({1000}, at::device(device).dtype(at::kFloat)); };
  at::Tensor a = ones();
  at::Tensor b = ones();
  const bool even = comm.rank() % 2 == 0;
  const Work one = even ? first->all_reduce(a, {}, "a") : second->all_reduce(b, {}, "b");
  const Work other = even ? second->all_reduce(b, {}, "b") : first->all_reduce(a, {}, "a");
  other.wait();
  one.wait();
  EXPECT_TRUE((a == comm.size()).all().item<bool>());
  EXPECT_TRUE((b == comm.size()).all().item<bool>());
}

// Each call sums over a column, gathers the sums along the row, and averages what was gathered over
// the column again. Nobody waits before the end, so an operation that did not wait for the one it
// comes after would read what is not there yet.
void follows_work_of_other_communicators(World& world, at::Device device) {
  const Mesh mesh = world.mesh({.outer = world.size() % 2 == 0 ? 2 : 1});
  const int inner = mesh.inner().size();
  const int outer = mesh.outer().size();
  constexpr int kCalls = 60;
  const auto longs = at::device(device).dtype(at::kLong);
  std::vector<at::Tensor> gathered;
  Work last;
  for (int call = 0; call < kCalls; ++call) {
    const int64_t numel = call % 3 == 0 ? 50000 : 7;  // slow ones, and ones that could overtake
    at::Tensor column = at::full({numel}, world.rank() + call, longs);
    gathered.push_back(at::zeros({numel * inner}, longs));
    const Work summed = mesh.outer().reduce().all_reduce(column, {}, "sum");
    const Work collected =
        mesh.inner().gather().all_gather(gathered.back(), column, "collect", {}, summed);
    last = mesh.outer().reduce().all_reduce(gathered.back(), {}, "again", collected);
  }
  last.wait();  // the last of its communicator, which runs in order
  for (int call = 0; call < kCalls; ++call) {
    std::vector<at::Tensor> expected;
    for (int rank = 0; rank < inner; ++rank) {
      int64_t sum = 0;
      for (int row = 0; row < outer; ++row) sum += row * inner + rank + call;
      expected.push_back(at::full({call % 3 == 0 ? 50000 : 7}, sum * outer, at::kLong));
    }
    EXPECT_TRUE(same_bytes(gathered[static_cast<size_t>(call)], at::cat(expected))) << call;
  }
}

// Reductions too; and the first communicator may be closed before anybody waits for the second.
void follows_work_of_a_communicator_that_was_closed(World& world, at::Device device) {
  Communicator& comm = world.communicator();
  const std::vector<int> together(static_cast<size_t>(comm.size()), 0);
  const auto floats = at::device(device).dtype(at::kFloat);
  for (int round = 0; round < 20; ++round) {
    auto first = comm.split(together, "first");
    at::Tensor whole = at::zeros({comm.size() * 1000}, floats);
    const at::Tensor own = at::full({1000}, static_cast<double>(comm.rank() + round), floats);
    const Work gathered = first->all_gather(whole, own, "gather");
    at::Tensor share = at::zeros({1000}, floats);
    const Work reduced = comm.reduce_scatter(share, whole, {}, "scatter", {}, gathered);
    first.reset();
    reduced.wait();
    EXPECT_TRUE((share == comm.size() * (comm.rank() + round)).all().item<bool>());
  }
}

void splits_into_groups_and_groups_of_groups(World& world, at::Device device) {
  Communicator& comm = world.communicator();
  std::vector<int> parity;
  for (int rank = 0; rank < comm.size(); ++rank) parity.push_back(rank % 2);
  const auto group = comm.split(parity, "parity");
  EXPECT_EQ(group->rank(), comm.rank() / 2);
  at::Tensor tensor =
      at::full({3}, static_cast<double>(comm.rank()), at::device(device).dtype(at::kFloat));
  group->all_reduce(tensor, {}, "parity").wait();
  int expected = 0;
  for (int rank = comm.rank() % 2; rank < comm.size(); rank += 2) expected += rank;
  EXPECT_TRUE((tensor == expected).all().item<bool>());

  std::vector<int> alone(static_cast<size_t>(group->size()));
  std::iota(alone.begin(), alone.end(), 0);
  const auto self = group->split(alone, "alone");
  EXPECT_EQ(self->size(), 1);
  self->all_reduce(tensor, {.op = ReduceOp::kAvg}, "alone").wait();
  EXPECT_TRUE((tensor == expected).all().item<bool>());
}

void arranges_ranks_in_a_mesh(World& world, at::Device device) {
  if (world.size() % 2 != 0) {
    EXPECT_THAT([&] { world.mesh({.outer = 2}); },
                ThrowsMessage<Error>(HasSubstr("outer is 2 in a world of")));
    return;
  }
  const Mesh mesh = world.mesh({.outer = 2});
  EXPECT_EQ(mesh.outer().size(), 2);
  EXPECT_EQ(mesh.inner().size(), world.size() / 2);
  EXPECT_EQ(mesh.outer().rank() * mesh.inner().size() + mesh.inner().rank(), world.rank());
  const auto longs = at::device(device).dtype(at::kLong);
  const at::Tensor id = at::full({1}, world.rank(), longs);
  at::Tensor row = at::zeros({mesh.inner().size()}, longs);
  at::Tensor column = at::zeros({2}, longs);
  const Work gathered = mesh.inner().gather().all_gather(row, id, "row");
  mesh.outer().reduce().all_gather(column, id, "column").wait();
  gathered.wait();
  for (int inner = 0; inner < mesh.inner().size(); ++inner)
    EXPECT_EQ(row[inner].item<int64_t>(), mesh.outer().rank() * mesh.inner().size() + inner);
  for (int outer = 0; outer < 2; ++outer)
    EXPECT_EQ(column[outer].item<int64_t>(), outer * mesh.inner().size() + mesh.inner().rank());
}

// --- bad use -----------------------------------------------------------------------------------

void refuses_bad_stores(Communicator& comm, const auto& tensor, const auto& expect) {
  const int n = comm.size();
  const Reduction add = {.store = Store::kAdd};
  expect([&] { comm.all_reduce(tensor(4, at::kFloat), add, "x"); }, "only reduce_scatter can add");
  expect([&] { comm.reduce_scatter(tensor(4, at::kInt), tensor(4 * n, at::kInt), add, "x"); },
         "store of 'x' is add for Int");
  const Reduction add_max = {.op = ReduceOp::kMax, .store = Store::kAdd};
  expect(
      [&] { comm.reduce_scatter(tensor(4, at::kFloat), tensor(4 * n, at::kFloat), add_max, "x"); },
      "store of 'x' is add for max");
  const at::Tensor whole = tensor(4 * n, at::kFloat);
  expect([&] { comm.reduce_scatter(whole.narrow(0, 4 * comm.rank(), 4), whole, add, "x"); },
         "count this rank's values twice");
  expect([&] { comm.all_reduce(whole, {.nonfinite = tensor(2, at::kFloat)}, "x"); },
         "nonfinite of 'x' has 2 elements");
}

void refuses_bad_arguments_before_anything_moves(World& world, at::Device device) {
  Communicator& comm = world.communicator();
  const auto tensor = [&](int64_t numel, at::ScalarType dtype = at::kFloat) {
    return at::zeros({numel}, at::device(device).dtype(dtype));
  };
  const int n = comm.size();
  const auto expect = [](auto call, const char* words) {
    EXPECT_THAT(call, ThrowsMessage<Error>(HasSubstr(words)));
  };
  expect([&] { comm.all_gather(tensor(4 * n), tensor(5), "x"); }, "input of 'x' has 5 elements");
  expect([&] { comm.all_gather(tensor(4 * n), tensor(4, at::kHalf), "x"); }, "only moves data");
  expect([&] { comm.all_gather(at::Tensor(), tensor(4), "x"); }, "undefined");
  expect([&] { comm.reduce_scatter(tensor(4), tensor(5 * n), {}, "x"); },
         "output of 'x' has 4 elements");
  expect([&] { comm.reduce_scatter(tensor(4, at::kInt), tensor(4 * n), {}, "x"); },
         "it must be fp64, fp32, fp16 or bf16");
  refuses_bad_stores(comm, tensor, expect);
  expect([&] { comm.all_reduce(tensor(4, at::kFloat8_e5m2), {}, "x"); }, "moved but not reduced");
  expect([&] { comm.all_reduce(tensor(4, at::kInt), {.op = ReduceOp::kAvg}, "x"); },
         "not averaged or scaled");
  expect([&] { comm.all_reduce(tensor(4, at::kDouble), {.accumulate = at::kFloat}, "x"); },
         "not narrower than the wire");
  expect([&] { comm.all_reduce(tensor(16).view({4, 4}).t(), {}, "x"); }, "must be contiguous");
  expect([&] { comm.broadcast(tensor(4), n, "x"); }, "root of broadcast 'x' is");
  const std::vector<int64_t> long_counts(static_cast<size_t>(n) + 1, 1);
  expect([&] { comm.all_gather(tensor(n + 1), tensor(1), "x", long_counts); }, "one per rank");
  at::Tensor whole = tensor(4 * n + 1);
  expect(
      [&] {
        comm.all_gather(whole.narrow(0, 0, 4 * n), whole.narrow(0, comm.rank() * 4 + 1, 4), "x");
      },
      "overlap");
  if (n > 1) expect([&] { comm.all_gather(tensor(4 * n + 1), tensor(4), "x"); }, "share equally");
  comm.barrier("still fine").wait();
}

}  // namespace

std::span<const CommunicatorCase> communicator_cases() {
  static const std::vector<CommunicatorCase> cases = {
      {"GathersEveryDtype", gathers_every_dtype},
      {"GathersUnevenAndEmptyShares", gathers_uneven_and_empty_shares},
      {"GathersInPlace", gathers_in_place},
      {"DeliversEveryLetter", delivers_every_letter},
      {"BroadcastsFromEveryRoot", broadcasts_from_every_root},
      {"ReducesEveryDtypeInRankOrder", reduces_every_dtype_in_rank_order},
      {"ReducesLargeUnevenShares", reduces_large_uneven_shares},
      {"ReducesIntoTheAccumulationType", reduces_into_the_accumulation_type},
      {"ReducesAnyWireIntoAnyOutput", reduces_any_wire_into_any_output},
      {"AddsToWhatIsThere", adds_to_what_is_there},
      {"RaisesTheFlagWhereANonfiniteValueIsStored",
       raises_the_flag_where_a_nonfinite_value_is_stored},
      {"RoundsNarrowSumsAtMostOnce", rounds_narrow_sums_at_most_once},
      {"AllReducesBitwiseEqualEverywhere", all_reduces_bitwise_equal_everywhere},
      {"LetsNanWinMaxAndMin", lets_nan_win_max_and_min},
      {"KeepsOrderWithManyInFlight", keeps_order_with_many_in_flight},
      {"EnqueuesWithoutWaiting", enqueues_without_waiting},
      {"FollowsWorkOfOtherCommunicators", follows_work_of_other_communicators},
      {"FollowsWorkOfACommunicatorThatWasClosed", follows_work_of_a_communicator_that_was_closed},
      {"SplitsIntoGroupsAndGroupsOfGroups", splits_into_groups_and_groups_of_groups},
      {"ArrangesRanksInAMesh", arranges_ranks_in_a_mesh},
      {"RefusesBadArgumentsBeforeAnythingMoves", refuses_bad_arguments_before_anything_moves},
  };
  return cases;
}

uint64_t communicator_digest(World& world) {
  Communicator& comm = world.communicator();
  uint64_t digest = 1469598103934665603ull;  // FNV-1a over the bytes of every result
  const auto take = [&digest](const at::Tensor& tensor) {
    const auto* bytes = static_cast<const unsigned char*>(tensor.const_data_ptr());
    for (size_t i = 0; i < tensor.nbytes(); ++i) digest = (digest ^ bytes[i]) * 1099511628211ull;
  };
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    const int64_t numel = 30011;
    at::Tensor summed = rank_pattern(comm.rank(), numel, dtype, 7);
    comm.all_reduce(summed, {.op = ReduceOp::kAvg, .scale = 1.7}, "digest").wait();
    take(summed);
    at::Tensor share = at::zeros({numel}, dtype);
    const at::Tensor input = rank_pattern(comm.rank(), numel * comm.size(), dtype, 8);
    comm.reduce_scatter(share, input, {}, "digest").wait();
    at::Tensor all = at::zeros({numel * comm.size()}, dtype);
    comm.all_gather(all, share, "digest").wait();
    take(all);
  }
  return digest;
}

}  // namespace fsdp::testing
