// Which peak a GPU's name stands for; names are those that drivers report.
#include "fsdp/train/peak_rates.h"

#include <gtest/gtest.h>

namespace fsdp::train::peak_rates_test {
namespace {

TEST(PeakRates, KnowsGpusByTheirWholeName) {
  const auto bf16 = [](const char* name) {
    return known_peak_tflops(name, ProductType::kBFloat16);
  };
  EXPECT_EQ(bf16("NVIDIA A100-SXM4-80GB"), 312);
  EXPECT_EQ(bf16("A100-SXM4-40GB"), 312);  // of old drivers
  EXPECT_EQ(bf16("NVIDIA H100 80GB HBM3"), 989.4);
  EXPECT_EQ(bf16("NVIDIA H100 PCIe"), 756);
  EXPECT_EQ(bf16("NVIDIA H100 NVL"), 835);
  EXPECT_EQ(bf16("NVIDIA H200"), 989.4);
  EXPECT_EQ(bf16("NVIDIA H20"), 148);
  EXPECT_EQ(bf16("NVIDIA B200"), 2250);
  EXPECT_EQ(bf16("NVIDIA GB200"), 2500);
  EXPECT_EQ(bf16("NVIDIA L40S"), 362.05);
  EXPECT_EQ(bf16("NVIDIA A10"), 125);
  EXPECT_EQ(bf16("NVIDIA GeForce RTX 4090"), 165.2);
}

TEST(PeakRates, ANameWithAWordMoreIsAnotherDevice) {
  for (const char* name :
       {"", "NVIDIA", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA H200 MIG 7g.141gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA A10G",
        "NVIDIA H2000", "AMD Instinct MI300X"})
    EXPECT_EQ(known_peak_tflops(name, ProductType::kBFloat16), std::nullopt) << name;
}

TEST(PeakRates, TypesHaveTheirOwnPeaks) {
  EXPECT_EQ(known_peak_tflops("NVIDIA H200", ProductType::kFloat16), 989.4);
  EXPECT_EQ(known_peak_tflops("NVIDIA H200", ProductType::kTensorFloat32), 494.7);
  EXPECT_EQ(known_peak_tflops("NVIDIA H200", ProductType::kFloat32), 67);
  EXPECT_EQ(known_peak_tflops("Tesla V100-SXM2-16GB", ProductType::kFloat16), 125);
  EXPECT_EQ(known_peak_tflops("Tesla V100-SXM2-16GB", ProductType::kBFloat16), std::nullopt);
}

}  // namespace
}  // namespace fsdp::train::peak_rates_test
