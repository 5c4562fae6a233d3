// plan/: bytes per parameter for every policy that somebody would choose, in the table of
// docs/optimizer.md.
#include <gtest/gtest.h>

#include <array>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "fsdp/base/text.h"
#include "fsdp/plan/forecast.h"

namespace fsdp::bytes_per_parameter_test {
namespace {

using OptionalDType = std::optional<DType>;

constexpr DType kFp32 = DType::kFloat32;
constexpr DType kBf16 = DType::kBFloat16;
constexpr DType kFp16 = DType::kFloat16;
constexpr DType kE4M3 = DType::kFloat8E4M3;

// Needs no padding and has whole blocks, so that bytes divide by it exactly.
constexpr int64_t kNumel = 1 << 14;

struct Policy {
  DType weight;
  OptionalDType main_params;
  MainStorage storage;
  OptionalDType main_grads;
  OptionalDType first_moment;
  OptionalDType second_moment;
};

// Bytes of one parameter, before it is divided among ranks.
struct PerParameter {
  double weight, main_weight, main_grad, moments, host;

  double device() const { return weight + main_weight + main_grad + moments; }
};

PerParameter forecast_of(const Policy& policy, double offload) {
  const ModelShape model{"one", {{"unit", {{"weight", {kNumel / 64, 64}, policy.weight}}}}, {0}};
  PlanOptions options;
  options.strategy = Strategy::no_shard;
  options.precision = {.main_params = policy.main_params,
                       .main_storage = policy.storage,
                       .main_grads = policy.main_grads,
                       .first_moment = policy.first_moment,
                       .second_moment = policy.second_moment};
  options.offload = offload;
  const MemoryBytes bytes = Planner(model, options).forecast().bytes;
  const auto each = [](int64_t all) { return static_cast<double>(all) / kNumel; };
  EXPECT_EQ(bytes.weight_pool + bytes.grad_pool, 0);
  return {each(bytes.weight), each(bytes.main_weight), each(bytes.main_grad), each(bytes.moments),
          each(bytes.host.total())};
}

std::string name_of(OptionalDType dtype) {
  return dtype ? std::string(fsdp::name_of(*dtype)) : "none";
}

struct Moments {
  OptionalDType first, second;
};

constexpr std::array<Moments, 7> kColumns = {{{std::nullopt, std::nullopt},
                                              {kFp32, std::nullopt},
                                              {kBf16, std::nullopt},
                                              {kFp32, kFp32},
                                              {kBf16, kBf16},
                                              {kFp16, kFp16},
                                              {kE4M3, kE4M3}}};

// Weights, main weights and gradients that somebody would choose; in the order of the table.
std::vector<Policy> rows() {
  std::vector<Policy> all;
  const auto add = [&](DType weight, OptionalDType main, MainStorage storage,
                       std::initializer_list<DType> grads) {
    for (const DType grad : grads) all.push_back({weight, main, storage, grad, {}, {}});
  };
  add(kFp32, kFp32, MainStorage::kSeparate, {kFp32, kBf16});
  add(kBf16, kFp32, MainStorage::kSplit, {kFp32, kBf16});
  add(kBf16, kFp32, MainStorage::kSeparate, {kFp32, kBf16});
  add(kBf16, std::nullopt, MainStorage::kSeparate, {kFp32, kBf16});
  add(kFp16, kFp32, MainStorage::kSeparate, {kFp32, kFp16});
  add(kFp16, std::nullopt, MainStorage::kSeparate, {kFp32, kFp16});
  add(kE4M3, kFp32, MainStorage::kSeparate, {kFp32, kBf16});
  return all;
}

std::string main_words(const Policy& policy) {
  if (!policy.main_params) return "none";
  if (*policy.main_params == policy.weight) return "the weights";
  return concat(name_of(policy.main_params), policy.weight == kBf16 ? ", " : "",
                policy.weight == kBf16 ? fsdp::name_of(policy.storage) : "");
}

// A column per choice of moments. The last one is the same for all: the bytes that stay on the
// device, and the host's bytes of an offloaded parameter beside its moments.
std::string markdown_table() {
  std::ostringstream out;
  out << "| weights | main weights | main gradients |";
  for (const Moments& moments : kColumns)
    out << " " << name_of(moments.first) << (moments.second ? " + " + name_of(moments.second) : "")
        << " |";
  out << " offloaded |\n|---|---|---|";
  for (size_t i = 0; i < kColumns.size(); ++i) out << "---:|";
  out << "---:|\n";
  for (Policy policy : rows()) {
    out << "| " << name_of(policy.weight) << " | " << main_words(policy) << " | "
        << name_of(policy.main_grads) << " |";
    for (const Moments& moments : kColumns) {
      policy.first_moment = moments.first;
      policy.second_moment = moments.second;
      out << " " << forecast_of(policy, 0).device() << " |";
    }
    policy.first_moment = policy.second_moment = std::nullopt;
    const PerParameter offloaded = forecast_of(policy, 1);
    out << " " << offloaded.device() << " / " << offloaded.host << " |\n";
  }
  return out.str();
}

TEST(BytesPerParameter, AreThoseOfTheDocumentation) {
  std::ifstream file(FSDP_DOCS "/optimizer.md");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const size_t heading = text.find("\n## Bytes per parameter\n");
  ASSERT_NE(heading, std::string::npos);
  const size_t table = text.find("| weights |", heading);
  ASSERT_NE(table, std::string::npos);
  const std::string found = text.substr(table, text.find("\n\n", table) + 1 - table);
  EXPECT_EQ(found, markdown_table()) << "put this table into docs/optimizer.md:\n"
                                     << markdown_table();
}

}  // namespace
}  // namespace fsdp::bytes_per_parameter_test
