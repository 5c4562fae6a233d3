// How fast checkpoints are written and read, beside plain files of as many bytes on the same disk,
// and how long a training stands still for one.
#include <ATen/ATen.h>
#include <fcntl.h>
#include <torch/nn/modules/linear.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/base/check.h"
#include "fsdp/base/crc32c.h"
#include "fsdp/base/durable_file.h"
#include "fsdp/checkpoint/checkpointer.h"
#include "fsdp/comm/communicator.h"
#include "fsdp/optim/adamw.h"
#include "fsdp/shard/fully_shard.h"
#include "fsdp/shard/unit.h"
#include "turns.h"

namespace {

using namespace fsdp;

constexpr int64_t kWidth = 1024;
constexpr int64_t kUnitStateBytes = 12 * (kWidth + 1) * kWidth;  // weight and two moments, fp32

struct Arguments {
  std::string directory = "/tmp";
  int64_t mib = 768;
  int ranks = 2;
  int rounds = 5;
};

struct StackImpl : torch::nn::Module {
  explicit StackImpl(int64_t num_units) {
    for (int64_t i = 0; i < num_units; ++i)
      units.push_back(
          register_module("unit" + std::to_string(i), Unit<torch::nn::Linear>(kWidth, kWidth)));
  }
  at::Tensor forward(at::Tensor x) {
    for (Unit<torch::nn::Linear>& unit : units) x = at::tanh(unit(x));
    return x;
  }
  std::vector<Unit<torch::nn::Linear>> units;
};
TORCH_MODULE(Stack);

// Writes as a copying program does: large writes from memory, and one fsync.
void write_plainly(const std::string& path, const std::vector<std::byte>& bytes) {
  const int file = ::open(path.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0644);
  FSDP_CHECK(file >= 0, path, " cannot be created");
  constexpr size_t kChunk = size_t{16} << 20;
  for (size_t begin = 0; begin < bytes.size(); begin += kChunk) {
    const size_t size = std::min(kChunk, bytes.size() - begin);
    FSDP_CHECK(::write(file, bytes.data() + begin, size) == static_cast<ssize_t>(size), path);
  }
  FSDP_CHECK(::fsync(file) == 0 && ::close(file) == 0, path);
}

void read_plainly(const std::string& path, std::vector<std::byte>& buffer) {
  const int file = ::open(path.c_str(), O_RDONLY);
  FSDP_CHECK(file >= 0, path, " cannot be read");
  while (::read(file, buffer.data(), buffer.size()) > 0) {
  }
  ::close(file);
}

// The next read comes from the disk.
void forget(const std::string& path) {
  if (is_directory(path)) {
    for (const std::string& name : names_in(path)) forget(concat(path, "/", name));
    return;
  }
  const int file = ::open(path.c_str(), O_RDONLY);
  ::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
  ::close(file);
}

// The most memory since the last call with kReset, in MiB, by the kernel's count.
enum class Peak { kReset, kRead };
double peak_mib(Peak what) {
  if (what == Peak::kReset) std::ofstream("/proc/self/clear_refs") << "5";
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.rfind("VmHWM:", 0) == 0) return std::stod(line.substr(6)) / 1024.0;
  return 0.0;
}

class Bench {
 public:
  Bench(World& world, const Arguments& arguments)
      : world_(world),
        arguments_(arguments),
        mesh_(world.mesh({})),
        num_units_((arguments.mib << 20) / kUnitStateBytes),
        model_(num_units_),
        sharded_(fully_shard(model_, mesh_, {.initial_values = InitialValues::kOfRankZero})),
        optimizer_(sharded_, {}),
        own_(static_cast<size_t>(num_units_ * kUnitStateBytes / world.size())) {
    std::memset(own_.data(), 1, own_.size());
    train();  // moments are not zero, and the order of units is known
  }

  void run() {
    const double gigabytes = static_cast<double>(num_units_ * kUnitStateBytes) / 1e9;
    say(concat("# ", num_units_, " units, ", num_units_ * (kWidth + 1) * kWidth,
               " parameters, fp32, AdamW: ", gigabytes, " GB; ", world_.size(), " thread ranks, ",
               arguments_.rounds, " rounds"));
    compare_writes(gigabytes);
    compare_reads(gigabytes);
    measure_stall();
    measure_memory();
  }

 private:
  CheckpointState state() { return {.sharded = sharded_, .optimizer = &optimizer_}; }
  std::string plain_path() const { return concat(arguments_.directory, "/plain-", world_.rank()); }
  std::string run_path() const { return arguments_.directory + "/run"; }

  void say(const std::string& line) const {
    if (world_.rank() == 0) std::printf("%s\n", line.c_str());
    std::fflush(stdout);
  }

  void train() {
    model_(at::ones({64, kWidth})).square().mean().backward();
    optimizer_.step();
    optimizer_.zero_grad();
    optimizer_.wait();
  }

  // rate, and rate by the plain one's.
  void report(const char* what, const bench::Timings& timings, double gigabytes) const {
    say(concat(what, "  ", gigabytes / (timings.median_us(1) * 1e-6), " GB/s, plain file ",
               gigabytes / (timings.median_us(0) * 1e-6), " GB/s, ratio ",
               1.0 / timings.median_ratio(1, 0)));
  }

