// Weights that leave a training tensor by tensor are the model's, whatever has cut it, and no rank
// needs more memory for it than was said.
#include "fsdp/checkpoint/weight_export.h"

#include <gmock/gmock.h>

#include "fsdp/base/durable_file.h"
#include "fsdp/base/text.h"
#include "fsdp/checkpoint/format/tensor_catalog.h"
#include "fsdp/checkpoint/run_directory.h"
#include "fsdp/checkpoint/tools/converted_files.h"
#include "support/checkpoint_training.h"
#include "support/error_of.h"
#include "support/file_size_limit.h"
#include "support/one_in.h"
#include "support/parallel_training.h"
#include "support/watched_memory.h"

namespace fsdp::testing::weight_export_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAreArray;

constexpr int64_t kMaxFileBytes = int64_t{1} << 30;

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// The rank's result; other ranks than receivers get none.
NamedTensors exported(const CheckpointState& state, const ExportOptions& options = {}) {
  NamedTensors tensors;
  export_weights(
      state,
      [&](const std::string& name, const at::Tensor& value) { tensors.emplace_back(name, value); },
      options);
  return tensors;
}

template <typename Model>
NamedTensors whole_parameters(const Sharded& sharded, Model& model) {
  const auto whole = sharded.full_parameters();
  NamedTensors tensors;
  for (const auto& item : model->named_parameters())
    tensors.emplace_back(item.key(), item.value().detach().to(at::kCPU, /*non_blocking=*/false,
                                                              /*copy=*/true));
  return tensors;
}

void expect_same_tensors(const NamedTensors& actual, const NamedTensors& expected,
                         const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(actual[i].first, expected[i].first) << what;
    EXPECT_EQ(actual[i].second.scalar_type(), expected[i].second.scalar_type()) << what;
    EXPECT_TRUE(at::equal(actual[i].second, expected[i].second)) << what << " " << actual[i].first;
  }
}

// Converts as `fsdp convert --to hf` does.
void convert(const std::string& checkpoint, const std::string& directory,
             std::optional<DType> dtype, const HuggingFaceOptions& options = {}) {
  const TensorCatalog catalog(resolve_checkpoint(checkpoint));
  ConvertedReads reads(catalog.files(), dtype);
  make_directories(directory);
  write_huggingface_files(directory, select_all(catalog, catalog.model()).tensors, reads, options);
}

void expect_same_files(const std::string& actual, const std::string& expected,
                       const std::string& what) {
  std::vector<std::string> names = names_in(expected);
  EXPECT_THAT(names_in(actual), UnorderedElementsAreArray(names)) << what;
  for (const std::string& name : names)
    EXPECT_TRUE(read_text_file(concat(actual, "/", name), kMaxFileBytes) ==
                read_text_file(concat(expected, "/", name), kMaxFileBytes))
        << what << ": " << name;
}

// --- the tensors ---------------------------------------------------------------------------------

// In chunks of 200 bytes, which end inside rows, and in one.
TEST(WeightExport, EveryTensorArrivesAsItComputes) {
  for (const std::string& strategy : kStrategies)
    for (const int ranks : {1, 2, 3, 4})
      for (const at::ScalarType compute : {at::kFloat, at::kBFloat16})
        for (const int64_t chunk_bytes : {int64_t{200}, int64_t{1} << 20}) {
          Training run{.ranks = ranks, .outer = ranks == 4 ? 2 : 1, .compute = compute};
          run.shard.strategy = parse_strategy(strategy);
          const std::string what = concat(strategy, ", ", ranks, " ranks, ", c10::toString(compute),
                                          ", chunks of ", chunk_bytes);
          run_training(run, [&](TrainingRank& rank) {
            rank.train(0, 2);
            const NamedTensors tensors = exported(rank.state(), {.chunk_bytes = chunk_bytes});
            const NamedTensors whole = whole_parameters(rank.sharded, rank.model);
            expect_same_tensors(tensors, rank.world.rank() == 0 ? whole : NamedTensors{}, what);
          });
        }
}

