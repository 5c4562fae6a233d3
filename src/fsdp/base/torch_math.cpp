#include "fsdp/base/torch_math.h"

#include <ATen/ATen.h>
#include <ATen/Version.h>
#include <ATen/core/grad_mode.h>

#include <mutex>
#include <string_view>

#include "fsdp/base/text.h"

namespace fsdp {

namespace {

// "2024.2" of "Intel(R) oneAPI Math Kernel Library Version 2024.2-Product Build 20240605 for ...",
// "3.7.1" of "Intel(R) MKL-DNN v3.7.1 (Git Hash ...)"; "" where there is no version.
std::string number_in(std::string_view text) {
  const size_t begin = text.find_first_of("0123456789");
  if (begin == std::string_view::npos) return "";
  return std::string(text.substr(begin, text.find_first_not_of("0123456789.", begin) - begin));
}

}  // namespace

void choose_torch_math() {
  static std::once_flag chosen;
  std::call_once(chosen, [] {
    const at::NoGradGuard no_grad;
    at::cos(at::zeros({1}, at::kFloat));
  });
}

std::string torch_math_text() {
  std::string words;
  if (const std::string mkl = number_in(at::get_mkl_version()); !mkl.empty())
    words += concat("MKL ", mkl, ", ");
  if (const std::string dnn = number_in(at::get_mkldnn_version()); !dnn.empty())
    words += concat("oneDNN ", dnn, ", ");
  return words + concat("vectors of ", at::get_cpu_capability());
}

}  // namespace fsdp
