// The Python module fsdp_cpp._C, and errors of the engine as Python's: their classes, and their
// words.
#include <torch/csrc/Exceptions.h>

#include <array>
#include <regex>
#include <string>
#include <utility>

#include "fsdp/base/error.h"
#include "fsdp/base/log.h"
#include "fsdp/base/version.h"
#include "fsdp/comm/comm_error.h"
#include "fsdp/nn/config/logit_memory.h"
#include "fsdp/python/bindings.h"
#include "fsdp/python/resources.h"
#include "fsdp/shard/engine/backward_errors.h"

namespace fsdp {

namespace py = pybind11;

namespace {

// Longer ones first, where one begins with another.
constexpr std::array<std::pair<const char*, const char*>, 27> kWords = {{
    {"a module computes with fsdp::quantized_weight(parameter), and the numbers are the main "
     "weights: Sharded::parameters(), or a checkpoint",
     "its numbers are the main weights; fsdp_cpp.state_dict(model) has what its codes say"},
    {"fsdp::AdamW or fsdp::SGD (their step.max_norm clips), clear with zero_grad() of those or of "
     "Sharded, and read Sharded::parameters()",
     "an optimizer of fsdp_cpp (max_norm clips) or of shard_optimizer() (clip_grad_norm_() of "
     "fsdp_cpp clips), clear with its zero_grad(), and read fsdp_cpp.gradients(model)"},
    {"grad() of parameter", ".grad of parameter"},
    {"a unit named in ShardOptions::units is called by fsdp::call_unit",
     "one of the units of fully_shard()"},
    {"an fsdp::AdamW or fsdp::SGD, or a reader of Sharded::parameters() or flat_shards()",
     "an optimizer of fsdp_cpp or of shard_optimizer(), or a reader of fsdp_cpp.gradients()"},
    {"Sharded::full_parameters(kWrite)", "fsdp_cpp.unshard(model, write=True)"},
    {"Sharded::full_parameters()", "fsdp_cpp.unshard(model)"},
    {"Sharded::reset()", "fsdp_cpp.reset(model)"},
    {"Sharded::parameters()", "fsdp_cpp.gradients(model)"},
    {"zero_grad() of the optimizer, of Sharded or of the whole model",
     "zero_grad() of the optimizer or of the whole model"},
    {"end_cycle()", "fsdp_cpp.end_cycle(model)"},
    {"microbatch({.last = false})", "fsdp_cpp.microbatch(model, last=False)"},
    {"ShardOptions::matrices to {.declared = true}, or name them in its `named`",
     "matrices of fully_shard()"},
    {"ShardOptions::", ""},
    {"matrices.named", "matrices"},
    {"matrices.except", "matrices_except"},
    {"offload.fraction", "offload"},
    {"offload.", "offload_"},
    {"precision.", ""},
    {"step.loss_scale.interval", "loss_scale_interval"},
    {"step.loss_scale.initial", "loss_scale"},
    {"step.", ""},
    {"nullopt", "None"},
    {"kMeanOverRanks", "'mean'"},
    {"kSumOverRanks", "'sum'"},
    {"fsdp::AdamW", "fsdp_cpp.AdamW"},
    {"fsdp::SGD", "fsdp_cpp.SGD"},
}};

// A sentence of the library's in Python's words: "Sharded::reset()" is "fsdp_cpp.reset(model)",
// "step.rounding is kNearest" is "rounding is 'nearest'".
std::string in_python(std::string sentence) {
  for (const auto& [ours, pythons] : kWords)
    for (size_t at = 0; (at = sentence.find(ours, at)) != std::string::npos;) {
      sentence.replace(at, std::string_view(ours).size(), pythons);
      at += std::string_view(pythons).size();
    }
  // Values of enumerations: kOfRankZero is 'of_rank_zero'.
  static const std::regex value(R"(\bk([A-Z][a-z]+(?:[A-Z][a-z]+)*)\b)");
  std::smatch found;
  while (std::regex_search(sentence, found, value)) {
    std::string name;
    for (const char letter : found.str(1)) {
      if (std::isupper(static_cast<unsigned char>(letter)) != 0 && !name.empty()) name += '_';
      name += static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
    }
    sentence = found.prefix().str() + "'" + name + "'" + found.suffix().str();
  }
  return sentence;
}

PyObject* error_class = nullptr;
PyObject* usage_error_class = nullptr;
PyObject* remote_error_class = nullptr;

PyObject* class_of(const Error& error) {
  if (dynamic_cast<const RemoteError*>(&error) != nullptr) return remote_error_class;
  return dynamic_cast<const UsageError*>(&error) != nullptr ? usage_error_class : error_class;
}

// Autograd's way to Python knows the classes of errors that say it themselves.
struct BackwardError final : torch::PyTorchError {
  explicit BackwardError(const Error& error)
      : torch::PyTorchError(in_python(error.what())), type(class_of(error)) {}
  PyObject* python_type() override { return type; }
  PyObject* const type;
};

// fsdp_cpp.Error, a RuntimeError, its UsageError, which is a ValueError, too, and its RemoteError,
// which another rank has caused; also for errors inside a backward, which pass through autograd.
void bind_errors(py::module_& module) {
  error_class = PyErr_NewExceptionWithDoc("fsdp_cpp.Error",
                                          "Something a user, a file or the environment caused.",
                                          PyExc_RuntimeError, nullptr);
  const py::tuple bases = py::make_tuple(py::handle(error_class), py::handle(PyExc_ValueError));
  usage_error_class = PyErr_NewExceptionWithDoc(
      "fsdp_cpp.UsageError", "A wrong argument or option.", bases.ptr(), nullptr);
  remote_error_class = PyErr_NewExceptionWithDoc("fsdp_cpp.RemoteError",
                                                 "Another rank failed; the message has its words.",
                                                 error_class, nullptr);
  module.attr("RemoteError") = py::handle(remote_error_class);
  module.attr("Error") = py::handle(error_class);
  module.attr("UsageError") = py::handle(usage_error_class);
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const Error& caught) {
      PyErr_SetString(class_of(caught), in_python(caught.what()).c_str());
    }
  });
  backward_error_translator = [](const Error& error) { throw BackwardError(error); };
  sentence_translator = in_python;
}

}  // namespace
}  // namespace fsdp

PYBIND11_MODULE(_C, module) {
  module.doc() = "The C++ side of fsdp_cpp; use fsdp_cpp instead.";
  module.attr("version") = FSDP_VERSION;
  module.attr("default_logit_bytes") = fsdp::kDefaultLogitBytes;
  fsdp::bind_errors(module);
  fsdp::bind_ranks(module);
  fsdp::bind_shard(module);
  fsdp::bind_optim(module);
  fsdp::bind_checkpoint(module);
  module.def("log_info", [](const std::string& line) { fsdp::log(fsdp::LogLevel::kInfo, line); });
  module.def("log_warning",
             [](const std::string& line) { fsdp::log(fsdp::LogLevel::kWarning, line); });
  module.def("close_all", &fsdp::close_all, fsdp::WithoutGil());
  module.def("leave_to_parent", &fsdp::leave_to_parent);
}