TEST(WeightExport, AllRanksReceiveOnRequest) {
  Training run{.ranks = 4, .outer = 2};
  run.shard.strategy = Strategy::optim_grads_params;
  run_training(run, [&](TrainingRank& rank) {
    rank.train(0, 1);
    const NamedTensors tensors = exported(
        rank.state(), {.receivers = ExportOptions::Receivers::kAllRanks, .chunk_bytes = 100});
    expect_same_tensors(tensors, whole_parameters(rank.sharded, rank.model), "all ranks");
  });
}

// Sections along dim 1 are cut out of every row, and other ones renamed.
TEST(WeightExport, RulesDivideAndRenameTensors) {
  const NameRules rules(
      {{.title = "columns",
        .pattern = "unit1.linear.weight",
        .dim = 1,
        .sections = {{.name = "unit1.a.weight", .size = "5"}, {.name = "unit1.b.weight"}}},
       {.title = "name", .pattern = "unit2.linear.bias", .sections = {{.name = "last.bias"}}}});
  for (const int ranks : {1, 3})
    run_training({.ranks = ranks}, [&](TrainingRank& rank) {
      rank.train(0, 1);
      const NamedTensors tensors =
          exported(rank.state(), {.form = {.names = rules}, .chunk_bytes = 40});
      NamedTensors expected;
      for (const auto& [name, value] : whole_parameters(rank.sharded, rank.model))
        if (name == "unit1.linear.weight") {
          expected.emplace_back("unit1.a.weight", value.narrow(1, 0, 5));
          expected.emplace_back("unit1.b.weight", value.narrow(1, 5, value.size(1) - 5));
        } else {
          expected.emplace_back(name == "unit2.linear.bias" ? "last.bias" : name, value);
        }
      expect_same_tensors(tensors, rank.world.rank() == 0 ? expected : NamedTensors{}, "rules");
    });
}

struct OddImpl : torch::nn::Module {
  OddImpl() {
    register_parameter("empty", at::zeros({0, 4}));
    register_parameter("number", at::full({}, 2.5));
    register_parameter("frozen", at::arange(7), /*requires_grad=*/false);
    table = register_buffer("table", at::arange(6).view({2, 3}));
  }
  at::Tensor table;
};
TORCH_MODULE(Odd);

TEST(WeightExport, TensorsWithoutElementsNumbersAndBuffersAreTensorsToo) {
  for (const int ranks : {1, 3})
    run_ranks(ranks, [&](World& world) {
      const Mesh mesh = world.mesh({});
      Odd model;
      model->to(test_device());
      const CheckpointState state{.sharded = fully_shard(model, mesh),
                                  .buffers = {{"table", model->table}}};
      std::map<std::string, at::Tensor> tensors;
      for (const auto& [name, value] : exported(state, {.form = {.model_dtype = DType::kBFloat16}}))
        tensors[name] = value;
      ASSERT_EQ(tensors.size(), world.rank() == 0 ? 4u : 0u);
      if (world.rank() != 0) return;
      EXPECT_EQ(tensors.at("empty").sizes(), (at::IntArrayRef{0, 4}));
      EXPECT_TRUE(at::equal(tensors.at("number"), at::full({}, 2.5, at::kBFloat16)));
      EXPECT_TRUE(at::equal(tensors.at("frozen"), at::arange(7)));
      EXPECT_TRUE(at::equal(tensors.at("table"), model->table.cpu()));
    });
}

// --- files ---------------------------------------------------------------------------------------

