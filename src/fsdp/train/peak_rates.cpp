#include "fsdp/train/peak_rates.h"

#include "fsdp/base/check.h"
#include "fsdp/base/glob.h"
#include "fsdp/base/text.h"

namespace fsdp::train {

namespace {

// From data sheets. Most print figures "with sparsity", which are halved here; those of GeForce and
// RTX cards are for sums in fp32, as cuBLAS computes. 0: the GPU has no such instructions.
struct PeakRates {
  std::string_view names;  // a pattern, without "NVIDIA "
  double fp32;
  double tf32;
  double bf16;
  double fp16;
};

constexpr PeakRates kPeakRates[] = {
    {"Tesla V100-SXM2-??GB", 15.7, 0, 0, 125},
    {"Tesla V100-PCIE-??GB", 14, 0, 0, 112},
    {"Tesla T4", 8.1, 0, 0, 65},
    {"A100-SXM4-??GB", 19.5, 156, 312, 312},
    {"A100-PCIE-40GB", 19.5, 156, 312, 312},
    {"A100 80GB PCIe", 19.5, 156, 312, 312},
    {"A800-SXM4-80GB", 19.5, 156, 312, 312},
    {"A800 80GB PCIe", 19.5, 156, 312, 312},
    {"A10", 31.2, 62.5, 125, 125},
    {"A30", 10.3, 82, 165, 165},
    {"A40", 37.4, 74.8, 149.7, 149.7},
    {"RTX A6000", 38.7, 77.4, 154.8, 154.8},
    {"GeForce RTX 3090", 35.6, 35.6, 71, 71},
    {"L4", 30.3, 60, 121, 121},
    {"L40", 90.5, 90.5, 181.05, 181.05},
    {"L40S", 91.6, 183, 362.05, 362.05},
    {"GeForce RTX 4090", 82.6, 82.6, 165.2, 165.2},
    {"H100 80GB HBM3", 67, 494.7, 989.4, 989.4},
    {"H100 PCIe", 51, 378, 756, 756},
    {"H100 NVL", 60, 417.5, 835, 835},
    {"H800", 67, 494.7, 989.4, 989.4},
    {"H800 PCIe", 51, 378, 756, 756},
    {"H200", 67, 494.7, 989.4, 989.4},
    {"H200 NVL", 60, 417.5, 835, 835},
    {"GH200 480GB", 67, 494.7, 989.4, 989.4},
    {"GH200 144G HBM3e", 67, 494.7, 989.4, 989.4},
    {"H20", 44, 74, 148, 148},
    {"B200", 75, 1100, 2250, 2250},
    {"GB200", 80, 1250, 2500, 2500},
    {"GeForce RTX 5090", 104.8, 104.8, 209.5, 209.5},
};

double rate_of(const PeakRates& rates, ProductType type) {
  switch (type) {
    case ProductType::kFloat32:
      return rates.fp32;
    case ProductType::kTensorFloat32:
      return rates.tf32;
    case ProductType::kBFloat16:
      return rates.bf16;
    case ProductType::kFloat16:
      return rates.fp16;
  }
  FSDP_ASSERT(false, "no such type");
}

}  // namespace

std::optional<double> known_peak_tflops(std::string_view device_name, ProductType type) {
  // Drivers before 2021 omit the maker.
  constexpr std::string_view kMaker = "NVIDIA ";
  if (device_name.starts_with(kMaker)) device_name.remove_prefix(kMaker.size());
  for (const PeakRates& rates : kPeakRates) {
    // Matches the whole name: a GPU with one more word (MIG, Laptop, D) is slower.
    if (!matches_glob(rates.names, device_name)) continue;
    const double rate = rate_of(rates, type);
    return rate > 0 ? std::optional(rate) : std::nullopt;
  }
  return std::nullopt;
}

}  // namespace fsdp::train
