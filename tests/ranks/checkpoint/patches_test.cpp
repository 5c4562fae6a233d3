// Patches of weights: whoever applies them has the trainer's bits, for any strategy and whatever
// happens between them.
#include "fsdp/checkpoint/patches.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "fsdp/checkpoint/format/tensor_stream.h"
#include "fsdp/checkpoint/load.h"
#include "fsdp/checkpoint/patches/applied_patches.h"
#include "fsdp/nn/layers/linear.h"
#include "fsdp/optim/muon.h"
#include "fsdp/optim/sgd.h"
#include "support/checkpoint_training.h"
#include "support/error_of.h"
#include "support/parallel_training.h"
#include "support/stored_tensors.h"
#include "support/watched_memory.h"

namespace fsdp::testing::patches_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

at::Tensor bits_of(const at::Tensor& tensor) {
  return tensor.element_size() == 2 ? tensor.view(at::kShort) : tensor.view(at::kInt);
}

// Applies the patches of all ranks, as the document of the format says.
class Receiver {
 public:
  // Returns how many elements of the patch were other bits before.
  int64_t apply(const Patch& patch) {
    const std::lock_guard lock(mutex_);
    int64_t num_changed = 0;
    for (const PatchTensor& each : patch.tensors) {
      at::Tensor& whole = tensors_[each.name];
      if (!whole.defined()) whole = at::full(each.shape, -7.0, each.values.scalar_type());
      EXPECT_EQ(whole.sizes(), at::IntArrayRef(each.shape)) << each.name;
      const at::Tensor flat = bits_of(whole.view({-1}));
      const at::Tensor values = bits_of(each.values.cpu());
      const at::Tensor positions = positions_of(each).cpu();
      num_changed += flat.index_select(0, positions).ne(values).sum().item<int64_t>();
      num_elements_ += values.numel();
      flat.index_copy_(0, positions, values);
    }
    return num_changed;
  }

  Patch applied(Patch patch) {
    apply(patch);
    return patch;
  }

  static at::Tensor positions_of(const PatchTensor& tensor) {
    if (tensor.positions.defined()) return tensor.positions;
    std::vector<at::Tensor> parts;
    for (const PatchRange& range : tensor.ranges)
      parts.push_back(at::arange(range.begin, range.end, at::kLong));
    return at::cat(parts);
  }

  int64_t num_elements() const { return num_elements_; }
  const std::map<std::string, at::Tensor>& tensors() const { return tensors_; }

 private:
  std::mutex mutex_;
  std::map<std::string, at::Tensor> tensors_;
  int64_t num_elements_ = 0;
};

template <typename Model>
void expect_bits(const Sharded& sharded, Model& model, const Receiver& receiver,
                 const std::string& what) {
  const auto whole = sharded.full_parameters();
  for (const auto& item : model->named_parameters()) {
    const at::Tensor& received = receiver.tensors().at(item.key());
    ASSERT_TRUE(at::equal(bits_of(received), bits_of(item.value().detach().cpu().contiguous())))
        << what << " " << item.key();
  }
}

// Between applying a patch and looking at the result.
void wait_for_all(World& world) { world.communicator().barrier("patch applied").wait(); }