// Main weights, rounded or not: byte by byte, several files with an index included.
TEST(WeightExport, FilesAreThoseConvertedFromACheckpoint) {
  const std::string config = R"({"model_type": "wide"})";
  OneIn part(3);
  for (const std::string& strategy : kStrategies)
    for (const at::ScalarType compute : {at::kFloat, at::kBFloat16})
      for (const std::optional<DType> dtype :
           {std::optional<DType>(), std::optional<DType>(DType::kBFloat16)}) {
        if (part.skips()) continue;
        const TempDir directory;
        Training run{.ranks = 4, .outer = 2, .compute = compute};
        run.shard.strategy = parse_strategy(strategy);
        run_training(run, [&](TrainingRank& rank) {
          rank.train(0, 2);
          save_checkpoint(directory / "run", rank.state(), {.step = 2});
          const ExportedFiles files = export_weights(
              rank.state(), directory / "streamed",
              {.max_file_bytes = 2000,
               .model_config = config,
               .model_files = {{"tokenizer.json", "{}"}}},
              {.form = {.model_dtype = dtype}, .values = WeightValues::kMain, .chunk_bytes = 1000});
          EXPECT_EQ(files.num_tensors, 2 * kUnits);
        });
        convert(
            directory / "run", directory / "converted", dtype,
            {.max_file_bytes = 2000, .config = config, .model_files = {{"tokenizer.json", "{}"}}});
        expect_same_files(directory / "streamed", directory / "converted",
                          concat(strategy, " ", c10::toString(compute)));
      }
}

TEST(WeightExport, FilesAreTheSameWhicheverRanksSharedOutTensorsAndExperts) {
  using namespace parallel;
  for (const Grids& grids : std::vector<Grids>{{2, {.tp = 2}},
                                               {4, {.outer = 2, .tp = 2}},
                                               {4, {.ep = 4, .tp = 2}},
                                               {4, {.outer = 2, .ep = 2}}}) {
    const TempDir directory;
    run_ranks(grids.ranks, [&](World& world) {
      const Mesh mesh = world.mesh(grids.mesh);
      ParallelModel model = parallel_model();
      const Sharded sharded = fully_shard(model, mesh, {});
      AdamW optimizer(sharded, kParallelAdamW);
      parallel::loss_of(model, 0, 0).backward();
      optimizer.step();
      const CheckpointState state{.sharded = sharded, .optimizer = &optimizer};
      save_checkpoint(directory / "run", state, {.step = 1});
      export_weights(state, directory / "streamed", {}, {.chunk_bytes = 64});
    });
    convert(directory / "run", directory / "converted", std::nullopt);
    expect_same_files(directory / "streamed", directory / "converted", text(grids));
  }
}

TEST(WeightExport, AnExistingDirectoryIsReplacedOnRequestAlone) {
  const TempDir directory;
  run_training({.ranks = 2}, [&](TrainingRank& rank) {
    export_weights(rank.state(), directory / "weights");
    const std::string error =
        error_of<Error>([&] { export_weights(rank.state(), directory / "weights"); });
    EXPECT_THAT(error, HasSubstr(rank.world.rank() == 0
                                     ? "is there already"
                                     : "beginning the export to " + directory / "weights" +
                                           " failed on rank 0: "));
    rank.train(0, 1);
    export_weights(rank.state(), directory / "weights",
                   {.existing = ExportFiles::Existing::kReplace});
    const NamedTensors whole = whole_parameters(rank.sharded, rank.model);
    if (rank.world.rank() != 0) return;
    const TensorCatalog catalog(directory / "weights");
    at::Tensor stored = at::empty_like(whole[0].second);
    read_elements(catalog.files(), catalog.model().at(whole[0].first), {0, stored.numel()},
                  static_cast<std::byte*>(stored.mutable_data_ptr()));
    EXPECT_TRUE(at::equal(stored, whole[0].second));
  });
}

// --- failures ------------------------------------------------------------------------------------

