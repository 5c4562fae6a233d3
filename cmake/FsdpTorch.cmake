# Finds libtorch and offers it as the imported target fsdp::torch. Used by this project and, from the
# install tree, by projects that say find_package(fsdp).
#
# libtorch's own package file is not used: for CUDA builds it insists on a CUDA compiler even for
# plain C++ users, and it takes seconds. What we need is three facts: headers, libraries, version.
#
# In:  FSDP_TORCH, a libtorch folder or the `torch` folder of a Python package (cache or environment);
#      default: the .venv beside the sources.
# Out: fsdp::torch, FSDP_TORCH_DIR, FSDP_TORCH_VERSION, FSDP_TORCH_HAS_CUDA

set(_fsdp_torch "${FSDP_TORCH}")
if(NOT _fsdp_torch)
  set(_fsdp_torch "$ENV{FSDP_TORCH}")
endif()
if(NOT _fsdp_torch AND SKBUILD)  # pip builds the Python package: against the torch that its Python imports
  execute_process(COMMAND "${Python_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/tools/torch_requirement.py" --folder
    OUTPUT_VARIABLE _fsdp_torch OUTPUT_STRIP_TRAILING_WHITESPACE)
endif()
if(NOT _fsdp_torch)
  file(GLOB _fsdp_found "${PROJECT_SOURCE_DIR}/.venv/lib/python3.*/site-packages/torch")
  list(POP_FRONT _fsdp_found _fsdp_torch)
endif()
if(NOT EXISTS "${_fsdp_torch}/include/torch/headeronly/version.h")
  message(FATAL_ERROR "FSDP_TORCH is '${_fsdp_torch}', which holds no libtorch (include/torch/headeronly/version.h): "
                      "run `make setup`, or set FSDP_TORCH to an unpacked libtorch or to the torch folder of a Python package.")
endif()
get_filename_component(FSDP_TORCH_DIR "${_fsdp_torch}" REALPATH)

file(STRINGS "${FSDP_TORCH_DIR}/include/torch/headeronly/version.h" _fsdp_lines
  REGEX "#define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
string(REGEX REPLACE "[^0-9;]" "" FSDP_TORCH_VERSION "${_fsdp_lines}")
string(REPLACE ";" "." FSDP_TORCH_VERSION "${FSDP_TORCH_VERSION}")
if(FSDP_TORCH_VERSION VERSION_LESS 2.11 OR NOT FSDP_TORCH_VERSION VERSION_LESS 2.14)
  message(FATAL_ERROR "FSDP_TORCH is '${FSDP_TORCH_DIR}' with version '${FSDP_TORCH_VERSION}': fsdp.cpp supports libtorch 2.11 to 2.13.")
endif()

set(_fsdp_torch_libraries "")
foreach(_name torch torch_cpu c10 torch_cuda c10_cuda)
  if(EXISTS "${FSDP_TORCH_DIR}/lib/lib${_name}.so")
    list(APPEND _fsdp_torch_libraries "${FSDP_TORCH_DIR}/lib/lib${_name}.so")
  endif()
endforeach()
if(EXISTS "${FSDP_TORCH_DIR}/lib/libtorch_cuda.so")
  set(FSDP_TORCH_HAS_CUDA ON)
else()
  set(FSDP_TORCH_HAS_CUDA OFF)
endif()

if(NOT TARGET fsdp::torch)
  find_package(Threads REQUIRED)
  add_library(fsdp::torch INTERFACE IMPORTED)
  target_include_directories(fsdp::torch SYSTEM INTERFACE
    "${FSDP_TORCH_DIR}/include" "${FSDP_TORCH_DIR}/include/torch/csrc/api/include")
  target_compile_features(fsdp::torch INTERFACE cxx_std_20)
  # libtorch.so must stay on the link line although nothing refers to it: it pulls in the libraries
  # that register the operators (libtorch_cuda.so above all).
  target_link_libraries(fsdp::torch INTERFACE
    -Wl,--no-as-needed ${_fsdp_torch_libraries} -Wl,--as-needed Threads::Threads)
  target_link_options(fsdp::torch INTERFACE "-Wl,-rpath,${FSDP_TORCH_DIR}/lib")
endif()