struct Case {
  std::string name;
  Training run;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](const std::string& name, int ranks, int outer, const std::string& strategy,
                       at::ScalarType compute, const PrecisionPolicy& precision) -> Training& {
    Training run{.ranks = ranks, .outer = outer, .compute = compute};
    run.shard = {.strategy = parse_strategy(strategy), .precision = precision};
    run.adamw = {.lr = 1e-5, .step = {.marks_changes = true}};
    all.push_back({concat(name, ", ", strategy, ", ", ranks, " ranks"), run});
    return all.back().run;
  };
  const PrecisionPolicy split{.main_params = at::kFloat};
  const PrecisionPolicy separate{.main_params = at::kFloat, .main_storage = MainStorage::kSeparate};
  const PrecisionPolicy none{.main_params = std::nullopt};
  add("split", 1, 1, "no_shard", at::kBFloat16, split);
  add("split", 2, 1, "optim", at::kBFloat16, split);
  add("split", 3, 1, "optim_grads", at::kBFloat16, split);
  add("split", 4, 1, "optim_grads_params", at::kBFloat16, split);
  add("split", 4, 2, "optim_grads_params", at::kBFloat16, split);
  add("split", 4, 2, "optim_grads_params+hfsdp", at::kBFloat16, split);
  add("separate", 2, 1, "optim_grads_params", at::kBFloat16, separate);
  add("fp16", 3, 1, "optim_grads_params", at::kHalf, separate);
  add("fp32", 2, 1, "optim_grads_params", at::kFloat, split);
  add("random rounding", 4, 1, "optim_grads", at::kBFloat16, none).adamw.step.rounding =
      Rounding::kStochastic;
  add("half of it on the host", 2, 1, "optim_grads_params", at::kBFloat16, split)
      .shard.offload.fraction = 0.5;
  add("all of it on the host", 3, 1, "optim", at::kBFloat16, none).shard.offload.fraction = 1.0;
  return all;
}

// 30 steps of each case, in patches of 1 to 5 steps. After one step a patch has the elements whose
// bits changed, and no other; after several also those that changed back.
TEST(Patches, BringTheTrainersBits) {
  for (const auto& [name, run] : cases()) {
    Receiver receiver;
    std::atomic<int64_t> num_changed = 0;
    std::atomic<int64_t> num_sent = 0;
    run_ranks(run.ranks, [&](World& world) {
      const Mesh mesh = world.mesh({.outer = run.outer});
      Wide model = make_wide(run.compute);
      const Sharded sharded = fully_shard(model, mesh, run.shard);
      AdamW optimizer(sharded, run.adamw);
      TrainingRank rank{world, mesh, model, sharded, optimizer};
      PatchStream stream(rank.state());
      std::mt19937 random(17);  // the same on all ranks
      int step = 0;
      for (int64_t length = 0; step <= 30; length = 1 + static_cast<int64_t>(random() % 5)) {
        optimizer.set_learning_rate(random() % 3 == 0 ? 1e-3 : 1e-5);
        rank.train(step, step + static_cast<int>(length));
        step += static_cast<int>(length);
        const Patch patch = stream.take(step, step % 2 == 0 ? at::kCPU : test_device());
        EXPECT_EQ(patch.from.has_value(), step > 0);
        int64_t elements = 0;
        for (const PatchTensor& tensor : patch.tensors) elements += tensor.values.numel();
        const int64_t changed = receiver.apply(patch);
        if (length == 1) {
          EXPECT_EQ(changed, elements) << name << ", step " << step;
        }
        if (step > 0) num_changed += changed, num_sent += elements;
        wait_for_all(world);
        expect_bits(sharded, model, receiver, concat(name, ", step ", step));
        wait_for_all(world);
      }
    });
    EXPECT_GT(num_changed, 100) << name;
    std::printf("%s: %.3f elements in patches for each that changed\n", name.c_str(),
                static_cast<double>(num_sent) / static_cast<double>(num_changed));
  }
}

int64_t numel_of(const Patch& patch) {
  int64_t numel = 0;
  for (const PatchTensor& tensor : patch.tensors) numel += tensor.values.numel();
  return numel;
}

int64_t numel_of(const Wide& model) {
  int64_t numel = 0;
  for (const at::Tensor& parameter : model->parameters()) numel += parameter.numel();
  return numel;
}