  void compare_writes(double gigabytes) {
    Checkpointer checkpointer(run_path(), mesh_,
                              {.mode = SaveMode::kBlocking, .keep = {.keep_last = 1}});
    int64_t step = 0;
    const bench::Timings timings =
        bench::take_turns(world_,
                          {{"plain", [&] { write_plainly(plain_path(), own_); }},
                           {"save", [&] { checkpointer.save(state(), {.step = ++step}); }}},
                          {.rounds = arguments_.rounds});
    report("write ", timings, gigabytes);
    compare_checksums();
  }

  // Writes equal bytes with and without checksums, by the class that checkpoints are written with.
  void compare_checksums() {
    const auto write = [&](bool with_checksums) {
      constexpr size_t kBlock = size_t{256} << 10;  // as pieces are written
      FileWriter file(plain_path());
      for (size_t begin = 0; begin < own_.size(); begin += kBlock) {
        const auto block =
            std::span<const std::byte>(own_).subspan(begin, std::min(kBlock, own_.size() - begin));
        file.write(block);
        if (with_checksums) checksum_ += crc32c(block);
      }
      file.commit();
    };
    const bench::Timings timings = bench::take_turns(
        world_, {{"without", [&] { write(false); }}, {"with", [&] { write(true); }}},
        // The disk varies by more than they cost, so there are many turns.
        {.rounds = 4 * arguments_.rounds + 1});
    const auto [low, high] = timings.ratio_quartiles(1, 0);
    say(concat("checksums  writing with them / without ", timings.median_ratio(1, 0),
               " (quartiles ", low, " and ", high, " of ", 4 * arguments_.rounds + 1, " turns)"));
  }

  void compare_reads(double gigabytes) {
    std::vector<std::byte> buffer(size_t{8} << 20);
    const auto forget_all = [&] {
      world_.communicator().barrier("forget").wait();
      if (world_.rank() == 0) forget(arguments_.directory);
      world_.communicator().barrier("forgotten").wait();
    };
    std::vector<std::vector<double>> us(2);
    for (int round = 0; round < arguments_.rounds; ++round)
      for (const bool plain : {round % 2 == 0, round % 2 != 0}) {
        forget_all();
        const bench::Timings one = bench::take_turns(
            world_, {{"", [&] { plain ? read_plainly(plain_path(), buffer) : load(); }}},
            {.rounds = 1});
        us[plain ? 0 : 1].push_back(one.median_us(0));
      }
    report("read  ", bench::Timings(std::move(us)), gigabytes);
  }

  void load() { load_checkpoint(run_path(), state()); }

  void measure_stall() {
    Checkpointer checkpointer(run_path(), mesh_, {.keep = {.keep_last = 1}});
    checkpointer.save(state(), {.step = 1000});  // takes the memory that later ones find
    checkpointer.wait();
    std::vector<std::byte> copy(own_.size());
    std::memcpy(copy.data(), own_.data(), own_.size());
    int64_t step = 1000;
    const bench::Timings timings =
        bench::take_turns(world_,
                          {{"step", [&] { train(); }},
                           {"copy", [&] { std::memcpy(copy.data(), own_.data(), own_.size()); }},
                           {"save", [&] { checkpointer.save(state(), {.step = ++step}); }},
                           {"wait", [&] { checkpointer.wait(); }}},
                          {.rounds = arguments_.rounds});
    // By turns backwards "wait" comes before "save": then save() waits for the one before it, which
    // is already there.
    const double over = timings.best_us(2) - timings.best_us(1);
    say(concat("stall   save() ", timings.best_us(2) / 1e3, " ms, copying as many bytes ",
               timings.best_us(1) / 1e3, " ms, a training step ", timings.best_us(0) / 1e3,
               " ms: ", 100.0 * over / timings.best_us(0), " % of a step beyond the copy"));
  }

  void measure_memory() {
    Checkpointer checkpointer(run_path(), mesh_,
                              {.mode = SaveMode::kBlocking, .keep = {.keep_last = 1}});
    world_.communicator().barrier("memory").wait();
    const double before = peak_mib(Peak::kReset);
    world_.communicator().barrier("reset").wait();
    checkpointer.save(state(), {.step = 5000});
    world_.communicator().barrier("saved").wait();
    say(concat("memory  a blocking save of ", world_.size(), " ranks needs ",
               peak_mib(Peak::kRead) - before, " MiB beside the state (a chunk is 16 MiB)"));
  }

  World& world_;
  const Arguments& arguments_;
  const Mesh mesh_;
  const int64_t num_units_;
  Stack model_;
  Sharded sharded_;
  AdamW optimizer_;
  std::vector<std::byte> own_;
  uint32_t checksum_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  CLI::App app{"Checkpoints beside plain files of as many bytes."};
  app.add_option("--directory", arguments.directory, "where to write; a folder of its own in it")
      ->capture_default_str();
  app.add_option("--mib", arguments.mib, "size of a checkpoint")->capture_default_str();
  app.add_option("--ranks", arguments.ranks, "thread ranks")->capture_default_str();
  app.add_option("--rounds", arguments.rounds, "turns of each")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  arguments.directory += "/fsdp-bench-checkpoint";
  try {
    make_directories(arguments.directory);
    run_threads(arguments.ranks, {.timeout_seconds = 600.0},
                [&](World& world) { Bench(world, arguments).run(); });
    remove_tree(arguments.directory);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
