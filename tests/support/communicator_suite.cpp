#include "support/communicator_suite.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "fsdp/base/error.h"
#include "fsdp/comm/communicator.h"
#include "support/dropped_tensors_case.h"
#include "support/rank_pattern.h"
#include "support/reduction_cases.h"

namespace fsdp::testing {

namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

const std::vector<at::ScalarType> kMovable = {at::kFloat, at::kBFloat16,      at::kHalf,
                                              at::kByte,  at::kFloat8_e4m3fn, at::kFloat8_e5m2,
                                              at::kBool};

at::Tensor movable_pattern(int rank, int64_t numel, at::ScalarType dtype) {
  if (dtype == at::kBool) return rank_pattern(rank, numel, at::kFloat) > 0;
  return rank_pattern(rank, numel, at::kFloat).to(dtype);
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

// The values that `from` writes to `to` identify both.
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

// --- order and overlap -------------------------------------------------------------------------

void keeps_order_with_many_in_flight(World& world, at::Device device) {
  Communicator& comm = world.communicator();
  constexpr int kCalls = 40;
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

// Each call sums over a column, gathers the sums along the row, and averages the result over the
// column again. No caller waits before the end, so an operation that does not wait for its `after`
// would read unfinished data.
void follows_work_of_other_communicators(World& world, at::Device device) {
  const Mesh mesh = world.mesh({.outer = world.size() % 2 == 0 ? 2 : 1});
  const int inner = mesh.inner().size();
  const int outer = mesh.outer().size();
  constexpr int kCalls = 24;
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

// Reductions too; and the first communicator may be closed before a wait for the second.
void follows_work_of_a_communicator_that_was_closed(World& world, at::Device device) {
  Communicator& comm = world.communicator();
  const std::vector<int> together(static_cast<size_t>(comm.size()), 0);
  const auto floats = at::device(device).dtype(at::kFloat);
  constexpr int kRounds = 5;
  for (int round = 0; round < kRounds; ++round) {
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

// Reductions use one piece of memory in turn, and copies fill and empty it in between; no caller
// waits before the end.
void copies_between_its_collectives(World& world, at::Device device) {
  Communicator& comm = world.communicator();
  const auto other = comm.split(std::vector<int>(static_cast<size_t>(comm.size()), 0), "other");
  const auto floats = at::device(device).dtype(at::kFloat);
  const int64_t numel = 1 << 16;
  const at::Tensor shared = at::zeros({numel}, floats.dtype(at::kBFloat16));
  // Keeps the streams of a device's ranks busy for different times, so that a stream that does not
  // wait for another one's copy reads old data.
  const at::Tensor ballast = at::ones({device.is_cpu() ? 1 : comm.rank() << 26}, floats);
  const at::Tensor ballast_copy = at::empty_like(ballast);
  std::vector<at::Tensor> tensors;
  std::vector<at::Tensor> results;
  Work last;
  for (int round = 0; round < 5; ++round) {
    // bf16 has no 257: the copy rounds it to 256.
    tensors.push_back(at::full({numel}, round == 0 ? 257.0 : 1.0 * round, floats));
    results.push_back(at::zeros({numel}, floats));
    Communicator& chosen = round % 2 == 0 ? comm : *other;
    chosen.copy(ballast_copy, ballast, "ballast", last);
    chosen.copy(shared, tensors.back(), "in");
    chosen.all_reduce(shared, {}, "sum");
    last = chosen.copy(results.back(), shared, "out");
  }
  last.wait();
  for (int round = 0; round < 5; ++round) {
    const double expected = comm.size() * (round == 0 ? 256.0 : 1.0 * round);
    EXPECT_TRUE((results[static_cast<size_t>(round)] == expected).all().item<bool>()) << round;
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
  expect([&] { comm.copy(tensor(4), tensor(5), "x"); }, "output of 'x' has 4 elements");
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
  static const std::vector<CommunicatorCase> cases = [] {
    std::vector<CommunicatorCase> all = {
        {"GathersEveryDtype", gathers_every_dtype},
        {"GathersUnevenAndEmptyShares", gathers_uneven_and_empty_shares},
        {"GathersInPlace", gathers_in_place},
        {"DeliversEveryLetter", delivers_every_letter},
        {"BroadcastsFromEveryRoot", broadcasts_from_every_root},
        {"KeepsOrderWithManyInFlight", keeps_order_with_many_in_flight},
        {"EnqueuesWithoutWaiting", enqueues_without_waiting},
        {"FollowsWorkOfOtherCommunicators", follows_work_of_other_communicators},
        {"FollowsWorkOfACommunicatorThatWasClosed", follows_work_of_a_communicator_that_was_closed},
        dropped_tensors_case(),
        {"CopiesBetweenItsCollectives", copies_between_its_collectives},
        {"SplitsIntoGroupsAndGroupsOfGroups", splits_into_groups_and_groups_of_groups},
        {"ArrangesRanksInAMesh", arranges_ranks_in_a_mesh},
        {"RefusesBadArgumentsBeforeAnythingMoves", refuses_bad_arguments_before_anything_moves},
    };
    const std::vector<CommunicatorCase> reductions = reduction_cases();
    all.insert(all.end(), reductions.begin(), reductions.end());
    return all;
  }();
  return cases;
}

uint64_t communicator_digest(World& world) {
  Communicator& comm = world.communicator();
  const bool has_grids = world.size() % 4 == 0;
  const Mesh mesh =
      world.mesh(has_grids ? MeshOptions{.outer = 2, .ep = 2, .tp = 2} : MeshOptions{});
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
    for (const GridKind kind : mesh.grids()) {
      const Grid grid = mesh.grid(kind);
      for (const MeshAxis* axis : {grid.outer, grid.inner, grid.owners}) {
        if (axis == nullptr) continue;
        const std::vector<int64_t> counts = uneven_counts(axis->size(), 1001);
        const at::Tensor padded = at::zeros({2000}, dtype);
        const at::Tensor mine = padded.narrow(0, 0, counts[static_cast<size_t>(axis->rank())]);
        const at::Tensor whole = rank_pattern(comm.rank(), sum(counts), dtype, 9);
        axis->reduce().reduce_scatter(mine, whole, {}, "digest", counts).wait();
        all = at::zeros({comm.size() * padded.numel()}, dtype);
        comm.all_gather(all, padded, "digest").wait();
        take(all);
      }
    }
  }
  return digest;
}

}  // namespace fsdp::testing