// Whatever sets weights other than an update counts as a change of all of them.
TEST(Patches, SeeWhatElseSetsWeights) {
  for (const MainStorage storage : {MainStorage::kSplit, MainStorage::kSeparate}) {
    const TempDir directory;
    Receiver receiver;
    Training run{.ranks = 2, .compute = at::kBFloat16};
    run.shard.precision = {.main_params = at::kFloat, .main_storage = storage};
    run.adamw = {.lr = 1e-5, .step = {.on_nonfinite = OnNonfinite::kSkip, .marks_changes = true}};
    run_training(run, [&](TrainingRank& rank) {
      PatchStream stream(rank.state());
      int64_t step = 0;
      const auto take = [&](const std::string& after) {
        rank.optimizer.wait();
        const Patch patch = stream.take(step++);
        receiver.apply(patch);
        wait_for_all(rank.world);
        expect_bits(rank.sharded, rank.model, receiver, after);
        wait_for_all(rank.world);
        return numel_of(patch);
      };
      EXPECT_GT(take("the beginning"), numel_of(rank.model) / 3);
      EXPECT_EQ(take("nothing"), 0);
      save_checkpoint(directory.path(), rank.state(), {.step = 0});
      rank.train(0, 3);
      take("three steps");
      load_checkpoint(directory.path(), rank.state());
      EXPECT_GT(take("a load"), numel_of(rank.model) / 3);
      EXPECT_EQ(take("nothing after a load"), 0);
      rank.step(rank.input_of(1).mul(NAN));
      EXPECT_TRUE(rank.optimizer.was_skipped());
      EXPECT_EQ(take("a skipped step"), 0);
      {
        const auto whole = rank.sharded.full_parameters(Sharded::Access::kWrite, {"unit1"});
        const at::NoGradGuard no_grad;
        rank.model->units[1]->linear->bias.add_(0.5);
      }
      const int64_t written = take("writing one unit");
      EXPECT_GT(written, 0);
      EXPECT_LT(written, numel_of(rank.model) / 2);
      if (storage == MainStorage::kSeparate) {
        // Half of the distance to the next bf16 number: a tie, which updates round away from zero.
        for (const FlatShard& shard : rank.sharded.flat_shards())
          shard.main_weight.copy_(
              shard.main_weight.to(at::kBFloat16).to(at::kFloat).mul_(1.00390625f));
        rank.sharded.refresh_weights();
        take("a refresh");
        rank.optimizer.set_learning_rate(0.0);
        rank.train(3, 4);
        take("a step of rate 0");
      }
    });
  }
}

TEST(Patches, OfAnOptimizerWithoutMarksAreRefused) {
  run_training({.ranks = 1}, [&](TrainingRank& rank) {
    EXPECT_THAT(error_of([&] { PatchStream stream(rank.state()); }),
                HasSubstr("step.marks_changes = true"));
  });
  Training run{.ranks = 1};
  run.adamw.step.marks_changes = true;
  run_training(run, [&](TrainingRank& rank) {
    PatchStream stream(rank.state());
    stream.take(5);
    EXPECT_THAT(error_of([&] { stream.take(5); }),
                HasSubstr("step is 5; a patch leads to a step after 5"));
  });
}

// Slices of tensors and of experts become positions of the whole tensors.
TEST(Patches, PutSlicesOfRanksTogether) {
  for (const parallel::Grids& grids :
       {parallel::Grids{2, {.tp = 2}}, {4, {.ep = 2, .tp = 2}}, {4, {.outer = 2, .ep = 4}}}) {
    Receiver receiver;
    run_ranks(grids.ranks, [&](World& world) {
      const Mesh mesh = world.mesh(grids.mesh);
      parallel::ParallelModel model = parallel::parallel_model();
      const Sharded sharded = fully_shard(model, mesh);
      AdamW optimizer(sharded, {.lr = 0.01, .step = {.marks_changes = true}});
      const CheckpointState state{.sharded = sharded, .optimizer = &optimizer};
      PatchStream stream(state);
      for (int step = 0; step < 4; ++step) {
        receiver.apply(stream.take(step));
        wait_for_all(world);
        {
          const auto whole = sharded.full_parameters();
          for (const auto& item : model->named_parameters())
            EXPECT_TRUE(
                at::equal(item.value(),
                          parallel::owned_by(mesh, item.key(), receiver.tensors().at(item.key()))))
                << parallel::text(grids) << " " << item.key() << ", step " << step;
        }
        wait_for_all(world);
        parallel::loss_of(model, 0, step).backward();
        optimizer.step();
        optimizer.zero_grad();
      }
    });
  }
}