TEST(WeightExport, AFailureOfOneReceiverEndsAllRanksAndTheNextExportWorks) {
  for (const int failing : {0, 2})
    run_training({.ranks = 3}, [&](TrainingRank& rank) {
      const ExportOptions options{.receivers = ExportOptions::Receivers::kAllRanks,
                                  .chunk_bytes = 50};
      std::vector<std::string> seen;
      const std::string error = error_of<std::exception>([&] {
        export_weights(
            rank.state(),
            [&](const std::string& name, const at::Tensor&) {
              seen.push_back(name);
              if (rank.world.rank() == failing && seen.size() == 2)
                throw std::runtime_error("the server is gone");
            },
            options);
      });
      EXPECT_THAT(seen, ElementsAre("unit0.linear.weight", "unit0.linear.bias"));
      EXPECT_EQ(error, rank.world.rank() == failing
                           ? "the server is gone"
                           : concat("exporting 'unit0.linear.bias' failed on rank ", failing,
                                    ": the server is gone"));
      expect_same_tensors(exported(rank.state(), options),
                          whole_parameters(rank.sharded, rank.model), "after a failure");
    });
}

TEST(WeightExport, AFullDiskLeavesNoDirectory) {
  const TempDir directory;
  const FileSizeLimit limit(3000);
  run_training({.ranks = 2}, [&](TrainingRank& rank) {
    const std::string error = error_of<Error>(
        [&] { export_weights(rank.state(), directory / "weights", {}, {.chunk_bytes = 100}); });
    EXPECT_THAT(error,
                HasSubstr(rank.world.rank() == 0 ? "model.safetensors" : "failed on rank 0: "));
  });
  EXPECT_THAT(names_in(directory.path()), IsEmpty());
}

TEST(WeightExport, RefusesOptionsThatCannotBe) {
  run_training({.ranks = 1}, [&](TrainingRank& rank) {
    EXPECT_THAT(error_of<UsageError>([&] { exported(rank.state(), {.chunk_bytes = 4}); }),
                HasSubstr("chunk_bytes of an export is 4; give at least 8"));
    EXPECT_THAT(error_of<UsageError>([&] {
                  export_weights(rank.state(), "weights", {},
                                 {.receivers = ExportOptions::Receivers::kAllRanks});
                }),
                HasSubstr("receivers of an export to a directory are all ranks"));
  });
}

// --- memory --------------------------------------------------------------------------------------

struct LargeImpl : torch::nn::Module {
  LargeImpl() {
    for (int i = 0; i < 2; ++i)
      units.push_back(
          register_module("unit" + std::to_string(i), Unit<torch::nn::Linear>(4096, 1024)));
  }
  std::vector<Unit<torch::nn::Linear>> units;
};
TORCH_MODULE(Large);

// By libtorch's own count of each rank's thread. Split main weights are joined to be read.
TEST(WeightExport, NoRankTakesMoreMemoryThanWasSaid) {
  constexpr int64_t kTensorNumel = 4096 * 1024;
  for (const at::ScalarType compute : {at::kFloat, at::kBFloat16})
    for (const WeightValues values : {WeightValues::kCompute, WeightValues::kMain}) {
      const TempDir directory;
      run_ranks(2, [&](World& world) {
        const Mesh mesh = world.mesh({});
        Large model = build([] { return Large(); });
        model->to(test_device(), compute);
        const Sharded sharded = fully_shard(model, mesh, {});
        const CheckpointState state{.sharded = sharded};
        const ExportOptions options{.values = values, .chunk_bytes = int64_t{1} << 20};
        const at::ScalarType type = values == WeightValues::kMain ? at::kFloat : compute;
        const int64_t tensor_bytes = kTensorNumel * static_cast<int64_t>(c10::elementSize(type));
        ASSERT_LT(export_bytes(options), tensor_bytes);
        {
          const TensorAllocations allocations;
          export_weights(state, directory / "weights", {}, options);
          EXPECT_LE(allocations.peak_bytes(), export_bytes(options)) << c10::toString(compute);
        }
        const TensorAllocations allocations;
        export_weights(
            state, [](const std::string&, const at::Tensor&) {}, options);
        EXPECT_LE(allocations.peak_bytes(),
                  export_bytes(options) + (world.rank() == 0 ? tensor_bytes : 0))
            << c10::toString(compute);
      });
    }
}

}  // namespace
}  // namespace fsdp::testing::weight_export_test
