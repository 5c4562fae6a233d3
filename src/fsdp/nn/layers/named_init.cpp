#include "fsdp/nn/layers/named_init.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <thread>
#include <utility>
#include <vector>

#include "fsdp/base/integer.h"
#include "fsdp/base/start_thread.h"

namespace fsdp::nn {

namespace {

constexpr int64_t kInitGrain = 65536;  // elements that are worth a thread: about 1 ms

uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93ull;
  x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93ull;
  return x ^ (x >> 32);
}

uint64_t hashed(uint64_t hash, std::string_view text) {  // FNV-1a
  for (const char letter : text)
    hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001B3ull;
  return hash;
}

// In (0, 1): the upper 53 bits and a half.
double unit_interval(uint64_t bits) { return (static_cast<double>(bits >> 11) + 0.5) * 0x1p-53; }

// The random bits of a parameter, by element.
class ElementBits {
 public:
  explicit ElementBits(uint64_t key) : key_(mixed(key)) {}
  uint64_t operator()(int64_t element) const {
    return mixed(key_ + 0x9E3779B97F4A7C15ull * static_cast<uint64_t>(element + 1));
  }

 private:
  uint64_t key_;
};

// Two normal numbers of two uniform ones (Box and Muller).
void fill_normal_pairs(float* values, int64_t begin, int64_t end, const ElementBits& bits,
                       double deviation) {
  for (int64_t i = begin; i < end; i += 2) {
    const double radius = deviation * std::sqrt(-2.0 * std::log(unit_interval(bits(i))));
    const double angle = 2.0 * std::numbers::pi * unit_interval(bits(i + 1));
    values[i] = static_cast<float>(radius * std::cos(angle));
    if (i + 1 < end) values[i + 1] = static_cast<float>(radius * std::sin(angle));
  }
}

// Calls part(begin, end) for pieces of [0, numel) that begin at even elements, on as many threads
// as libtorch would use. libtorch's parallel_for runs serially in code compiled without its OpenMP.
template <typename Part>
void in_threads(int64_t numel, const Part& part) {
  const int64_t num_threads = std::clamp<int64_t>(numel / kInitGrain, 1, at::get_num_threads());
  const int64_t size = round_up(ceil_div(numel, num_threads), 2);
  std::vector<std::jthread> threads;
  for (int64_t begin = size; begin < numel; begin += size)
    threads.push_back(start_thread<std::jthread>(
        "first values of parameters",
        [&part, begin, end = std::min(begin + size, numel)] { part(begin, end); }));
  part(0, std::min(size, numel));
}

// Fills on the host and copies, so that all devices have the same bits.
template <typename Fill>
void fill_on_host(const at::Tensor& parameter, const Fill& fill) {
  const at::NoGradGuard no_grad;
  const at::Tensor host = at::empty(parameter.sizes(), at::device(at::kCPU).dtype(at::kFloat));
  auto* values = host.data_ptr<float>();
  in_threads(host.numel(), [&](int64_t begin, int64_t end) { fill(values, begin, end); });
  parameter.copy_(host);
}

}  // namespace

void NamedInit::set_origin(uint64_t seed, std::string path) {
  seed_ = seed;
  path_ = std::move(path);
}

uint64_t NamedInit::key_of(std::string_view name) const {
  return mixed(seed_) ^ hashed(hashed(hashed(0xCBF29CE484222325ull, path_), "."), name);
}

void NamedInit::fill_normal(const at::Tensor& parameter, std::string_view name,
                            double standard_deviation) const {
  const ElementBits bits(key_of(name));
  fill_on_host(parameter, [&](float* values, int64_t begin, int64_t end) {
    fill_normal_pairs(values, begin, end, bits, standard_deviation);
  });
}

void NamedInit::fill_uniform(const at::Tensor& parameter, std::string_view name,
                             double bound) const {
  const ElementBits bits(key_of(name));
  fill_on_host(parameter, [&](float* values, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      values[i] = static_cast<float>(bound * (2.0 * unit_interval(bits(i)) - 1.0));
  });
}

void initialize_by_name(torch::nn::Module& model, uint64_t seed) {
  const at::NoGradGuard no_grad;
  for (const auto& item :
       model.named_modules(/*name_prefix=*/std::string(), /*include_self=*/false)) {
    auto* named = dynamic_cast<NamedInit*>(item.value().get());
    if (named == nullptr) continue;
    named->set_origin(seed, item.key());
    bool is_on_meta = false;
    for (const at::Tensor& parameter : item.value()->parameters(/*recurse=*/false))
      is_on_meta |= parameter.defined() && parameter.is_meta();
    if (!is_on_meta) named->reset_parameters();
  }
}

}  // namespace fsdp::nn