// Every optimizer marks what it changes: matrices of Muon, too, which are updated in two passes.
TEST(Patches, OfEveryOptimizerBringTheTrainersBits) {
  using Make = std::function<std::unique_ptr<Optimizer>(const Sharded&)>;
  const StepOptions step{.marks_changes = true};
  const std::vector<std::pair<std::string, Make>> optimizers = {
      {"SGD",
       [&](const Sharded& sharded) {
         return std::make_unique<SGD>(sharded, SGDOptions{.lr = 1e-3, .step = step});
       }},
      {"SGD with momentum",
       [&](const Sharded& sharded) {
         return std::make_unique<SGD>(sharded,
                                      SGDOptions{.lr = 1e-3, .momentum = 0.9, .step = step});
       }},
      {"Muon", [&](const Sharded& sharded) {
         return std::make_unique<Muon>(sharded, MuonOptions{.lr = 1e-4, .step = step});
       }}};
  for (const auto& [name, make] : optimizers) {
    Receiver receiver;
    run_ranks(3, [&](World& world) {
      const Mesh mesh = world.mesh();
      Wide model = make_wide(at::kBFloat16);
      ShardOptions options{.precision = {.main_params = at::kFloat}};
      if (name == "Muon") options.matrices = {.named = {{.pattern = "*.weight"}}};
      const Sharded sharded = fully_shard(model, mesh, options);
      const std::unique_ptr<Optimizer> optimizer = make(sharded);
      PatchStream stream({.sharded = sharded, .optimizer = optimizer.get()});
      for (int number = 0; number < 12; ++number) {
        const Patch patch = stream.take(number);
        EXPECT_EQ(receiver.apply(patch), numel_of(patch)) << name;
        wait_for_all(world);
        expect_bits(sharded, model, receiver, concat(name, ", step ", number));
        wait_for_all(world);
        model(input_for(world.rank(), number, {2, 19}).to(test_device(), at::kBFloat16))
            .to(at::kFloat)
            .square()
            .sum()
            .backward();
        optimizer->step();
        optimizer->zero_grad();
      }
    });
  }
}

struct ManyImpl : torch::nn::Module {
  ManyImpl() {
    for (int i = 0; i < 16; ++i)
      units.push_back(
          register_module("unit" + std::to_string(i), Unit<torch::nn::Linear>(512, 512)));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& unit : units) x = unit(x);
    return x;
  }
  std::vector<Unit<torch::nn::Linear>> units;
};
TORCH_MODULE(Many);

// Positions of a unit's elements, which are several numbers of 64 bits while they find their
// places, are gone when the next unit's turn comes; what stays is what the file will have.
TEST(Patches, AreWrittenOneUnitAtATime) {
  const TempDir directory;
  run_ranks(1, [&](World& world) {
    const Mesh mesh = world.mesh();
    Many model = build([] { return Many(); });
    model->to(test_device());
    const Sharded sharded = fully_shard(model, mesh, {});
    AdamW optimizer(sharded, {.lr = 0.1, .step = {.marks_changes = true}});
    PatchStream stream({.sharded = sharded, .optimizer = &optimizer});
    stream.write(directory.path(), 0);
    model(input_for(0, 0, {4, 512}).to(test_device())).square().sum().backward();
    optimizer.step();
    optimizer.wait();
    constexpr int64_t kUnitNumel = 512 * 513;
    const TensorAllocations allocations;
    stream.write(directory.path(), 1);
    EXPECT_LE(allocations.peak_bytes(), kUnitNumel * (16 * 4 + 80));
  });
}

// --- files ---------------------------------------------------------------------------------------

