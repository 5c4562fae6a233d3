// A blocking save needs one chunk of memory beside the state, for every type of state.
#include <fstream>
#include <string>

#include "support/checkpoint_training.h"

namespace fsdp::testing::checkpoint_memory_test {
namespace {

// The most memory this process has had since the last call with kReset, by the kernel's count.
enum class Peak { kReset, kRead };
int64_t peak_bytes(Peak what) {
  if (what == Peak::kReset) std::ofstream("/proc/self/clear_refs") << "5";
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.rfind("VmHWM:", 0) == 0) return std::stoll(line.substr(6)) * 1024;
  return 0;
}

struct LargeImpl : torch::nn::Module {
  LargeImpl() {
    for (int i = 0; i < 2; ++i)
      units.push_back(
          register_module("unit" + std::to_string(i), Unit<torch::nn::Linear>(2048, 1024)));
  }
  std::vector<Unit<torch::nn::Linear>> units;
};
TORCH_MODULE(Large);

TEST(CheckpointMemory, ABlockingSaveNeedsOneChunk) {
  constexpr int64_t kChunkBytes = int64_t{1} << 20;
  constexpr int64_t kStateBytes = 12 * 2 * 2049 * 1024;  // 48 MiB
  for (const at::ScalarType compute : {at::kFloat, at::kBFloat16})
    for (const at::ScalarType moment : {at::kFloat, at::kHalf}) {
      const TempDir directory;
      run_ranks(1, [&](World& world) {
        const Mesh mesh = world.mesh({});
        Large model;
        model->to(compute);
        const Sharded sharded = fully_shard(model, mesh, {});
        AdamW optimizer(sharded, {.first_moment = moment, .second_moment = moment});
        const CheckpointState state{.sharded = sharded, .optimizer = &optimizer};
        Checkpointer checkpointer(
            directory.path(), mesh,
            {.mode = SaveMode::kBlocking, .write = {.chunk_bytes = kChunkBytes}});
        checkpointer.save(state, {.step = 1});  // allocates one-time memory
        const int64_t before = peak_bytes(Peak::kReset);
        checkpointer.save(state, {.step = 2});
        const int64_t more = peak_bytes(Peak::kRead) - before;
        // Conversions have temporaries of a few times the chunk.
        EXPECT_LE(more, 8 * kChunkBytes) << c10::toString(compute) << " " << c10::toString(moment);
        EXPECT_LT(8 * kChunkBytes, kStateBytes / 4);
      });
    }
}

}  // namespace
}  // namespace fsdp::testing::checkpoint_memory_test
