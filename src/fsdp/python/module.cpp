// The Python module fsdp_cpp._C.
#include "fsdp/base/log.h"
#include "fsdp/base/version.h"
#include "fsdp/python/bindings.h"
#include "fsdp/python/errors.h"
#include "fsdp/python/resources.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, module) {
  module.doc() = "The C++ side of fsdp_cpp; use fsdp_cpp instead.";
  module.attr("version") = FSDP_VERSION;
  fsdp::bind_errors(module);
  fsdp::bind_parallel(module);
  fsdp::bind_ranks(module);
  fsdp::bind_shard(module);
  fsdp::bind_optim(module);
  fsdp::bind_checkpoint(module);
  fsdp::bind_convert(module);
  fsdp::bind_patches(module);
  fsdp::bind_graph(module);
  module.def("log_info", [](const std::string& line) { fsdp::log(fsdp::LogLevel::kInfo, line); });
  module.def("log_warning",
             [](const std::string& line) { fsdp::log(fsdp::LogLevel::kWarning, line); });
  module.def("close_all", &fsdp::close_all, fsdp::WithoutGil());
  module.def("leave_to_parent", &fsdp::leave_to_parent);
}