std::string bytes_of(const at::Tensor& values) {
  const at::Tensor tensor = values.detach().cpu().contiguous();
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

// Files of the model's names and shapes, with numbers that training never has.
void write_other_weights(const std::string& path, const Wide& model) {
  std::vector<WholeTensor> tensors;
  for (const auto& item : model->named_parameters())
    tensors.push_back({item.key(), item.value().sizes().vec(), DType::kBFloat16,
                       bytes_of(at::full_like(item.value(), 99.0))});
  write_plain_file(path + "/model.safetensors", tensors);
}

TEST(Patches, InFilesBringTheTrainersBits) {
  for (const auto& [ranks, outer, strategy] :
       {std::tuple{1, 1, "no_shard"}, {3, 1, "optim_grads_params"}, {4, 2, "optim"}}) {
    const TempDir directory(TempDir::On::kMemory);
    const std::string weights = directory.path() + "/weights";
    write_other_weights(weights, make_wide(at::kBFloat16));
    Training run{.ranks = ranks, .outer = outer, .compute = at::kBFloat16};
    run.shard = {.strategy = parse_strategy(strategy), .precision = {.main_params = at::kFloat}};
    run.adamw = {.lr = 1e-5, .step = {.marks_changes = true}};
    run_training(run, [&](TrainingRank& rank) {
      PatchStream stream(rank.state());
      for (const int step : {0, 1, 4, 6}) {
        const std::string path = stream.write(directory.path() + "/patches", step);
        if (rank.world.rank() == 0) apply_patch(path, weights);
        wait_for_all(rank.world);
        {
          const TensorCatalog catalog(weights);
          const auto whole = rank.sharded.full_parameters();
          for (const auto& item : rank.model->named_parameters()) {
            std::string stored(item.value().nbytes(), '\0');
            read_elements(catalog.files(), catalog.model().at(item.key()),
                          {0, item.value().numel()}, reinterpret_cast<std::byte*>(stored.data()));
            EXPECT_EQ(stored, bytes_of(item.value()))
                << strategy << " " << item.key() << ", step " << step;
          }
        }
        wait_for_all(rank.world);
        if (step < 6) rank.train(step, step == 0 ? 1 : step == 1 ? 4 : 6);
      }
    });
    EXPECT_EQ(patches_in(directory.path() + "/patches").size(), 4u);
  }
}

// Each sees what the other took, and brings everything.
TEST(Patches, OfTwoStreamsOnOneOptimizerBringTheTrainersBits) {
  Training run{.ranks = 2, .compute = at::kBFloat16};
  run.adamw = {.lr = 1e-4, .step = {.marks_changes = true}};
  Receiver receivers[2];
  run_training(run, [&](TrainingRank& rank) {
    PatchStream first(rank.state());
    PatchStream second(rank.state());
    for (int step = 0; step < 3; ++step) {
      EXPECT_FALSE(receivers[0].applied(first.take(step)).from.has_value());
      EXPECT_FALSE(receivers[1].applied(second.take(step)).from.has_value());
      wait_for_all(rank.world);
      for (const Receiver& receiver : receivers)
        expect_bits(rank.sharded, rank.model, receiver, "two streams");
      wait_for_all(rank.world);
      rank.train(step, step + 1);
    }
    EXPECT_EQ(receivers[1].applied(second.take(3)).from, 2);  // nobody took since
    wait_for_all(rank.world);
    expect_bits(rank.sharded, rank.model, receivers[1], "one stream");
    wait_for_all(rank.world);
  });
}

TEST(Patches, OfQuantisedWeightsAreRefused) {
  run_ranks(1, [&](World& world) {
    const Mesh mesh = world.mesh();
    const Sharded sharded = fully_shard(nn::Linear(256, 256), mesh,
                                        {.precision = {.main_params = at::kFloat},
                                         .quantization = {.recipe = WeightRecipe::kFp8Row}});
    EXPECT_THAT(error_of([&] { AdamW(sharded, {.step = {.marks_changes = true}}); }),
                AllOf(HasSubstr("step.marks_changes is true, but parameter 'weight' is quantised"),
                      HasSubstr("bf16, fp16 or fp32")));
  });
}

}  // namespace
}  // namespace fsdp::testing::patches_test
