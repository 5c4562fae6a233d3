// The Python module fsdp_cpp._C.
#include "fsdp/base/error.h"
#include "fsdp/base/log.h"
#include "fsdp/base/version.h"
#include "fsdp/python/bindings.h"
#include "fsdp/python/resources.h"

namespace py = pybind11;

namespace {

// Errors of ours are Python's, too: a wrong argument is a ValueError, everything else a
// RuntimeError.
void bind_errors(py::module_& module) {
  static PyObject* error = PyErr_NewExceptionWithDoc(
      "fsdp_cpp.Error", "Something a user, a file or the environment caused.", PyExc_RuntimeError,
      nullptr);
  const py::tuple bases = py::make_tuple(py::handle(error), py::handle(PyExc_ValueError));
  static PyObject* usage_error = PyErr_NewExceptionWithDoc(
      "fsdp_cpp.UsageError", "A wrong argument or option.", bases.ptr(), nullptr);
  module.attr("Error") = py::handle(error);
  module.attr("UsageError") = py::handle(usage_error);
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const fsdp::UsageError& caught) {
      PyErr_SetString(usage_error, caught.what());
    } catch (const fsdp::Error& caught) {
      PyErr_SetString(error, caught.what());
    }
  });
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "The C++ side of fsdp_cpp; use fsdp_cpp instead.";
  module.attr("version") = FSDP_VERSION;
  bind_errors(module);
  fsdp::bind_parallel(module);
  fsdp::bind_ranks(module);
  fsdp::bind_shard(module);
  fsdp::bind_optim(module);
  fsdp::bind_checkpoint(module);
  fsdp::bind_convert(module);
  fsdp::bind_patches(module);
  fsdp::bind_graph(module);
  module.def("log_info", [](const std::string& line) { fsdp::log(fsdp::LogLevel::kInfo, line); });
  module.def("close_all", &fsdp::close_all, fsdp::WithoutGil());
}
